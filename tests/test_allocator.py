"""How glibc hands memory to workers: the same in each, said, and never over the user's choice."""

from __future__ import annotations

import pytest

from attnbench.errors import UsageError
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.machine import allocator


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*allocator.SETTLED, *allocator.KEPT, "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("policy", allocator.POLICIES)
def test_a_worker_says_which_policy_it_runs_under(
    policy: allocator.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in allocator.settings_for_workers({}, policy).items():
        monkeypatch.setenv(name, value)
    assert allocator.policy() == policy


def test_the_two_policies_differ() -> None:
    policies = [allocator.settings_for_workers({}, policy) for policy in allocator.POLICIES]
    assert policies[0] != policies[1]
    assert all(policies)


@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "LD_PRELOAD"])
@pytest.mark.parametrize("policy", allocator.POLICIES)
def test_what_the_user_chose_is_left_alone_and_said(
    variable: str, policy: allocator.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert allocator.settings_for_workers({variable: "1"}, policy) == {}
    monkeypatch.setenv(variable, "1")
    assert allocator.policy() == "as set by the user"


def test_an_unknown_policy_is_refused_by_its_flag() -> None:
    with pytest.raises(UsageError, match="--allocator 'hoard' is not settled or keep"):
        Settings(allocator="hoard")  # type: ignore[arg-type]


def test_a_worker_that_keeps_its_memory_says_so_itself() -> None:
    with LocalRunner(Settings(device="cpu", allocator="keep")) as runner:
        assert runner.catalogue().environment["allocator"] == "keep"

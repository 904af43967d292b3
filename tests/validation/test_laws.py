"""Kernels of exact exponents: what they take, how verdicts are counted, and going on."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnbench.api import IMPLEMENTATIONS
from tests.validation.__main__ import main
from tests.validation.laws import session
from tests.validation.laws.session import LAWS, NAMES, summarise


def run(**verdicts: str) -> dict[str, Any]:
    """A run in which every verdict is the right one but those given, as `spin_1_n3`."""
    rows = []
    for kernel in NAMES:
        for law in LAWS.values():
            right = "holds" if LAWS[kernel[-1]] == law else "refuted"
            key = f"{kernel}_{law}".replace("-", "_").replace("^", "")
            rows.append([kernel, law, verdicts.get(key, right), "because"])
    return {"swept_s": 40.0, "wall_s": 60.0, "again": 3, "verdicts": rows}


@pytest.mark.parametrize(
    ("odd", "met"),
    [
        ([{}] * 20, True),
        ([{"spin_2_n2": "inconclusive"}] * 2 + [{}] * 18, True),
        ([{"spin_2_n2": "inconclusive"}] * 3 + [{}] * 17, False),
        ([{"spin_2_n2": "refuted"}] + [{}] * 19, False),
        ([{"work_3_n2": "inconclusive"}] + [{}] * 19, True),
        ([{"work_3_n2": "inconclusive"}] * 2 + [{}] * 18, False),
        ([{"work_3_n2": "holds"}] + [{}] * 19, False),
        ([], False),
    ],
)
def test_the_goals_hold_of_every_kernel_and_law(odd: list[dict[str, str]], met: bool) -> None:
    assert summarise([run(**one) for one in odd])["met"] is met


def test_a_folder_goes_on_where_it_stopped(tmp_path: Any, monkeypatch: Any) -> None:
    seeds = []

    def measured(request: Any, seed: int) -> dict[str, Any]:
        seeds.append(seed)
        return run()

    monkeypatch.setattr(session, "measured", measured)
    call = ["laws", "--output", str(tmp_path), "--name", "a", "--runs"]
    for runs in ("2", "3"):
        result = CliRunner().invoke(main, [*call, runs])
        assert result.exit_code == 0, result.output
    assert seeds == [0, 1, 2]
    assert json.loads((tmp_path / "a" / session.SUMMARY).read_text())["runs"] == 3
    assert "[3 / 0 / 0]" in (tmp_path / "a" / session.PAGE).read_text().replace("\\", "")
    refused = CliRunner().invoke(main, [*call, "3", "--neighbours", "1"])
    assert refused.exit_code == 2
    assert "choose another --name" in refused.output


def test_kernels_take_what_their_name_says(monkeypatch: Any) -> None:
    """By a clock that is moved on with every look at it."""
    from tests.validation.laws import kernels

    try:
        now = [0.0]

        def clock() -> float:
            now[0] += 1e-6
            return now[0]

        for power in (1, 2, 3):
            kernel = kernels._kernel(power, clock)
            took = []
            for n in (128, 256):
                q_BHLD = torch.zeros(1, 1, n, 8)
                begin = now[0]
                kernel(q_BHLD, q_BHLD, q_BHLD, causal=False, scale=1.0)
                took.append(now[0] - begin - kernels.OVERHEAD_S)
            assert took[1] / took[0] == pytest.approx(2**power, rel=0.05)
    finally:
        for name in (*NAMES, *kernels.LIARS):
            IMPLEMENTATIONS.remove(name)

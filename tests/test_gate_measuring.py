"""A whole gate run: real checks in real processes; rounds as they could have been measured."""

from __future__ import annotations

import random
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from attnbench.errors import ExitCode, UsageError, WorkerError
from attnbench.execution.process import Settings
from attnbench.gate.decide.data import Rules, Version, VersionName
from attnbench.gate.decide.verdict import decide
from attnbench.gate.run import measuring
from attnbench.gate.run.measuring import GateRequest, run_gate
from attnbench.gate.run.rounds import RoundError
from attnbench.planning.plan import Axes
from attnbench.schema.messages import Catalogue
from tests.gate_runs import a_round, a_run

HEADER = "import os, pathlib, torch\nfrom attnbench.api import attention\nKEPT = []\n"
KERNEL = """
    @attention("{name}")
    def {name}(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
        {first}
        return torch.nn.functional.scaled_dot_product_attention(
            q_BHLD, k_BGSD, v_BGSV * {factor}, is_causal=causal, scale=scale
        )
"""
RIGHT, WRONG = {"first": "pass", "factor": 1}, {"first": "pass", "factor": 1.01}
KEEPS = RIGHT | {"first": "KEPT or KEPT.append(torch.zeros(4, 64, 64, 64))"}


def dies(how: str) -> dict[str, Any]:
    return RIGHT | {"first": how}


def once(name: str, how: str) -> dict[str, Any]:
    """Fails in the first process that calls it."""
    file = f"pathlib.Path(__file__).parent.parent / '{name}-was-here'"
    return RIGHT | {"first": f"if not ({file}).exists(): ({file}).touch(); {how}"}


def code(**kernels: dict[str, Any]) -> str:
    text = textwrap.dedent(KERNEL)
    return HEADER + "".join(text.format(name=name, **parts) for name, parts in kernels.items())


MINE = code(mine=RIGHT)
SMALL = Axes(seq_lens=(16,), heads=(2,), head_dims=(8,))


def a_request(folder: Path, base: str | None, candidate: str, **more: Any) -> GateRequest:
    def version(name: VersionName, text: str | None) -> Version:
        file = folder / name / "kernels.py"
        file.parent.mkdir()
        if text is not None:
            file.write_text(text)
        files = () if text is None else (str(file),)
        return Version(name=name, root=str(file.parent), files=files)

    settings = Settings(device="cpu", threads=1, timeout_s=60.0)
    return GateRequest(
        base=version("base", base),
        candidate=version("candidate", candidate),
        **{"sweeps": (SMALL,), "settings": settings, **more},
    )


class Notes:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.rounds: list[str] = []
        self.warned = self.warnings.append
        self.stage = self.planned = lambda _: None

    def round_measured(self, found: Any, number: int, words: str) -> None:
        self.rounds.append(words)


@pytest.fixture
def imagined_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that are not measured: the versions are alike, and the positive control is found."""
    rng = random.Random(0)
    monkeypatch.setattr(measuring, "measure_round", lambda bench, plan, n: a_round(plan, {}, rng))


@pytest.mark.usefixtures("imagined_rounds")
def test_every_implementation_gets_its_row(tmp_path):
    """Names of installed ones belong to the files; one lost process proves nothing."""
    base = code(
        gone=RIGHT, spoilt=RIGHT, hoarder=RIGHT, same=RIGHT, naive=WRONG, dead=RIGHT, lost=RIGHT,
        busy=once("busy", "raise RuntimeError('busy')"),
    )  # fmt: skip
    candidate = code(
        spoilt=WRONG, hoarder=KEEPS, same=RIGHT, new=RIGHT, naive=RIGHT, busy=RIGHT,
        dead=dies("os._exit(9)"), lost=once("lost", "os.kill(os.getpid(), 9)"),
    )  # fmt: skip
    notes = Notes()
    sweep = replace(SMALL, kv_heads=(2, 3))
    run = run_gate(a_request(tmp_path, base, candidate, sweeps=(sweep,)), notes)
    outcome = decide(run)
    unfit = [row for row in outcome.rows if row.cell.case.kv_heads == 3]
    assert {row.verdict for row in unfit} == {"not comparable"}
    rows = {row.cell.impl: row for row in outcome.rows if row.cell.case.kv_heads == 2}
    assert {name: row.verdict for name, row in rows.items()} == {
        "gone": "not comparable",
        "spoilt": "incorrect",
        "hoarder": "regressed",
        "same": "ok",
        "naive": "not comparable",
        "dead": "incorrect",
        "lost": "ok",
        "busy": "ok",
        "new": "not comparable",
    }
    assert (rows["gone"].only_in, rows["new"].only_in) == ("base", "candidate")
    assert "held on to after the call grew" in rows["hoarder"].reason
    assert rows["lost"].notes[0].startswith("failed once on the candidate (crashed")
    assert rows["busy"].notes[0].startswith("failed once on the base (error")
    assert outcome.exit_code == ExitCode.FINDING
    same = run.checks[next(n for n, cell in enumerate(run.cells) if cell.impl == "same")]
    assert same["base"].metrics == same["candidate"].metrics
    assert run.environment["threads"] == 1
    assert len(run.rounds) == len(notes.rounds) >= Rules().screen_rounds


@pytest.mark.usefixtures("imagined_rounds")
@pytest.mark.parametrize("base", [None, "import no_such_module\n"])
def test_a_base_without_the_file_or_that_does_not_import_leaves_nothing_to_compare(tmp_path, base):
    notes = Notes()
    run = run_gate(a_request(tmp_path, base, MINE), notes)
    outcome = decide(run)
    assert outcome.exit_code == ExitCode.USAGE
    assert run.rounds == ()
    assert [("no_such_module" in text) for text in notes.warnings] == [True] * (base is not None)
    assert ("no_such_module" in outcome.rows[0].reason) == (base is not None)


def test_a_candidate_that_does_not_import_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"candidate cannot be measured.*SyntaxError"):
        run_gate(a_request(tmp_path, MINE, "def broken(:\n"), Notes())


def test_sweeps_of_foreign_implementations_or_of_nonsense_are_refused(
    recorded_catalogue: Catalogue,
) -> None:
    with pytest.raises(UsageError, match=r"sdpa \(--impls\) is in none of the files.*mine"):
        measuring._cells((replace(SMALL, impls=("sdpa",)),), recorded_catalogue, ["mine"])
    with pytest.raises(UsageError, match="kv"):
        measuring._cells((replace(SMALL, kv_heads=(3,)),), recorded_catalogue, ["mine"])


# The loop over rounds, without any process.


def measure(monkeypatch, measured, deadline=float("inf")):
    """The rounds of two versions that are alike, as `measured(plan, number)` makes them."""
    monkeypatch.setattr(measuring, "measure_round", lambda bench, plan, n: measured(plan, n))
    run = replace(a_run(), rounds=())
    bench: Any = type("Bench", (), {"settings": Settings()})
    return measuring._measure(bench, run, Notes(), deadline, lambda run, found: None)


def test_vetoed_rounds_are_measured_again_but_not_for_ever(monkeypatch):
    rng, veto = random.Random(0), "other processes kept 2 CPUs busy"

    def vetoed(plan, number):
        return structs.replace(a_round(plan, {}, rng), veto=veto)

    rounds, over = measure(monkeypatch, vetoed)
    assert not over
    assert sum(found.veto is not None for found in rounds) == measuring.MOST_VETOES
    assert len(rounds) == measuring.MOST_VETOES + Rules().screen_rounds
    assert rounds[-1].facts["not_vetoed"] == veto


def test_a_budget_that_ends_leaves_cells_open(monkeypatch):
    rng = random.Random(0)
    rounds, over = measure(monkeypatch, lambda plan, n: a_round(plan, {}, rng), time.perf_counter())
    assert (rounds, over) == ([], True)


def test_a_round_that_fails_is_measured_again_once(monkeypatch):
    rng, failing = random.Random(0), [True, False, True, True]

    def fails(plan, number):
        if failing and failing.pop(0):
            raise RoundError("a process")
        return a_round(plan, {}, rng)

    with pytest.raises(WorkerError, match="fail again and again: a process"):
        measure(monkeypatch, fails)
    assert not failing


def test_an_interrupt_does_not_wait_for_the_checks():
    """The jobs are left behind: whoever is interrupted ends, and their workers with them."""
    ended = threading.Event()

    def hangs() -> None:
        ended.wait(60)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measuring._do([hangs, interrupted], together=True)
    assert not ended.is_set()
    ended.set()


@pytest.mark.parametrize(("appended", "alike"), [("", True), ("# another comment\n", False)])
def test_a_run_with_real_rounds_says_whether_what_it_loaded_differs(tmp_path, appended, alike):
    rules = Rules(screen_rounds=2, looks=(2, 4), alpha=0.4, beta=0.4)
    run = run_gate(a_request(tmp_path, MINE, MINE + appended, rules=rules), Notes())
    assert not any(found.failures for found in run.rounds)
    assert {variant for found in run.rounds for of in found.samples.values() for variant in of} == {
        "base", "candidate", "null", "planted",
    }  # fmt: skip
    assert len(decide(run).rows) == 1
    assert run.options["loaded_alike"] is alike

"""A whole gate run: real checks and rounds in real processes; and what steers them, without any."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from attnbench.errors import ExitCode, StoreError, UsageError, WorkerError
from attnbench.execution.events import RoundMeasured, Warned, follow, warn
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.gate.decide.data import Checked, Failure, Rules
from attnbench.gate.decide.verdict import decide
from attnbench.gate.run import measuring
from attnbench.gate.run.measuring import GateRequest, run_gate
from attnbench.gate.run.rounds import RoundError
from attnbench.planning.plan import Axes
from attnbench.schema.messages import Catalogue
from attnbench.schema.record import Cell, Record
from tests import synthetic
from tests.gate_runs import OK, a_round, a_run, changed
from tests.test_gate_rounds import a_side

WRONG = "return 1.01 * sdpa(q_BHLD, k_BGSD, v_BGSV, is_causal=causal, scale=scale)"
KEEPS = "KEPT or KEPT.append(torch.zeros(4, 64, 64, 64))"
SMALL = Axes(seq_lens=(16,), heads=(2,), head_dims=(8,))


def a_request(folder: Path, **more: Any) -> GateRequest:
    """Two versions without implementations, unless `more` has others."""
    versions = {name: more.pop(name, {}) for name in ("base", "candidate")}
    versions = {name: a_side(folder, name, kernels) for name, kernels in versions.items()}
    settings = Settings(device="cpu", threads=1, timeout_s=60.0)
    return GateRequest(**versions, **{"sweeps": (SMALL,), "settings": settings, **more})


def test_every_implementation_gets_its_row_by_real_checks_and_rounds(tmp_path, monkeypatch):
    """Names of installed ones belong to the files. However busy the machine is, rounds count."""
    monkeypatch.setattr(measuring, "MOST_DISCARDED", 0)
    right = dict.fromkeys(("spoilt", "hoarder", "same"), "pass")
    base = right | {"gone": "pass", "naive": WRONG}
    candidate = right | {"spoilt": WRONG, "hoarder": KEEPS, "new": "pass", "naive": "pass"}
    events, sweep = list[object](), SMALL.having(kv_heads=(2, 3))
    rules = Rules(screen_rounds=1, looks=(1,), alpha=0.5, beta=0.5)
    request = a_request(
        tmp_path, base=base, candidate=candidate, sweeps=(sweep,), rules=rules, keep_going=True
    )
    run = follow(run_gate(request), events.append)
    outcome = decide(run)
    heads = {row: row.cell.case.kv_heads for row in outcome.rows if isinstance(row.cell, Cell)}
    unfit = [row for row, kv_heads in heads.items() if kv_heads == 3]
    assert {row.verdict for row in unfit} == {"not comparable"}
    rows = {row.cell.impl: row for row, kv_heads in heads.items() if kv_heads == 2}
    assert rows.pop("same").rounds
    assert {name: row.verdict for name, row in rows.items()} == {
        "gone": "not comparable",
        "spoilt": "incorrect",
        "hoarder": "larger",
        "naive": "not comparable",
        "new": "not comparable",
    }
    assert (rows["gone"].only_in, rows["new"].only_in) == ("base", "candidate")
    assert "held on to after the call grew" in rows["hoarder"].reason
    assert outcome.exit_code == ExitCode.FINDING
    same = run.checks[next(n for n, cell in enumerate(run.cells) if cell.impl == "same")]
    assert same["base"].metrics == same["candidate"].metrics
    assert run.environment["threads"] == 1
    assert len(run.rounds) == sum(isinstance(e, RoundMeasured) for e in events) > 0
    assert not any(found.failures for found in run.rounds)
    for found in run.rounds:
        assert {run.cells[number].impl for number in found.samples} <= {"same", "hoarder"}
        for of in found.samples.values():
            assert len({(len(samples), len(samples[0])) for samples in of.values()}) == 1
            assert all(ns > 0 for samples in of.values() for batches in samples for ns in batches)
        assert found.cpu is not None
        assert found.cpu.keys() == found.samples.keys()
        assert found.facts["cpu"] in os.sched_getaffinity(0)
    assert run.rounds[0].slowed is not None
    for of in run.rounds[0].samples.values():
        assert {"base", "candidate", "null"} <= set(of)
    left = (child.cmdline() for child in psutil.Process().children(recursive=True))
    assert not [command for command in left if "attnbench.gate.server" in command]
    assert [path.name for path in Path(run.candidate.root).rglob("*")] == ["mine.py"]
    assert run.options["loaded_alike"] is False


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch, recorded_catalogue: Catalogue) -> dict[Any, Any]:
    """No process is started: `mine` is what a file registers, and what fails stands in here.

    By version and attempt: the status of its check, or why its file does not load.
    """
    fails: dict[Any, Any] = {}
    attempts = {"base": 0, "candidate": 0}
    (info,) = [i for i in recorded_catalogue.implementations if i.name == "naive"]

    def catalogue(runner: LocalRunner) -> Catalogue:
        if why := fails.get(Path(str(runner.settings.root)).name):
            raise UsageError(why)
        runner.own = (("mine",),)
        known = (*recorded_catalogue.implementations, structs.replace(info, name="mine"))
        return structs.replace(recorded_catalogue, implementations=known)

    def run(runner: LocalRunner, jobs: Any) -> Any:
        name = Path(str(runner.settings.root)).name
        attempts[name] += 1
        status = fails.get((name, attempts[name]), "ok")
        for job in jobs:
            for cell in job.cells():
                bad = Record(cell=cell, status=status, reason="why") if status != "ok" else None
                yield bad or synthetic.ok(cell.case, cell.impl)

    monkeypatch.setattr(LocalRunner, "catalogue", catalogue)
    monkeypatch.setattr(LocalRunner, "reasons", lambda *_: {})
    monkeypatch.setattr(LocalRunner, "run", run)
    rng = random.Random(0)
    monkeypatch.setattr(measuring, "measure_round", lambda bench, plan, n: a_round(plan, {}, rng))
    return fails


@pytest.mark.parametrize("name", ["base", "candidate"])
@pytest.mark.parametrize(
    ("first", "again", "verdict"),
    [("crashed", "ok", "ok"), ("error", "error", None), ("unsupported", "ok", None)],
)
def test_one_lost_process_proves_nothing_and_is_noted(
    tmp_path, imagined, name, first, again, verdict
):
    imagined |= {(name, 1): first, (name, 2): again}
    (row,) = decide(follow(run_gate(a_request(tmp_path)))).rows
    assert row.verdict == (verdict or {"base": "not comparable", "candidate": "incorrect"}[name])
    assert row.notes == ((f"failed once on the {name} ({first}: why)",) if verdict else ())


@pytest.mark.parametrize("there", [False, True])
def test_a_base_without_the_file_or_that_does_not_import_leaves_nothing_to_compare(
    tmp_path, imagined, there
):
    events, request = list[object](), a_request(tmp_path)
    imagined["base"] = "no_such_module"
    if not there:
        request = replace(request, base=replace(request.base, files=()))
        del imagined["base"]
    run = follow(run_gate(request), events.append)
    outcome = decide(run)
    assert outcome.exit_code == ExitCode.USAGE
    assert run.rounds == ()
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert [("no_such_module" in text) for text in warnings] == [True] * there
    assert ("no_such_module" in outcome.rows[0].reason) == there


def test_a_candidate_that_does_not_import_and_sweeps_of_nonsense_are_one_line(tmp_path, imagined):
    request = a_request(tmp_path)
    for axes, says in (
        ({"impls": ("sdpa",)}, r"sdpa \(--impls\) cannot be compared; what can: mine"),
        ({"kv_heads": (3,)}, "kv"),
    ):
        with pytest.raises(UsageError, match=says):
            follow(run_gate(replace(request, sweeps=(SMALL.having(**axes),))))
    imagined["candidate"] = "SyntaxError"
    with pytest.raises(UsageError, match=r"candidate cannot be measured.*SyntaxError"):
        follow(run_gate(request))


@pytest.mark.parametrize("mode", ["exclusive process", "prohibited"])
def test_a_gpu_that_takes_one_process_is_refused_before_a_round(
    tmp_path, imagined, recorded_catalogue, monkeypatch, mode
):
    monkeypatch.setitem(recorded_catalogue.environment, "compute_mode", mode)
    monkeypatch.setattr(LocalRunner, "run", None)  # nothing is checked either
    with pytest.raises(UsageError, match=rf"compute mode is {mode}.*nvidia-smi -c DEFAULT"):
        follow(run_gate(a_request(tmp_path)))


# The loop over rounds, without any process.


def measure(
    monkeypatch, measured, deadline=float("inf"), keep=GateRequest.keep, show=warn, checks=None,
    keep_going=False,
):  # fmt: skip
    """The rounds of two versions that are alike, as `measured(plan, number)` makes them."""
    monkeypatch.setattr(measuring, "measure_round", lambda bench, plan, n: measured(plan, n))
    run = replace(a_run(), rounds=())
    run = replace(run, checks={**run.checks, **(checks or {})})
    bench: Any = None
    request: Any = type("Request", (), {"keep": staticmethod(keep), "keep_going": keep_going})
    return follow(measuring._measure(bench, run, deadline, request), show)


def test_discarded_rounds_are_measured_again_but_not_for_ever(monkeypatch):
    rng, reason = random.Random(0), "other processes kept 2 CPUs busy"

    def discarded(plan, number):
        return structs.replace(a_round(plan, {}, rng), discarded=reason)

    run = measure(monkeypatch, discarded)
    rounds = run.rounds
    assert not run.over_budget
    assert sum(found.discarded is not None for found in rounds) == measuring.MOST_DISCARDED
    assert len(rounds) == measuring.MOST_DISCARDED + Rules().screen_rounds
    assert rounds[-1].facts["counted_despite"] == reason
    # a budget that has ended leaves all cells open
    late = measure(monkeypatch, discarded, time.perf_counter())
    assert (late.rounds, late.over_budget) == ((), True)


GROWN = changed(memory_workspace_bytes=4_194_304)
WRONG_RESULT = {"candidate": Checked(status="incorrect", reason="o is off by 0.3")}


def test_a_wrong_result_ends_the_run_at_once_unless_it_is_to_keep_going_and_growth_does_not(
    monkeypatch,
):
    def fine(plan, number):
        return a_round(plan, {}, random.Random(number))

    def fails_second(plan, number):
        why = Failure(variant="candidate", code="incorrect", reason="o is off by 9")
        return a_round(plan, {}, random.Random(0), failing={1: why} if number == 1 else {})

    for measured, checks, count in (
        (fine, {2: WRONG_RESULT | {"base": OK}}, 0),
        (fails_second, {}, 2),
    ):
        run = measure(monkeypatch, measured, checks=checks)
        outcome = decide(run)
        assert (len(run.rounds), run.at_finding) == (count, True)
        assert outcome.exit_code == ExitCode.FINDING
        assert [row.verdict for row in outcome.rows].count("not timed") == 7
        assert outcome.words.endswith("; 7 not timed")
        run = measure(monkeypatch, measured, checks=checks, keep_going=True)
        assert len(run.rounds) >= Rules().screen_rounds
        assert [row.verdict for row in decide(run).rows].count("ok") == 7
    run = measure(monkeypatch, fine, checks={2: GROWN | {"base": OK}})
    outcome = decide(run)
    assert (run.at_finding, outcome.words) == (False, "1 larger")
    assert outcome.rows[2].ratio is not None, "its time is measured all the same"


def test_a_disk_that_is_full_in_the_middle_ends_no_run(monkeypatch):
    events, rng = list[object](), random.Random(0)
    kept: list[Any] = []

    def keep(run, found):
        if kept:
            raise StoreError("cannot write rounds.jsonl (No space left on device)")
        kept.append(found)

    run = measure(
        monkeypatch, lambda plan, n: a_round(plan, {}, rng), keep=keep, show=events.append
    )
    assert (len(run.rounds), run.over_budget, len(kept)) == (Rules().screen_rounds, False, 1)
    (warning,) = (event for event in events if isinstance(event, Warned))
    assert "No space left on device" in warning.message


def test_a_round_that_fails_is_measured_again_once(monkeypatch):
    rng, failing = random.Random(0), [True, False, True, True]

    def fails(plan, number):
        if failing and failing.pop(0):
            raise RoundError("a process")
        return a_round(plan, {}, rng)

    with pytest.raises(WorkerError, match="fail again and again: a process"):
        measure(monkeypatch, fails)
    assert not failing


def test_what_ends_a_run_does_not_wait_for_the_checks():
    """The jobs are left behind: whoever is interrupted ends, and their workers with them."""
    ended = threading.Event()
    for error in (UsageError, SystemExit, KeyboardInterrupt):

        def fails(error: type[BaseException] = error) -> None:
            raise error

        with pytest.raises(error):
            measuring.do_all([lambda: ended.wait(60), fails], 2)
    assert not ended.is_set()
    ended.set()

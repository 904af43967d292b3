"""A stored baseline: another machine is refused, the same cells are measured, doubt is doubt."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.errors import ExitCode, StoreError, UsageError
from attnbench.execution.runner import Settings
from attnbench.execution.session import Request, Silent, sweep
from attnbench.execution.store import INFO, load_run
from attnbench.gate.decide.rules import Rules
from attnbench.gate.run.baseline import (
    CAVEAT,
    BaselineRequest,
    compare_with_stored,
    judge,
    timed_verdict,
    times_ratio,
)
from attnbench.planning.plan import Axes
from attnbench.schema.case import Case
from attnbench.schema.record import Record, Sample
from tests import synthetic

RULES = Rules()
CASE = Case(seq_len=512)


class Heard(Silent):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warned(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture
def stored(tmp_path: Path, imagined_worker: None) -> Path:
    """A run of two cells of an imagined worker, on this machine."""
    axes = Axes(seq_lens=(128,), impls=("naive", "sdpa"))
    request = Request(sweeps=(axes,), settings=Settings(device="cpu"), output=tmp_path / "old")
    path = sweep(request, Silent())
    assert path is not None
    return path


def changed(path: Path, part: str, change: Callable[[Any], Any]) -> None:
    info = json.loads((path / INFO).read_text())
    info[part] = change(info[part])
    (path / INFO).write_text(json.dumps(info))


def request_for(path: Path, **more: Any) -> BaselineRequest:
    return BaselineRequest(run=path, output=path.parent / "new", **more)


def test_the_same_cells_are_measured_again_with_the_same_settings(stored):
    changed(stored, "settings", lambda told: told | {"seed": 7, "min_time_s": 0.03})
    found = compare_with_stored(request_for(stored), Silent())
    before, now = load_run(stored), load_run(found.path)
    assert now.info["plan"] == before.info["plan"]
    assert now.info["settings"] == before.info["settings"]
    assert now.info["options"] == {"command": "gate", "baseline": before.run_id}
    assert [row.cell for row in found.outcome.rows] == [record.cell for record in before.records]


def test_identical_times_pass_and_the_words_say_what_that_is_worth(stored):
    outcome = compare_with_stored(request_for(stored), Silent()).outcome
    assert [row.verdict for row in outcome.rows] == ["ok", "ok"]
    assert [row.ratio for row in outcome.rows] == [1.0, 1.0]
    assert outcome.exit_code == ExitCode.OK
    assert outcome.words == f"2 ok; {CAVEAT}"
    assert outcome.controls.found is None


def other_machine(environment: dict[str, Any]) -> dict[str, Any]:
    return environment | {"device_name": "Another", "threads": 64, "governor": "powersave"}


def test_another_machine_is_refused_before_anything_is_measured(stored):
    changed(stored, "environment", other_machine)
    with pytest.raises(UsageError) as refused:
        compare_with_stored(request_for(stored), Silent())
    said = str(refused.value)
    assert "\n" not in said
    assert [name for name in ("device_name was Another", "threads was 64, is", "governor was")
            if name not in said] == []  # fmt: skip
    assert "--base REF" in said
    assert "--advisory" in said
    assert not (stored.parent / "new").exists()


def test_advisory_warns_of_another_machine_and_goes_on(stored):
    changed(stored, "environment", other_machine)
    heard = Heard()
    found = compare_with_stored(request_for(stored, advisory=True), heard)
    assert len(found.differing) == 3
    assert any("device_name was Another" in warning for warning in heard.warnings)
    assert [row.verdict for row in found.outcome.rows] == ["ok", "ok"]


def test_an_older_schema_is_another_way_to_measure(stored):
    changed(stored, "schema", lambda _: 1)
    with pytest.raises(UsageError, match="schema of its records was 1, is 2"):
        compare_with_stored(request_for(stored), Silent())


def test_what_is_no_longer_here_is_listed_as_removed(stored):
    def renamed(plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"impl": "gone"} if row["impl"] == "naive" else row for row in plan]

    changed(stored, "plan", renamed)
    outcome = compare_with_stored(request_for(stored), Silent()).outcome
    verdicts = {row.cell.impl: (row.verdict, row.reason) for row in outcome.rows}
    assert verdicts["sdpa"][0] == "ok"
    assert verdicts["gone"][0] == "not comparable"
    assert "removed" in verdicts["gone"][1]
    changed(stored, "plan", lambda plan: [row | {"impl": "gone"} for row in plan])
    with pytest.raises(UsageError, match="measured gone: nothing of it is here"):
        compare_with_stored(request_for(stored), Silent())


@pytest.mark.parametrize("part", ["plan", "settings"])
def test_a_run_without_its_plan_is_refused(stored, part):
    changed(stored, part, lambda _: None)
    with pytest.raises(StoreError, match=r"has no plan to measure again"):
        compare_with_stored(request_for(stored), Silent())


def scaled(record: Record, factor: float) -> Record:
    samples = tuple(
        replace(s, time_us=s.time_us * factor, e2e_us=s.e2e_us * factor) for s in record.samples
    )
    return replace(record, samples=samples)


def judged(base: Record | None, candidate: Record | None) -> Any:
    cell = (base or candidate or synthetic.ok(CASE, "naive")).cell
    before, now = ([r] if r else [] for r in (base, candidate))
    return judge([cell], before, now, RULES)


@pytest.mark.parametrize(
    ("factor", "verdict", "exit_code"),
    [
        (1.0, "ok", ExitCode.OK),
        (1.03, "ok", ExitCode.OK),
        (1.1, "inconclusive", ExitCode.INCONCLUSIVE),
        (1.3, "regressed", ExitCode.FINDING),
        (0.7, "improved", ExitCode.OK),
    ],
)
def test_a_time_is_judged_by_its_whole_interval(factor, verdict, exit_code):
    record = synthetic.ok(CASE, "naive")
    outcome = judged(record, scaled(record, factor))
    (row,) = outcome.rows
    assert (row.verdict, outcome.exit_code) == (verdict, exit_code)
    assert row.low <= row.ratio <= row.high
    assert row.ratio == pytest.approx(factor)


def test_bytes_that_grew_regress_whatever_the_time_says():
    record = synthetic.ok(CASE, "naive", memory_retained_bytes=0)
    grown = synthetic.ok(CASE, "naive", memory_retained_bytes=2**22)
    outcome = judged(record, grown)
    (row,) = outcome.rows
    assert row.verdict == "regressed"
    assert "held on to after the call grew from 0 B to 4.0 MiB" in row.reason
    assert outcome.exit_code == ExitCode.FINDING


def test_a_wrong_result_is_incorrect_and_nothing_right_is_not_comparable():
    record = synthetic.ok(CASE, "naive")
    wrong = synthetic.failed(CASE, "naive", "incorrect", "12 x the allowed error")
    outcome = judged(record, wrong)
    assert (outcome.rows[0].verdict, outcome.exit_code) == ("incorrect", ExitCode.FINDING)
    outcome = judged(wrong, record)
    assert (outcome.rows[0].verdict, outcome.exit_code) == ("not comparable", ExitCode.USAGE)
    assert judged(record, None).exit_code == ExitCode.USAGE


def of_processes(*times_us: float) -> Record:
    samples = tuple(
        Sample(round=i, position=0, calls=1, time_us=us, e2e_us=us, process=process)
        for process, us in enumerate(times_us)
        for i in range(3)
    )
    return replace(synthetic.ok(CASE, "naive"), samples=samples)


def test_of_several_processes_the_interval_is_welchs_on_their_logarithms():
    above, below = of_processes(100, 110, 121), of_processes(90, 100)
    ratio, interval = times_ratio(above, below)
    logs = [[math.log(x) for x in xs] for xs in ((100, 110, 121), (90, 100))]
    from scipy.stats import ttest_ind

    expected = ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    assert interval == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert math.log(ratio) == pytest.approx(sum(logs[0]) / 3 - sum(logs[1]) / 2)


def test_one_process_against_several_has_no_interval_and_no_verdict():
    ratio, interval = times_ratio(of_processes(100, 110, 121), of_processes(100))
    assert ratio == 1.1
    assert interval is None
    assert timed_verdict(interval, RULES)[0] == "inconclusive"


def test_a_verdict_needs_the_whole_interval_strictly_beyond():
    assert timed_verdict((1.1, 1.2), Rules(threshold=0.1))[0] == "inconclusive"
    assert timed_verdict((1.11, 1.2), Rules(threshold=0.1))[0] == "regressed"
    assert timed_verdict((0.97, 1.09), Rules(threshold=0.1))[0] == "ok"
    assert timed_verdict((0.8, 0.96), Rules(threshold=0.1))[0] == "improved"
    assert timed_verdict((0.8, 0.97), Rules(threshold=0.1))[0] == "ok"

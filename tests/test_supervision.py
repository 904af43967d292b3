"""What a worker's death costs: the policy on drawn ends, and supervision on scripted workers."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.errors import WorkerError
from attnbench.execution.events import Working
from attnbench.execution.policy import Death, Key, Policy
from attnbench.execution.process import GARBLED, GarbledError, Settings
from attnbench.execution.runner import LocalRunner
from attnbench.execution.supervision import Supervision
from attnbench.schema.case import Case
from attnbench.schema.messages import NOBODY, CellMeasured, Done, Facts, Heartbeat, ItemChecked
from tests import synthetic

CASES = [Case(seq_len=8), Case(seq_len=16)]
KEYS = [(0, "a"), (0, "b"), (1, "a")]


def checked(index: int, impl: str) -> ItemChecked:
    return ItemChecked(index, impl, "ok")


class ScriptedWorker:
    """Plays a list of steps: a sign to leave, a result to report, an end."""

    def __init__(
        self, folder: Path, script: list[Any], words: str = "", late: bool = False
    ) -> None:
        with (folder / f"heartbeat-{id(self)}").open("w+b") as file:
            self.heartbeat = Heartbeat(file.fileno())
        self._script = iter(script)
        self.line = SimpleNamespace(last_words=lambda *_: words, ends_within=self.ends_within)
        self._late = late
        self.request: list[Any] = []

    def ends_within(self, _: float) -> bool:
        return self._late

    def send(self, request: Any) -> None:
        self.request = request

    def event(self, timeout_s: float) -> ItemChecked | CellMeasured | Facts | Done | None:
        for step in self._script:
            if step == "done":
                return Done()
            if step == "dies":
                return None
            if step == "silent":
                raise TimeoutError
            if step == "garbage":
                raise GarbledError
            if isinstance(step, Facts | CellMeasured):
                return step
            if step[0] == "at":
                self.heartbeat.write(*step[1:])
                continue
            return checked(*step)
        raise AssertionError("the script is over")

    def ended(self) -> int | None:
        if self.request and self.heartbeat.read().stage == "closed":
            self.heartbeat.write(1, 0, "samples")  # it goes on for a while
            return None
        return -11


@pytest.fixture
def play(tmp_path):
    """Run keys through scripted workers: results by key, what each was asked; `play.retried`."""

    def run(
        *scripts: list[Any], timeout_s: float = 60.0, words: str = "", keys: Any = KEYS,
        ends_soon: int | None = None, **options: Any,
    ) -> tuple[dict[Any, Any], list[Any]]:  # fmt: skip
        workers = [
            ScriptedWorker(tmp_path, script, words, number == ends_soon)
            for number, script in enumerate(scripts)
        ]
        remaining = list(workers)
        live: list[ScriptedWorker] = []

        def worker() -> Any:
            if not live:
                live.append(remaining.pop(0))
            return live[0]

        def close() -> None:
            for each in live:
                each.heartbeat.close()
            live.clear()

        settings = SimpleNamespace(timeout_s=timeout_s)
        runner: Any = SimpleNamespace(worker=worker, close=close, settings=settings)
        asks: Any = lambda keys: keys  # noqa: E731
        supervision = Supervision(runner, CASES, asks, **options)
        results = [each for each in supervision.run(keys) if not isinstance(each, Working)]
        assert {key for key, _ in results} == set(keys)
        assert len(results) == len(keys), "a key came twice"
        vars(run)["retried"] = supervision.retried
        return dict(results), [worker.request for worker in workers]

    return run


STATUSES = st.sampled_from(["ok", "ok", "incorrect", "oom", "skipped", "error"])


@given(st.data())
def test_every_cell_ends_once_whatever_becomes_of_its_workers(data: Any) -> None:
    keys = [(index, impl) for index in range(3) for impl in "ab"]
    suspects = dict.fromkeys(data.draw(st.lists(st.sampled_from(keys))), "crashed: before")
    racing, most = data.draw(st.booleans()), data.draw(st.sampled_from([None, 2]))
    policy, ended, attempts = Policy(dict.fromkeys(keys), suspects, racing, most), list[Key](), 0
    while policy.open:
        asked, at, death = policy.attempt(), list[Key](), None
        for place, key in enumerate(list(asked)):
            if data.draw(st.integers(0, 3)) == 0:
                sure, of_all = data.draw(st.booleans()), data.draw(st.booleans())
                death = Death("crashed", "samples", sure, of_all)
                at = [key] * data.draw(st.booleans())
                break
            if policy.result(key, data.draw(STATUSES), others_ran=place > 0) != "wait":
                ended.append(key)
        ended += [key for key, _ in policy.end(death, at, others_ran=len(asked) > 1)]
        attempts += 1
    assert sorted(ended) == keys
    assert attempts <= 4 * len(keys), "a cell is tried again and again"


def test_a_death_costs_the_cell_it_was_at_and_the_rest_goes_on(play):
    first = [(0, "a"), ("at", 0, 1, "check"), "dies"]
    results, asked = play(first, [(0, "a"), "done"])  # the second numbers its cases from 0 again
    assert results[0, "b"].status == "crashed"
    assert "check: " in results[0, "b"].reason
    assert "SIGSEGV" in results[0, "b"].reason
    assert asked[1] == [(1, "a")]
    assert results[1, "a"] == checked(0, "a")


def test_a_death_in_the_reference_costs_the_whole_case(play):
    results, asked = play([("at", 0, NOBODY, "reference"), "dies"], [(0, "a"), "done"])
    assert {key for key, result in results.items() if isinstance(result, Death)} == set(KEYS[:2])
    assert asked[1] == [(1, "a")]


def test_a_death_at_no_cell_is_tried_once_more_and_then_costs_the_rest(play):
    results, asked = play(["dies"], [(0, "a"), "dies"], ["dies"])
    assert asked == [KEYS, KEYS, KEYS[1:]]
    assert results[0, "a"] == checked(0, "a")
    assert results[0, "b"].status == results[1, "a"].status == "crashed"


def test_a_worker_that_hangs_is_given_up_at_its_cell(play):
    script = [(0, "a"), (0, "b"), ("at", 1, 0, "samples"), "silent", "silent"]
    results, _ = play(script, timeout_s=-1.0)
    assert results[1, "a"] == Death("timeout", "samples: no heartbeat for -1 s (--timeout)")


def test_in_a_race_a_call_that_does_not_return_ends_its_process_and_the_others_go_on(play):
    base, hangs = ("at", 0, 1, "check", "b"), ("at", 0, 0, "check", "a", 2.0)
    rest = [(0, "b"), (1, "a"), "done"]
    late = time.perf_counter() + 1e6
    results, asked = play([base, hangs, *["silent"] * 5], rest, until=late)
    assert results[0, "a"] == Death("timeout", "check: a call did not return within 2 s")
    assert asked == [KEYS, KEYS[1:]], "it is not tried once more"


def test_what_is_left_when_a_race_is_over_has_no_time_left(play):
    results, _ = play([(0, "a"), ("at", 0, 1, "check"), "silent"], until=0.0)
    assert results[0, "a"] == checked(0, "a")
    over = Death("skipped", "check: --budget was used up", of_all=True)
    assert results[0, "b"] == results[1, "a"] == over


def test_a_cell_that_is_forgotten_is_an_error_and_no_row_vanishes(play):
    results, _ = play([(0, "a"), "done"])
    assert results[0, "b"].status == results[1, "a"].status == "error"


def test_one_that_ended_too_many_workers_is_not_tried_any_further(play):
    results, asked = play([("at", 0, 0, "check"), "dies"], [(0, "b"), "done"], deaths_each=1)
    assert results[0, "a"].status == "crashed"
    assert results[1, "a"] == Death("skipped", "not tried: it ended 1 workers")
    assert asked[1] == [(0, "b")]


# Who was at it when something happened need not have done it.

OTHERS = ("at", 0, 1, "check", "b"), ("at", 0, 0, "samples", "a")  # b's code ran before a's


@pytest.mark.parametrize("event", ["dies", "silent"])
def test_who_is_blamed_beside_others_is_tried_once_more_in_a_process_of_its_own(play, event):
    rest = [(0, "b"), (1, "a"), "done"]
    results, asked = play([*OTHERS, event], [(0, "a"), "done"], rest, timeout_s=-1.0)
    assert asked == [KEYS, [(0, "a")], KEYS[1:]], "others are not measured where it was"
    assert {result.status for result in results.values()} == {"ok"}


def test_a_death_in_a_reference_after_others_costs_no_cell_of_the_case(play):
    first = [*OTHERS, (0, "a"), (0, "b"), ("at", 1, NOBODY, "reference"), "dies"]
    results, asked = play(first, [(0, "a"), "done"])
    assert asked[1] == [(1, "a")]
    assert {result.status for result in results.values()} == {"ok"}


def test_what_that_implies_is_asked_for_again_once_it_is_known(play):
    """The first may fit where it is alone, and then nothing is implied."""
    lacks = CellMeasured(0, synthetic.failed(CASES[0], "a", "oom", "out of memory"))
    implied = CellMeasured(1, synthetic.failed(CASES[1], "a", "skipped", "n=8 ran out of memory"))
    first, alone = [*OTHERS, lacks, (0, "b"), implied, "done"], [(0, "a"), "done"]
    results, asked = play(first, alone, [(0, "a"), "done"])
    assert asked == [KEYS, [(0, "a")], [(1, "a")]]
    assert {result.status for result in results.values()} == {"ok"}
    again = CellMeasured(0, implied.record)
    results, _ = play(first, [lacks, "done"], [again, "done"])
    assert (results[0, "a"], results[1, "a"]) == (lacks, again)


@pytest.mark.parametrize(("impl", "status"), [(0, "oom"), (NOBODY, "skipped")])
def test_who_is_killed_for_want_of_memory_is_oom_and_in_the_reference_skipped(
    play, monkeypatch, impl, status
):
    kills = iter(["oom_kill 1", "oom_kill 2", "oom_kill 2", "oom_kill 2"])
    monkeypatch.setattr("attnbench.execution.supervision._oom_kills", lambda: next(kills))
    monkeypatch.setattr(ScriptedWorker, "ended", lambda self: -9)
    rest = [(0, "a"), "done"] if impl == NOBODY else [(0, "b"), (1, "a"), "done"]
    results, _ = play([("at", 0, impl, "x"), "dies"], rest)
    assert (results[0, "a"].status, results[0, "a"].reason) == (
        status, "x: killed by the system for want of memory",
    )  # fmt: skip


def test_of_who_was_tried_again_it_is_known_what_had_happened(play):
    play([*OTHERS, "dies"], [(0, "a"), "done"], [(0, "b"), (1, "a"), "done"], words="bus error")
    [(key, text)] = play.retried.items()
    assert key == (0, "a")
    assert text.startswith("crashed: samples: ")
    assert text.endswith("(SIGSEGV): bus error; to blame is one of: b")


def test_who_dies_soon_after_it_was_measured_alone_is_to_blame(play):
    """What its thread does later would end whoever is measured then."""
    scripts = [*OTHERS, "dies"], [(0, "a"), "done"], [(0, "b"), (1, "a"), "done"]
    results, asked = play(*scripts, ends_soon=1)
    death = results[0, "a"]
    assert (death.status, asked) == ("crashed", [KEYS, [(0, "a")], KEYS[1:]])
    assert death.reason.endswith("killed by signal 11 (SIGSEGV), within 3 s after it was measured")
    assert "to blame" not in play.retried[0, "a"], "nobody else is"
    assert results[0, "b"].status == results[1, "a"].status == "ok"


def test_who_failed_in_an_earlier_run_is_tried_apart_from_the_others(play, monkeypatch):
    watched = []
    monkeypatch.setattr(ScriptedWorker, "ends_within", lambda *_: watched.append(1), raising=False)
    scripts = [(0, "b"), "done"], [(0, "a"), (1, "a"), "done"]
    _, asked = play(*scripts, retried={(0, "b"): "crashed: x"})
    assert asked == [[(0, "b")], [(0, "a"), (1, "a")]]
    assert watched == [1]


# Events that cannot be read.


def test_garbage_costs_the_cell_that_writes_it_even_alone(play):
    first = [("at", 0, 1, "check"), "garbage"]
    results, asked = play(first, [("at", 0, 0, "check"), "garbage"], [(0, "a"), (1, "a"), "done"])
    assert asked == [KEYS, [(0, "b")], [(0, "a"), (1, "a")]]
    assert (results[0, "b"].status, results[0, "b"].reason) == ("error", f"check: {GARBLED}")
    assert results[0, "a"] == checked(0, "a")


def test_garbage_written_in_the_turn_of_another_costs_that_one_nothing(play):
    """Cells take turns quickly: when a line is read, its writer's turn may be over."""
    first = [("at", 0, 0, "samples"), "garbage"]  # written by (0, b)
    again = [("at", 0, 0, "samples"), "garbage"]
    results, asked = play(first, [(0, "a"), "done"], again, again, [(0, "a"), "done"])
    assert asked[1:] == [[(0, "a")], KEYS[1:], [(0, "b")], [(1, "a")]]
    assert results[0, "a"] == checked(0, "a")
    assert results[0, "b"].status == "error"


@pytest.mark.parametrize("step", [(7, "a"), (-1, "a"), (0, "nobody")])
def test_results_that_cannot_be_are_garbage(play, step):
    first = [("at", 0, 0, "check"), step]
    results, _ = play(first, [("at", 0, 0, "check"), step], [(0, "b"), (1, "a"), "done"])
    assert results[0, "a"].status == "error"
    assert results[1, "a"] == checked(1, "a")


@pytest.mark.parametrize("sign", [(7, 0), (0, 7), (-7, 0), (0, -7)])
def test_a_sign_that_points_nowhere_blames_nobody(play, sign):
    """Who writes to descriptors of others may hit the heartbeat's file."""
    second = [(0, "a"), (0, "b"), (1, "a"), "done"]
    results, asked = play([("at", *sign, "garbage"), "silent", "dies"], second)
    assert asked[1] == KEYS
    assert all(isinstance(result, ItemChecked) for result in results.values())


def test_a_worker_without_its_pipe_is_judged_by_where_it_was_when_it_closed(play):
    results, asked = play(
        [("at", 0, 1, "closed"), "dies"],
        [("at", 0, 0, "closed"), "dies"],
        [(0, "a"), (1, "a"), "done"],
    )
    assert asked[1] == [(0, "b")]
    assert results[0, "b"].status == "crashed"
    assert "closes the pipe" in results[0, "b"].reason
    assert (results[0, "a"], results[1, "a"]) == (checked(0, "a"), checked(1, "a"))


# Questions with one answer.


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What a runner makes of a scripted worker that it asks something."""

    def ask(script: list[Any], timeout_s: float) -> dict[str, Any]:
        runner = LocalRunner(Settings(device="cpu", timeout_s=timeout_s))
        monkeypatch.setattr(runner, "worker", lambda: ScriptedWorker(tmp_path, script))
        return runner.ceilings(["float32"], 1)

    return ask


def test_an_answer_is_waited_for_as_long_as_the_heartbeat_moves(asked):
    """Building cuDNN's plans for hundreds of cases takes minutes."""
    busy = [("at", NOBODY, NOBODY, "supports of a"), "silent"]
    assert asked([*busy * 3, Facts({"launch_us": 1.0}), "done"], 300) == {"launch_us": 1.0}


@pytest.mark.parametrize(("timeout_s", "waited_s"), [(300, 300), (5, 120)])
def test_a_worker_that_hangs_in_a_question_is_given_up_and_says_where(asked, timeout_s, waited_s):
    says = f"^supports of a: no heartbeat for {waited_s} s"
    with pytest.raises(WorkerError, match=says):
        asked([("at", NOBODY, NOBODY, "supports of a"), "silent", "silent"], timeout_s)

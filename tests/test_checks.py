"""What compiles is checked for two minutes; its verdict says how much of the battery that was."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from attnbench.analysis.failures import failures
from attnbench.api.loader import load_built_in
from attnbench.execution import checks
from attnbench.execution.events import follow
from attnbench.report.documents.check import of_cell
from attnbench.schema.case import Case
from attnbench.schema.messages import ItemChecked
from attnbench.schema.record import Cell
from attnbench.worker.catalogue import describe
from tests.conftest import Cli

load_built_in()
SECONDS = 7.0  # that each check of a slow implementation takes


class Runner:
    """In the place of a runner: all is right, and the clock goes on by what is compiled."""

    own = ()
    now = 0.0
    slow = ("naive-compiled",)

    def __init__(self, *_):
        Runner.now = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def catalogue(self):
        return describe("cpu")

    def reasons(self, cells):
        keys = [cell.key for cell in cells]
        return dict.fromkeys(keys) | {keys[-1]: "no"}

    def check(self, items):
        for number, item in enumerate(items):
            Runner.now += SECONDS * (item.impl in self.slow)
            yield (number, item.impl), ItemChecked(number, item.impl, "ok")


@pytest.fixture(autouse=True)
def _runner(monkeypatch):
    monkeypatch.setattr(checks, "LocalRunner", Runner)
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=lambda: Runner.now))


def checked(*names: str, **options):
    options = {"device": "cpu", "dtypes": ("float32", "float64"), "files": ()} | options
    return follow(checks.run_checks(names=names, failures=failures, **options))


def count(results, impl: str, status: str) -> int:
    return sum((x.impl, x.status) == (impl, status) for x in results)


@pytest.mark.parametrize(("compiling_s", "done"), [(120.0, 18), (1000.0, 24)])
def test_what_compiles_has_24_checks_or_two_minutes_and_the_rest_is_counted(compiling_s, done):
    results = checked("naive", "naive-compiled", compiling_s=compiling_s)
    assert count(results, "naive-compiled", "ok") == done, "the last begins within the time"
    assert count(results, "naive-compiled", "left") == count(results, "naive", "ok") - done - 1
    assert not any(result.failed for result in results)
    assert count(results, "naive", "left") == 0


def test_the_brief_items_are_checked_however_long_they_take():
    results = checked("naive-compiled", compiling_s=0.0)
    done = [result.item for result in results if result.status == "ok"]
    assert done == [result.item for result in results if result.item.brief]


def test_a_budget_takes_the_most_telling_checks_of_all_and_no_more(monkeypatch, cli: Cli):
    monkeypatch.setattr(Runner, "slow", ("naive", "sdpa", "naive-compiled"))
    results = checked("naive", "sdpa", "naive-compiled", budget_s=280.0)
    done = {name: [x.item for x in results if (x.impl, x.status) == (name, "ok")]
            for name in Runner.slow}  # fmt: skip
    assert (len(done["naive"]), len(done["naive-compiled"])) == (20, 0)
    assert done["naive"] == done["sdpa"]
    assert len({item.case.mask.name for item in done["naive"]}) > 4
    assert all(item.brief for item in done["naive"][:6])
    assert "; --budget)" in cli("check", "--impls", "naive", "--budget", "99s").stdout


def test_the_verdict_says_how_much_was_checked(cli: Cli):
    assert "right (18 of" in (table := cli("check", "--impls", "naive-compiled,naive").stdout)
    assert "; --full)" in table
    assert table.count("; --full)") == 1
    assert "--full" not in cli("check", "--impls", "naive-compiled", "--full").stdout
    found = json.loads(cli("check", "--impls", "naive-compiled", "--json").stdout)
    summary, checks = (section["parts"][0]["table"] for section in found["sections"])
    assert summary[0]["passed"]["value"] == 18
    assert Counter(check["status"] for check in checks)["ok"] == 18
    assert summary[0]["left"]["value"] == Counter(check["status"] for check in checks)["left"]


def test_cases_that_are_asked_for_are_checked_in_place_of_the_battery(cli: Cli):
    options = ("--seq-lens", "40,64", "--heads", "6", "--kv-heads", "2", "--dtypes", "float32")
    found = json.loads(cli("check", "--impls", "naive", *options, "--json").stdout)
    labels = [row["case_id"] for row in found["sections"][1]["parts"][0]["table"]]
    assert len(labels) == 4, "two lengths, with gradients and without"


@pytest.mark.parametrize(("computed", "remedy"), [("float32", True), ("float64", False)])
def test_a_kernel_that_accumulates_in_float32_is_told_what_to_declare(computed, remedy):
    fault = {"explained": ["precision"], "precision": [computed, 1.1]}
    first, *_ = of_cell(Cell(case=Case(dtype="float64"), impl="mine"), fault)
    assert first.startswith(f"its error is 1.1 times that of plain attention in {computed}")
    assert first.endswith("leave float64 out of its dtypes=(…)") == remedy

"""What compiles is checked for a minute, and its verdict says how much of the battery that was."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from attnbench.api.loader import load_built_in
from attnbench.execution import checks
from attnbench.execution.events import follow
from attnbench.schema.messages import ItemChecked
from attnbench.worker.catalogue import describe
from tests.conftest import Cli

load_built_in()
SECONDS = 7.0  # that each check of a compiled implementation takes


class Runner:
    """In the place of a runner: all is right, and the clock goes on by what is compiled."""

    own = ()
    now = 0.0

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
            Runner.now += SECONDS * (item.impl == "naive-compiled")
            yield (number, item.impl), ItemChecked(number, item.impl, "ok")


@pytest.fixture(autouse=True)
def _runner(monkeypatch):
    monkeypatch.setattr(checks, "LocalRunner", Runner)
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=lambda: Runner.now))


def checked(*names: str, **options):
    options = {"device": "cpu", "dtypes": ("float32", "float64"), "files": ()} | options
    return follow(checks.run_checks(names=names, **options))


def count(results, impl: str, status: str) -> int:
    return sum((x.impl, x.status) == (impl, status) for x in results)


def test_what_compiles_is_checked_for_a_minute_and_the_rest_is_counted():
    results = checked("naive", "naive-compiled")
    assert count(results, "naive-compiled", "ok") == 9, "the last begins within the minute"
    assert count(results, "naive-compiled", "left") == count(results, "naive", "ok") - 10
    assert not any(result.failed for result in results)
    assert count(results, "naive", "left") == 0


def test_the_brief_items_are_checked_however_long_they_take():
    results = checked("naive-compiled", compiling_s=0.0)
    done = [result.item for result in results if result.status == "ok"]
    assert done == [result.item for result in results if result.item.brief]


def test_the_verdict_says_how_much_was_checked(cli: Cli):
    assert "right (9 of" in (table := cli("check", "--impls", "naive-compiled,naive").stdout)
    assert "; --full)" in table
    assert table.count("; --full)") == 1
    assert "--full" not in cli("check", "--impls", "naive-compiled", "--full").stdout
    found = json.loads(cli("check", "--impls", "naive-compiled", "--json").stdout)
    summary, checks = (section["parts"][0]["table"] for section in found["sections"])
    assert summary[0]["passed"]["value"] == 9
    assert Counter(check["status"] for check in checks)["ok"] == 9
    assert summary[0]["left"]["value"] == Counter(check["status"] for check in checks)["left"]

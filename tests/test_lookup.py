"""What `attnbench list NAME` finds, and that the commands it prints measure just that."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from attnbench.base.parameters import base_name
from attnbench.cli import plan
from attnbench.execution import session
from attnbench.execution.events import Planned
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.planning.lookup import TABLE, look_up
from attnbench.planning.plan import Plan
from attnbench.report.document import Document
from attnbench.schema.case import Case
from attnbench.schema.messages import Catalogue
from tests.conftest import Cli

ALIASES = [alias for aliases in TABLE["names"] for alias in aliases.split(", ")]


@pytest.fixture(scope="module")
def worker() -> Iterator[LocalRunner]:
    """A real one: it knows what each implementation takes."""
    with LocalRunner(Settings(device="cpu")) as runner:
        runner.catalogue()
        yield runner


@pytest.fixture
def planned(cli: Cli, worker: LocalRunner, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`planned(command)` is what this sweep would measure, as its --dry-run has it."""
    plans: list[Plan] = []
    shown = plan.document
    monkeypatch.setattr(session, "_executor", lambda *_: contextlib.nullcontext(worker))

    def document(event: Planned) -> Document:
        plans.append(event.plan)
        return shown(event)

    monkeypatch.setattr(plan, "document", document)

    def plan_of(command: str, *options: str) -> list[tuple[Case, str]]:
        program, *args = shlex.split(command)
        ended = cli(*args, "--dry-run", *options)
        assert (program, ended.exit_code) == ("attnbench", 0), ended.stderr
        return [(cell.case, cell.impl) for job in plans.pop().jobs for cell in job.cells()]

    return plan_of


def parts(case: Case, impl: str) -> set[str]:
    """What of the catalogue a cell measures."""
    texts = (impl, case.workload, case.projection, case.cache, case.mask.text, case.position.text)
    return {base_name(text) for text in texts if text}


def entries(catalogue: Catalogue) -> set[str]:
    kinds = ("workloads", "projections", "caches", "masks", "positions")
    rows = {row.name for row in catalogue.implementations}
    return rows.union(*(getattr(catalogue, kind) for kind in kinds))


@pytest.mark.slow
def test_each_name_of_the_table_and_each_entry_has_a_command_that_measures_what_it_names(
    worker, planned
):
    catalogue = worker.catalogue()
    unable = {row.name for row in catalogue.implementations if row.unavailable}
    wrong = {}
    for name in [*(names.split(", ")[0] for names in TABLE["names"]), *entries(catalogue)]:
        [(_, found, commands)], _ = look_up((name,), catalogue)
        cells = [cell for command in commands for cell in planned(command)]
        measured = set().union(*(parts(*cell) for cell in cells))
        if not found or (lacking := (found & entries(catalogue)) - measured - unable):
            wrong[name] = lacking
    assert wrong == {}


def test_what_the_table_says_of_an_entry_is_of_one_that_there_is(recorded_catalogue):
    assert TABLE["entries"].keys() <= entries(recorded_catalogue)
    assert len(set(ALIASES)) == len(ALIASES)
    rows = TABLE["names"].values()
    flags = [*(flags for _, flags in rows), *TABLE["entries"].values(), *TABLE["kinds"].values()]
    assert [text for text in flags if len(text.split()) % 2 or "  " in text] == []


@pytest.mark.usefixtures("imagined_worker")
def test_list_shows_what_makes_up_each_name_and_its_command(cli, tmp_path):
    shown = cli("list", "llama", "performer").stdout
    assert "attnbench sweep --workload attention --heads 32 --kv-heads 8" in shown
    assert "attnbench sweep --workload attention --impls sdpa,performer\n" in shown
    assert "rope  " in shown
    assert "bigbird" not in shown
    assert "caches" not in shown
    found = json.loads(cli("list", "Performer", "--json").stdout)
    ((family,),) = (section["parts"] for section in found["sections"])
    assert [(row["name"], row["family"]) for row in family["table"]] == [("performer", "linear")]
    file = tmp_path / "my file.py"
    assert f"--impl {shlex.quote(str(file))}\n" in cli("list", "gru", "--impl", file).stdout


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize(
    "name", ["prunning", "relativ", "decodr", "redundent heads", "llama-3.1-8c"]
)
def test_a_name_that_list_does_not_know_ends_in_one_that_it_does(cli, assert_refused, name):
    missed = cli("list", name)
    assert_refused(missed, f"nothing is called '{name}'")
    (suggestion,) = re.findall("did you mean '(.+?)'", missed.stderr)
    assert cli("list", suggestion).exit_code == 0


@pytest.mark.usefixtures("imagined_worker")
def test_words_that_are_nothing_together_end_in_what_is_near_to_all(cli, assert_refused):
    assert_refused(cli("list", "kv", "caching"), "'kv caching', did you mean 'kv cache'?")
    assert "implementations on" not in cli("list", "pruning").stdout

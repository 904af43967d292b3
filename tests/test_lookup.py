"""What `attnbench list NAME` finds, and that the commands it prints measure just that."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnbench.base.parameters import base_name
from attnbench.cli.progress import SweepDisplay
from attnbench.execution import session
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.planning.lookup import TABLE, look_up
from attnbench.planning.plan import Plan
from attnbench.schema.case import Case
from attnbench.schema.messages import Catalogue
from tests.conftest import Cli, Refused

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
    monkeypatch.setattr(session, "_executor", lambda *_: contextlib.nullcontext(worker))
    monkeypatch.setattr(SweepDisplay, "planned", lambda _, plan, *__: plans.append(plan))

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
    worker: LocalRunner, planned: Any
) -> None:
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


def test_what_the_table_says_of_an_entry_is_of_one_that_there_is(
    recorded_catalogue: Catalogue,
) -> None:
    assert TABLE["entries"].keys() <= entries(recorded_catalogue)
    assert len(set(ALIASES)) == len(ALIASES)
    rows = TABLE["names"].values()
    flags = [*(flags for _, flags in rows), *TABLE["entries"].values(), *TABLE["kinds"].values()]
    assert [text for text in flags if len(text.split()) % 2 or "  " in text] == []


# Position encoding, query heads that share a key/value head, mask, and heads x dims, of the model.
MODELS = {
    "transformer": ("sinusoidal", 1, "full", 512),
    "bert": ("learned", 1, "full", 768),
    "gpt2": ("learned", 1, "causal", 768),
    "llama": ("rope:500000", 4, "causal", 4096),
    "llama2": ("rope", 1, "causal", 4096),
    "mistral": ("rope", 4, "window:4096", 512),  # an eighth of its heads
    "mixtral": ("rope:1e+06", 4, "causal", 4096),
    "qwen2": ("rope:1e+06", 7, "causal", 3584),
    "falcon": ("rope", 71, "causal", 4544),
    "bloom": ("alibi", 1, "causal", 4096),
    "mpt": ("alibi", 1, "causal", 4096),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_measured_with_the_attention_that_it_has(
    worker: LocalRunner, planned: Any, name: str
) -> None:
    [(_, _, [command])], _ = look_up((name,), worker.catalogue())
    for case, _ in planned(command):
        sharing, width = case.heads // case.kv_heads, case.heads * case.head_dim
        assert (case.position.text, sharing, case.mask.text, width) == MODELS[name]
        if name == "gpt2":
            assert case.position.encoding.kind == "additive"  # none within attention
        if case.mask.before:
            assert case.mask.before < case.seq_len - 1, "the window hides nothing"


METHODS = {
    "mqa": {"decode", "sdpa", "sdpa-grouped"},
    "flash": {"sdpa-flash", "causal"},
    "memory efficient": {"chunked", "sdpa-efficient"},
    "longformer": {"sliding-window", "dilated-window", "window-global"},
    "streaming": {"window-global", "causal"},
    "sparse transformer": {"strided", "strided-fixed", "causal"},
    "nystromformer": {"nystrom"},
    "vllm": {"decode", "paged"},
    "positional encoding": {"layer", "sinusoidal", "learned", "rope", "alibi", "t5", "shaw"},
    "kv cache": {"decode", "concat", "static", "paged", "int8"},
    # Without a row, by what the catalogue says itself.
    "bigbird": {"bigbird", "bigbird-flex"},
    "reformer": {"reformer"},
    "LSH": {"reformer"},
    "favor+": {"performer"},
    "retnet": {"retention"},
    "low rank": {"linformer", "nystrom"},
    "mla": {"mla", "latent"},
    "deepseek": {"mla", "latent"},
    "multi-head latent attention": {"mla"},
    "paged attention": {"paged"},
    "sliding window": {"sliding-window", "sliding", "window"},
    "yarn": {"rope-yarn"},
    "gpt-neox": {"rope-partial"},
    "albert": {"tied-layers"},
    "cross-layer attention": {"shared"},
    "flash decoding": {"split-kv", "decode"},
    "causal": {"causal"},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_made_up_of_these_entries(recorded_catalogue: Catalogue, name: str) -> None:
    _, found = look_up((name,), recorded_catalogue)
    assert entries(found) == METHODS[name]
    assert set(found.families) == {row.family for row in found.implementations}


def test_shared_heads_are_held_against_heads_of_their_own(
    worker: LocalRunner, planned: Any
) -> None:
    for name, groups in (("gqa", {8, 2}), ("mqa", {8, 1}), ("mha", {8})):
        [(_, _, [command])], _ = look_up((name,), worker.catalogue())
        cases = [case for case, _ in planned(command)]
        assert {(case.heads, case.kv_heads) for case in cases} == {(8, g) for g in groups}


@pytest.mark.parametrize(
    "texts",
    [("flash attention",), ("FlashAttention",), ("flash-attention",), ("Flash_Attention 2",),
     ("flash", "attention"), ("FLASH",)],
)  # fmt: skip
def test_capitals_and_separators_do_not_matter(
    recorded_catalogue: Catalogue, texts: tuple[str, ...]
) -> None:
    [(_, _, commands)], found = look_up(texts, recorded_catalogue)
    assert ([row.name for row in found.implementations], len(commands)) == (["sdpa-flash"], 1)


@pytest.mark.usefixtures("imagined_worker")
def test_list_shows_what_makes_up_each_name_and_its_command(cli: Cli, tmp_path: Path) -> None:
    shown = cli("list", "llama", "performer").stdout
    assert "attnbench sweep --workload attention --heads 32 --kv-heads 8" in shown
    assert "  attnbench sweep --workload attention --impls sdpa,performer\n" in shown
    assert "rope  " in shown
    assert "bigbird" not in shown
    assert "caches" not in shown
    found = msgspec.json.decode(cli("list", "Performer", "--json").stdout, type=Catalogue)
    assert entries(found) == {"performer"}
    file = tmp_path / "my file.py"
    assert f"--impl {shlex.quote(str(file))}\n" in cli("list", "gru", "--impl", file).stdout


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize(
    ("name", "hint"),
    [("lama", "did you mean 'llama'?"), ("longfromer", "'longformer'?"), ("", "''"), ("--", ""),
     ("gpt-oss", "'gpt-oss'"), ("ring attention", ""), ("x" * 5000, "xxx")],
)  # fmt: skip
def test_an_unknown_name_is_one_line_with_the_nearest(
    cli: Cli, assert_refused: Refused, name: str, hint: str
) -> None:
    assert_refused(cli("list", "--", name), "nothing is called", hint)

"""Claims are data: files are read strictly, and verdicts follow what a run counted and timed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnbench.analysis.claims.judging import Cells, agrees, exit_code, finding, judged
from attnbench.analysis.claims.statement import Formula, Relation, read
from attnbench.errors import UnknownNameError, UsageError
from attnbench.schema.case import Case
from attnbench.schema.finding import Finding
from attnbench.schema.record import Record
from attnbench.store.runs import Run, load_run
from tests import synthetic
from tests.conftest import Cli, Refused

ROOT = Path(__file__).parent.parent
NOTES = read()
VERIFIED = load_run(ROOT / "results" / "verify-cpu")


def run_of(records: Iterable[Record]) -> Run:
    kept = list(records)
    return Run(path=Path("run"), info=VERIFIED.info, records=kept, parts=kept)


def of(workload: str) -> list[Record]:
    """The committed run's cells of one workload."""
    return [record for record in VERIFIED.records if record.cell.case.workload == workload]


def cell(case: Case, impl: str, time_us: float, **metrics: Any) -> Record:
    samples = synthetic.samples(time_us, f"{case.case_id}{impl}")
    return replace(synthetic.ok(case, impl), samples=samples, metrics=metrics)


# Ways to make a run lie.


def as_in(record: Record, where: dict[str, Any]) -> bool:
    return where.items() <= (record.cell.case.to_json() | {"impl": record.cell.impl}).items()


def metric(name: str, value: Callable[[Case, float], float], **where: Any) -> Any:
    """Replace a metric of the cells that are as in `where`."""

    def change(record: Record) -> Record:
        if not as_in(record, where) or name not in record.metrics:
            return record
        new = value(record.cell.case, record.metrics[name])
        return replace(record, metrics=record.metrics | {name: new})

    return change


def slower(factor: Callable[[Case], float], **where: Any) -> Any:
    """Multiply the times of the cells that are as in `where`."""

    def change(record: Record) -> Record:
        by = factor(record.cell.case) if as_in(record, where) else 1.0
        samples = (
            msgspec.structs.replace(s, time_us=s.time_us * by, blocks_us=()) for s in record.samples
        )
        return replace(record, samples=tuple(samples))

    return change


def ask(name: str, records: Iterable[Record]) -> Finding:
    return finding(NOTES.get(name), Cells(run_of(records)))


def stated(tmp_path: Path, body: str) -> Any:
    """The one claim of a file with this quantity and relation."""
    file = tmp_path / "mine.toml"
    head = '[[claim]]\nid = "mine"\nsource = "a paper"\nplace = "table 1"\nsays = "so"\n'
    file.write_text(head + textwrap.dedent(body))
    return read(file).get("mine")


# The notes' claims.


def test_the_committed_run_answers_the_notes_as_it_always_did():
    found = judged(NOTES, VERIFIED)
    verdicts = {claim.id: of.verdict for claim, of in found}
    assert [name for name, its in verdicts.items() if its == "refuted"] == [
        "scores-needed", "rerun-flops", "cache-concatenated", "rerun-time",
    ]  # fmt: skip
    assert {name for name, its in verdicts.items() if its == "inconclusive"} == {
        "heads-parallel", "fused-projection", "recurrent-100x",
    }  # fmt: skip
    assert exit_code(found) == 0


LIES: list[tuple[str, str, Any, str]] = [
    ("total-flops", "layer", metric("flops_counted", lambda c, v: v + c.seq_len**3), "refuted"),
    ("long-n", "layer",
     metric("flops_counted", lambda c, v: 8 * c.seq_len * c.model_width**2), "refuted"),
    ("scores-kept", "attention",
     metric("memory_saved_bytes", lambda c, v: 16 * c.heads * c.seq_len * c.head_dim), "refuted"),
    ("heads-flops", "attention", metric("flops_counted", lambda c, v: v + c.heads), "refuted"),
    ("heads-time", "attention", slower(lambda c: 1 / c.heads), "refuted"),
    ("heads-parallel", "attention", slower(lambda c: 3, impl="naive-heads"), "holds"),
    ("fused-memory", "attention",
     metric("memory_workspace_bytes", lambda c, v: 8 * c.heads * c.seq_len**2), "refuted"),
    ("attention-time", "attention", slower(lambda c: c.seq_len), "refuted"),
    ("fused-projection", "layer", slower(lambda c: 2, projection="separate"), "holds"),
    ("rerun-flops", "decode", metric("flops_counted", lambda c, v: 2**19 * c.seq_len), "holds"),
    ("generation-flops", "decode", metric("flops_counted", lambda c, v: 2**19), "refuted"),
    ("generation-rerun", "decode", metric("flops_counted", lambda c, v: 2**19 * c.seq_len),
     "refuted"),
    ("cached-time", "decode", slower(lambda c: c.seq_len**1.5, cache="static"), "refuted"),
    ("cache-speed", "decode", slower(lambda c: 1e-3, cache="none"), "refuted"),
    ("cache-concatenated", "decode", metric("memory_workspace_bytes", lambda c, v: 4096), "holds"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "cells", "change", "verdict"), LIES)
def test_a_run_that_says_otherwise_turns_the_verdict_round(name, cells, change, verdict):
    found = ask(name, map(change, of(cells)))
    assert found.verdict == verdict, found.reason
    claim = NOTES.get(name)
    assert agrees(claim, found) == (claim.open or claim.expected == verdict)


@pytest.mark.parametrize(
    ("name", "cells", "differs"),
    [
        ("total-flops", "layer", {"layers": 2}),
        ("total-flops", "layer", {"projection": "mla:rank=128"}),
        ("long-n", "layer", {"layers": 2}),
        ("cached-flops", "decode", {"layers": 2}),
        ("cached-flops", "decode", {"query_tokens": 4}),
        ("cache-grows", "decode", {"layers": 2}),
    ],
)
def test_a_claim_with_a_formula_leaves_out_the_cells_of_which_that_is_another(name, cells, differs):
    others = [
        replace(r, cell=replace(r.cell, case=Case.from_json(r.cell.case.to_json() | differs)))
        for r in of(cells)
    ]
    assert ask(name, of(cells)).verdict == "holds"
    assert ask(name, others).verdict == "inconclusive"


@pytest.mark.parametrize("records", [[], synthetic.failed_records(), synthetic.bare_records()])
def test_a_run_that_says_little_gives_no_verdict(records):
    for claim, found in judged(NOTES, run_of(records)):
        assert found.verdict == "inconclusive", claim.id
    nan = map(slower(lambda c: math.nan), of("attention"))
    assert {found.verdict for _, found in judged(NOTES, run_of(nan))} == {"inconclusive"}


# What a quantity is in a run.


def test_pairs_that_contradict_each_other_refute_every_and_leave_alike_open():
    mixed = slower(lambda c: 1.3 if c.seq_len == 64 else 0.7, projection="separate")
    assert ask("fused-projection", map(mixed, of("layer"))).verdict == "inconclusive"
    every = msgspec.structs.replace(NOTES.get("fused-projection"), cells="every")
    assert finding(every, Cells(run_of(map(mixed, of("layer"))))).verdict == "refuted"


def test_a_ratio_of_too_few_samples_has_no_interval_and_decides_nothing():
    found = ask("cache-speed", [replace(r, samples=r.samples[:4]) for r in of("decode")])
    assert found.verdict == "inconclusive"
    assert "no interval" in found.reason
    assert found.figures["low"] is None


def test_a_cache_is_not_held_slow_where_the_gpu_waits_for_the_host():
    found = judged(NOTES, load_run(ROOT / "results" / "gpu-h200"))
    by_id = {claim.id: of for claim, of in found}
    assert by_id["cache-speed"].verdict == "inconclusive"
    assert "static sdpa has device = cuda, bound = launch" in by_id["cache-speed"].reason
    assert exit_code(found) == 0


def test_pairs_with_a_side_as_in_unless_are_left_out(tmp_path):
    def verdict(unless: str) -> tuple[str, Any]:
        claim = stated(tmp_path, f"""
            quantity.kind = "ratio"
            quantity.where = {{ workload = "decode", seq_len = "largest" }}
            quantity.first = {{ cache = "none" }}
            quantity.second = {{ cache = "static" }}
            quantity.unless = {unless}
            relation = {{ is = ">", limit = 2 }}
            """)  # fmt: skip
        found = finding(claim, Cells(VERIFIED))
        return found.verdict, found.figures.get("holds", 0)

    assert verdict("{}") == verdict('{ device = "cuda" }') == ("holds", 2)
    assert verdict('{ impl = "naive" }') == ("holds", 1)
    assert verdict('{ cache = "none" }') == verdict('{ cache = "static" }') == ("inconclusive", 0)


def test_an_ambiguous_pair_decides_nothing_and_names_both(tmp_path):
    claim = stated(tmp_path, """
        quantity.kind = "ratio"
        quantity.where = { workload = "layer", seq_len = 128 }
        quantity.first = { impl = "naive" }
        quantity.second = { impl = "sdpa" }
        quantity.free = ["width", "head_dim", "heads"]
        relation = { is = ">", limit = 1 }
        """)  # fmt: skip
    found = finding(claim, Cells(VERIFIED))
    assert found.verdict == "inconclusive"
    assert "cells with impl = naive fit one other" in found.reason


@pytest.mark.parametrize(
    ("column", "relation", "verdict"),
    [
        ("time_us", 'is = "between", limit = [90, 110]', "holds"),
        ("time_us", 'is = "<", limit = 50', "refuted"),
        ("tflops", 'is = "about", limit = 0.01, tolerance = 0.001', "holds"),
        ("tflops", 'is = ">", limit = 0.02', "refuted"),
        ("time_us_min", 'is = "<", limit = 1e9', "inconclusive"),  # it has no interval
        ("flops_useful", 'is = "==", limit = 1_000_000', "holds"),
        ("error_max", 'is = "<=", limit = 1e-3', "holds"),
    ],
)
def test_a_value_carries_the_interval_that_its_column_has(tmp_path, column, relation, verdict):
    where = '{ seq_len = { min = 100, max = 200 }, status = "ok" }'
    quantity = f'quantity = {{ kind = "value", column = "{column}", where = {where} }}'
    claim = stated(tmp_path, f"{quantity}\nrelation = {{ {relation} }}")
    record = cell(Case(seq_len=128), "mine", 100.0, flops_useful=10**6, error_max=1e-4)
    found = finding(claim, Cells(run_of([record])))
    assert found.verdict == verdict, found.reason


@pytest.mark.parametrize(
    ("comparison", "limit", "tolerance", "low", "high", "verdict"),
    [
        (">", 1.0, 0.0, 1.0, 1.0, "refuted"),
        (">=", 1.0, 0.0, 1.0, 1.0, "holds"),
        ("<", 1.0, 0.0, 1.0, 1.0, "refuted"),
        ("<=", 1.0, 0.15, 0.9, 1.15, "holds"),
        ("<=", 1.0, 0.0, 0.9, 1.15, "inconclusive"),
        ("==", 3.0, 0.0, 3.0, 3.0, "holds"),
        ("==", 3.0, 0.0, 3.0001, 3.0001, "refuted"),
        ("about", 2.0, 0.2, 1.9, 2.1, "holds"),
        ("about", 2.0, 0.2, 2.3, 2.5, "refuted"),
        ("between", (1, 5), 0.05, 0.96, 5.04, "holds"),
        (">", 512.0, 0.0, 4096.0, math.inf, "holds"),
        ("<", 512.0, 0.0, 4096.0, math.inf, "refuted"),
        (">", 1.0, 0.0, None, None, "inconclusive"),
    ],
)
def test_a_relation_is_judged_by_the_whole_interval(
    comparison, limit, tolerance, low, high, verdict
):
    relation = Relation(comparison=comparison, limit=limit, tolerance=tolerance)
    assert relation.verdict(low, high) == verdict


def test_a_formula_is_arithmetic_on_sizes_and_nothing_else():
    case = Case(heads=2, seq_len=8, head_dim=4)
    assert Formula("2*B*H*(n + S)/D - 1")(case) == 15
    for text in ("__import__('os')", "n**9", "n if B else D", "n >= 3", "'n'", "n(", "", "-n"):
        with pytest.raises(UsageError):
            Formula(text)
    with pytest.raises(UnknownNameError, match="unknown size 'd'"):
        Formula("n*d")


# Files that say what makes no sense.

GOOD = """
[[claim]]
id = "good"
source = "a paper"
place = "table 1"
says = "so"
quantity = { kind = "value", column = "tflops", where = { impl = "naive" } }
relation = { is = ">", limit = 1 }
"""
BAD: list[tuple[str, str, tuple[str, ...]]] = [
    ("says", "sais", ("claim good", "unknown field `sais`")),
    ("relation =", "relations =", ("claim good", "unknown field `relations`")),
    ('"value"', '"valeu"', ("quantity.kind", "'valeu'; known: value, ratio, exponent")),
    ('column = "tflops"', 'colum = "tflops"', ("quantity", "unknown field `colum`")),
    ('"tflops"', '"tflop"', ("quantity.column", "unknown column of numbers", "'tflops'?")),
    ("impl =", "imp =", ("quantity.where: unknown column 'imp'", "'impl'?")),
    ('"naive"', "7", ("quantity.where: column impl takes text, not 7",)),
    ('impl = "naive"', 'seq_len = "long"', ("column seq_len takes numbers", "largest or smallest")),
    ('where = { impl = "naive" }', 'where = {}, per = "n*d"', ("quantity.per: unknown size 'd'",)),
    ('is = ">"', 'is = "=>"', ("relation.is", "'=>'; known: ==, <, >, <=, >=, between, about")),
    ('"value"', '"exponent"', ("quantity.column", "known: time_us, flops_counted, ")),
    ('"value"', '"exponent", axis = "N"', ("quantity.axis", "known: n, d, heads, ")),
    ("limit = 1", "limit = [1, 2]", ("relation", "one number for all others")),
    ('is = ">"', 'is = "about"', ("relation", "about needs a tolerance")),
    ("place =", "open = true\nright = 'this'\nplace =", ("claim good", "open")),
    ('id = "good"', 'id = "two words"', ("claim two words, id",)),
    ("[[claim]]", "[[claims]]", ("holds no claims; write each as [[claim]]",)),
    (GOOD, GOOD + GOOD, ("claim good, id: another claim has it already",)),
    (GOOD, "claim = [3]", ("claim number 1", "got `int`")),
    (GOOD, "so says the paper", ("not TOML",)),
]


@pytest.mark.parametrize(("old", "new", "says"), BAD, ids=[str(row[2][-1])[:30] for row in BAD])
def test_a_file_that_makes_no_sense_is_one_line(
    old, new, says, cli: Cli, assert_refused: Refused, tmp_path
):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace(old, new, 1))
    assert_refused(cli("claims", "--file", file, "--output", tmp_path), "mine.toml", *says)
    missing = tmp_path / "missing.toml"
    assert_refused(cli("claims", "--file", missing), "missing.toml", "--file")


# The command.


def test_a_verdict_that_is_not_expected_exits_1_and_is_named(cli: Cli, tmp_path):
    lying = map(metric("flops_counted", lambda c, v: v + c.seq_len**2), of("decode"))
    synthetic.write_run(tmp_path, "lying", lying)
    result = cli("claims", "lying", "--output", tmp_path, "--only", "cached-flops,cache-grows")
    assert result.exit_code == 1
    assert "not as expected: cached-flops" in result.stdout

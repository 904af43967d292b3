"""`sweep --shard` and `attnbench merge`: parts of a plan, measured apart, are one run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.base.units import parse_shard
from attnbench.errors import UsageError
from attnbench.planning.plan import Axes, Plan, expand, make_plan, sharded, weight
from attnbench.schema.record import Cell
from attnbench.store.runs import INFO, RECORDS, load_run
from tests import synthetic
from tests.conftest import TINY, Cli

AXES = ("--seq-lens", "16..128", "--positions", "none,rope", "--impls", "naive,sdpa", *TINY)


def planned(lens: list[int], heads: list[int], masks: list[str], refused: int) -> Plan:
    axes = Axes(seq_lens=tuple(lens), heads=tuple(heads), masks=tuple(masks))
    cells = [Cell(case=c, impl=i) for c in expand(axes, "cpu") for i in ("naive", "sdpa")]
    reasons = {cell.key: "no" if i % 7 == refused else None for i, cell in enumerate(cells)}
    return make_plan(cells, reasons, processes=2)


plans = st.builds(
    planned,
    st.lists(st.sampled_from([16, 32, 64, 4096]), min_size=1, unique=True),
    st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True),
    st.sampled_from([["full"], ["full", "causal"], ["causal", "window:8"]]),
    st.integers(0, 7),
)


@given(plans, st.integers(1, 30))
def test_the_union_of_all_shards_is_the_plan_and_none_overlap(plan, count):
    groups = [group for job in plan.jobs for group in job.groups]
    shards = [sharded(plan, i, count) for i in range(1, min(count, len(groups)) + 1)]
    for parts, whole in (
        ([cell.key for shard in shards for cell in shard.cells], plan.cells),
        *(
            ([cell.key for shard in shards for cell in shard.passes[i]], plan.passes[i])
            for i in range(2)
        ),
    ):
        assert sorted(parts) == sorted(cell.key for cell in whole)
    assert [r for shard in shards for r in shard.decided] == list(plan.decided)
    own = [g for shard in shards for job in shard.jobs for g in job.groups]
    assert sorted(map(repr, own)) == sorted(map(repr, groups)), "what is compared stays together"
    if len(groups) < count:
        with pytest.raises(UsageError, match=f"at most {len(groups)} shards"):
            sharded(plan, len(groups) + 1, count)
    loads = [sum(weight(c.case) for c in shard.passes[0]) for shard in shards]
    heaviest = max((sum(len(i) * weight(c) for c, i in group) for group in groups), default=0)
    assert max(loads, default=0) - min(loads, default=0) <= heaviest


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "a/b", "1/3/5", "-1/2", "1/9999999"])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(UsageError, match="takes a part and of how many"):
        parse_shard(text, "--shard")
    assert parse_shard("3/8", "--shard") == (3, 8)


def plan_of(path: Path) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in load_run(path).info["plan"])


def shards(cli: Cli, output: Path, count: int, *options: Any) -> list[str]:
    names = [f"s{i}" for i in range(1, count + 1)]
    for i, name in enumerate(names, start=1):
        where = ("--output", output, "--name", name)
        result = cli("sweep", *AXES, *where, "--shard", f"{i}/{count}", *options)
        assert result.exit_code == 0, result.stderr
    return names


@pytest.mark.usefixtures("imagined_worker")
class TestMerged:
    def test_shards_are_the_run_that_one_sweep_would_have_made(self, cli, tmp_path):
        assert cli("sweep", *AXES, "--output", tmp_path, "--name", "whole").exit_code == 0
        names = shards(cli, tmp_path, 3)
        result = cli("merge", *names, "--output", tmp_path, "--name", "all")
        assert result.exit_code == 0, result.stderr
        merged, whole = load_run(tmp_path / "all"), load_run(tmp_path / "whole")
        assert plan_of(merged.path) == plan_of(whole.path)
        assert {r.cell.key for r in merged.records} == {r.cell.key for r in whole.records}
        assert len(merged.parts) == len(whole.parts) == 16
        assert not merged.unfinished
        assert [source["run_id"] for source in merged.info["merged"]] == names
        assert [source["shard"]["numbers"] for source in merged.info["merged"]] == [[1], [2], [3]]
        assert "shard" not in merged.info
        assert cli("sweep", "--resume", merged.path).exit_code == 0, "nothing is left to measure"
        assert cli("export", merged.path).stdout.count("\n") == 17

    def test_a_shard_that_is_missing_is_named(self, cli, tmp_path, assert_refused):
        names = shards(cli, tmp_path, 3)
        result = cli("merge", *names[::2], "--output", tmp_path, "--name", "all")
        assert_refused(result, "are missing: 2/3;", "--partial")
        assert not (tmp_path / "all").exists()
        where = ("--output", tmp_path, "--partial", "--name")
        result = cli("merge", *names[::2], *where, "two")
        assert "shards of its plan are missing: 2/3" in result.stdout.replace("\n", " ")
        assert "2/3" in load_run(tmp_path / "two").unfinished
        assert cli("merge", "two", names[1], *where, "all").exit_code == 0
        merged = load_run(tmp_path / "all")
        assert (len(merged.records), merged.unfinished) == (16, "")
        assert "shard" not in merged.info

    def test_an_unfinished_shard_is_said_and_can_be_gone_on_with(self, cli, tmp_path):
        names = shards(cli, tmp_path, 2)
        file = tmp_path / names[1] / RECORDS
        file.write_text(file.read_text().splitlines(keepends=True)[0])
        synthetic.edit(
            file.with_name(INFO), lambda info: info["environment"].pop("ceilings") and info
        )
        result = cli("merge", *names, "--output", tmp_path, "--name", "all")
        assert "planned cells measured" in result.stdout.replace("\n", " ")
        assert "ceilings" in load_run(tmp_path / "all").info["environment"]
        assert cli("sweep", "--resume", tmp_path / "all").exit_code == 0
        assert not load_run(tmp_path / "all").unfinished

    def test_cells_that_are_in_two_runs_are_refused(self, cli, tmp_path, assert_refused):
        first, *_ = shards(cli, tmp_path, 2)
        result = cli("merge", first, first, "--output", tmp_path)
        assert_refused(result, "is in both", "leave one of them out")
        assert_refused(cli("merge", first, "--output", tmp_path), "two runs or more")

    @pytest.mark.parametrize(("change", "says"), [
        (lambda info: info | {"attnbench": "9"}, "attnbench 0.1.0 and 9; --mixed"),
        (lambda info: info | {"settings": info["settings"] | {"seed": 7}}, "seed 0 and 7"),
        (lambda info: info["settings"].pop("prune") and info, "prune True and None"),
        (lambda info: info | {"shard": info["shard"] | {"plan": "x"}}, "the plan"),
        (lambda info: info | {"files": {"a.py": "0f"}}, "the files of --impl"),
    ])  # fmt: skip
    def test_runs_of_two_experiments_are_refused(self, cli, tmp_path, assert_refused, change, says):
        names = shards(cli, tmp_path, 2)
        synthetic.edit(tmp_path / names[1] / INFO, change)
        result = cli("merge", *names, "--output", tmp_path, "--name", "all")
        assert_refused(result, "are not of one experiment", says)
        mixed = cli("merge", *names, "--output", tmp_path, "--mixed")
        assert (mixed.exit_code == 0) == ("--mixed" in says)

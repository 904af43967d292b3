"""What it costs to place jobs on a Ray cluster: cells that do nothing, on four slots here."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.execution import cluster
from attnbench.execution.process import Settings
from attnbench.execution.session import Listener, SweepRequest, sweep
from attnbench.execution.store import load_run
from attnbench.planning.plan import Axes, Job, Plan
from attnbench.schema.record import Record

EACH = 20  # implementations of a case
GOAL = 0.05
EMPTY = """
from attnbench.api import attention

def register(name):
    @attention(name)
    def empty(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
        return v_BGSV  # wrong, so that it is not timed

for i in range({}):
    register(f"empty{{i}}")
"""


class TimedSlot(cluster._Slot):
    """A slot that gives as seconds those spent on a job, and those since the one before ended."""

    began = inside_s = 0.0

    def begin(self, job: Job, limits: Any, suspects: Any) -> Iterator[Record | cluster.Known]:
        begin = time.perf_counter()
        self.began = self.began or begin
        for found in super().begin(job, limits, suspects):
            self.inside_s += time.perf_counter() - begin  # to hand a record over is not within
            if isinstance(found, Record):
                yield found
            else:
                since_s, spent_s = time.perf_counter() - self.began, self.inside_s
                self.began, self.inside_s = time.perf_counter(), 0.0
                yield found[0], spent_s, since_s
            begin = time.perf_counter()

    def known(self) -> cluster.Known:
        return self.runner.environments, 0.0, 0.0


@dataclass
class _Watch(Listener):
    """Notes when records come, and calls `at_half` once half of them are there."""

    at_half: Callable[[], None]
    total: int = 0
    seen: int = 0
    first: float = 0.0
    last: float = 0.0

    def planned(self, plan: Plan, path: Path | None, *_: object) -> None:
        self.total = sum(map(len, plan.passes))

    def recorded(self, record: Record) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.seen += 1
        if self.seen == self.total // 2:
            self.at_half()


def examine(cells: int, kill: bool, folder: Path, tell: Callable[[str], None]) -> bool:
    """Whether little was spent on scheduling, and (with `kill`, of a node) every cell is there."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    from tests.validation import cluster as own

    file = folder / "empty.py"
    file.write_text(EMPTY.format(EACH))
    node = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    short = tempfile.mkdtemp(prefix="ray-")  # sockets in it have short names
    os.environ["RAY_TMPDIR"] = short  # a `temp_dir` is not where Ray leaves its address
    made = Cluster(initialize_head=True, head_node_args=node | {"node_name": "a"})
    second = made.add_node(**node, node_name="b")
    ray.cloudpickle.register_pickle_by_value(own)
    before, cluster._Slot = cluster._Slot, own.TimedSlot  # type: ignore[misc]
    watch = _Watch(lambda: made.remove_node(second, allow_graceful=False) if kill else None)
    runners: list[cluster.RayRunner] = []
    leave = cluster.RayRunner.__exit__
    try:
        cluster.RayRunner.__exit__ = lambda r, *_: runners.append(r) or leave(r)  # type: ignore
        path = sweep(
            SweepRequest(
                sweeps=(Axes(
                    impls=tuple(f"empty{i}" for i in range(EACH)), heads=(1,), head_dims=(8,),
                    seq_lens=tuple(range(1, cells // EACH + 1)),
                ),),
                settings=Settings(device="cpu", files=(str(file),)),
                output=folder, name="killed" if kill else "whole", ray=made.address,
            ),
            watch,
        )  # fmt: skip
    finally:
        cluster.RayRunner.__exit__, cluster._Slot = leave, before  # type: ignore
        made.shutdown()
        shutil.rmtree(short, ignore_errors=True)
    assert path is not None, "no dry run was asked for"
    run = load_run(path)
    lines = len((path / "records.jsonl").read_text().splitlines())
    wall_s, (runner,) = watch.last - watch.first, runners
    outside_s = runner.ceilings_s - runner.start_up_s
    share = outside_s / runner.ceilings_s
    tell(
        f"{'one of two nodes killed: ' * kill}{lines} records of {len(run.records)} cells,"
        f" {watch.total} planned, in {wall_s:.1f} s; {share:.1%} of the time of"
        f" {len(runner._places)} slots is between their jobs and records,"
        f" {1e3 * outside_s / max(1, lines):.2f} ms a cell"
    )
    whole = lines == len(run.records) == watch.total and not run.unfinished
    return whole and (kill or share <= GOAL)

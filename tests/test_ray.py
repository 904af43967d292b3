"""Sweeps on a real Ray cluster of two nodes on this machine, one of which is lost."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

import attnbench.execution.cluster as cluster_module
from attnbench.errors import UsageError
from attnbench.execution.cluster import RayRunner, _connected, _staged
from attnbench.execution.events import Warned
from attnbench.execution.process import Settings
from attnbench.planning.plan import Job
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record
from attnbench.store.runs import load_run
from tests import synthetic
from tests.conftest import (
    COMMAND,
    TINY,
    environment,
    exported,
    run_attnbench,
    run_script,
    wait_until,
)

LENGTHS = "16,24,48,56,64"
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}

# It multiplies with what lies beside it. From n = 48 on it waits: on node a until b does, on b for
# a file that nobody ever writes.
HOLDER = """
import os, pathlib, time
import attnbench
from attnbench.api import attention
from beside import weights

@attention("holder", time="n^2 d")
def holder(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
    here, there = os.environ["TEST_NODE"], pathlib.Path(os.environ["TEST_FLAGS"])
    if q_BHLD.shape[2] >= 48:
        if here == "b" and not (there / "b").exists():
            (there / "b.new").write_text(f"{os.getpid()} {__file__} {attnbench.__file__}")
            (there / "b.new").rename(there / "b")
        while not (there / ("never" if here == "b" else "b")).exists():
            time.sleep(0.02)
    return weights(q_BHLD, k_BGSD, scale) @ v_BGSV
"""
BESIDE = """
def weights(q_BHLD, k_BGSD, scale):
    return (q_BHLD @ k_BGSD.transpose(-1, -2) * scale).softmax(-1)
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flags")


@pytest.fixture(scope="module")
def cluster(flags: Path) -> Iterator[Any]:
    """A cluster with one CPU, on node a."""
    from ray.cluster_utils import Cluster

    if " " in sys.executable:  # which Ray gives a shell unquoted
        pytest.skip(f"Ray starts no worker with {sys.executable}")
    own = NODE | {"node_name": "a", "env_vars": {"TEST_NODE": "a", "TEST_FLAGS": str(flags)}}
    with (
        pytest.MonkeyPatch.context() as patched,
        # Sockets in it have short names, and no umlauts.
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
    ):
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("RAY_TMPDIR", folder)  # a `temp_dir` is not where Ray leaves its address
        made = Cluster(initialize_head=True, head_node_args=own)
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def survived(
    cluster: Any, flags: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A sweep during which node b was killed, at a cell: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("sweeps")
    (folder / "own").mkdir()
    (folder / "own" / "beside.py").write_text(BESIDE)
    (folder / "own" / "holder.py").write_text(HOLDER)
    variables = {"TEST_NODE": "b", "TEST_FLAGS": str(flags)}
    lost = cluster.add_node(**NODE, node_name="b", env_vars=variables)
    cells = ["--impl", "own/holder.py", "--impls", "holder,naive", "--seq-lens", LENGTHS]
    command = [*COMMAND, "sweep", *cells, *TINY, *on(cluster), "--name", "one"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as sweep:  # fmt: skip
        wait_until(lambda: (flags / "b").exists() or sweep.poll() is not None)
        assert sweep.poll() is None, sweep.communicate()
        cluster.remove_node(lost, allow_graceful=False)
        _, err = sweep.communicate(timeout=180)
    assert sweep.returncode == 0, err
    return folder / "results" / "one", err


def on(cluster: Any) -> list[str]:
    return ["--on", "ray", "--ray-address", cluster.address]


@pytest.mark.slow
def test_the_cells_of_a_case_are_on_one_node_which_the_table_names(survived):
    path, _ = survived
    rows = exported(path)
    nodes = {n: {row["node"] for row in rows if row["seq_len"] == n} for n in (16, 24, 48, 56, 64)}
    assert {len(found) for found in nodes.values()} == {1}
    assert nodes[48] == nodes[56] == nodes[64] == {"a"}  # what b was at, too
    of = {facts["node"]: facts for facts in load_run(path).environments.values()}
    assert of["a"]["ceilings"]["1"]["matmul_tflops"]["float32"] > 0
    assert {row["node"] for row in rows} <= of.keys() <= {"a", "b"}


@pytest.mark.slow
def test_code_is_sent_along_and_nothing_is_left_on_a_lost_node(survived, flags):
    pid, *sources = (flags / "b").read_text().split()
    assert ["runtime_resources" in source for source in sources] == [True, True]
    wait_until(lambda: not psutil.pid_exists(int(pid)))


@pytest.mark.slow
def test_more_threads_than_a_node_has_cpus_are_refused_before_anything_is_written(
    cluster, tmp_path
):
    ended = run_attnbench("sweep", *on(cluster), "--threads", "2", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (2, "Error: no node of the Ray cluster has 2 CPUs\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "says"), [("127.0.0.1:1", "ray start --head"), ("x y:3", "x y:3")]
)
def test_where_no_cluster_is_there_one_line_says_how_to_start_one(address, says, tmp_path):
    ended = run_attnbench("sweep", "--on", "ray", "--ray-address", address, cwd=tmp_path)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert says in line
    assert "--ray-address local" in line
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_is_given_stands_before_that_of_the_environment(monkeypatch):
    asked: list[tuple[str, int]] = []

    def create_connection(address: tuple[str, int], timeout: float) -> None:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr("socket.create_connection", create_connection)
    monkeypatch.setenv("RAY_ADDRESS", "there:2")
    for address in ("here:1", "auto"):
        with pytest.raises(UsageError, match="no Ray cluster"):
            _connected(address, "")
    assert asked == [("here", 1), ("there", 2)]


def test_without_ray_one_line_says_how_to_install_it():
    ended = run_script(
        "import sys; sys.modules['ray'] = None\n"
        "from attnbench.cli.commands import main; main(['sweep', '--on', 'ray'])"
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "Error: --on ray needs Ray: pip install 'attnbench[ray]'\n"


class Actor:
    """A slot of a cluster that is not there: a method's `remote` returns what is then got."""

    def __init__(self, node: str, behaviour: Any) -> None:
        self.node, self.behaviour, self.asked = node, behaviour, list[Any]()
        self.suspects = list[dict[Any, str]]()
        self.open = SimpleNamespace(remote=self._open)
        self.begin = SimpleNamespace(remote=self._begin)

    def _open(self, place: int) -> Any:
        yield lambda: ({self.node: {"device_name": self.node}}, 0.5, 0.0)

    def _begin(self, job: Job, limits: Any, suspects: dict[Any, str]) -> Any:
        self.asked.append(limits)
        self.suspects.append(suspects)
        for cell in job.cells():
            record = synthetic.ok(cell.case, cell.impl)
            own = replace(record, environment=self.node, process=job.process)
            yield lambda own=own, cell=cell: self.behaviour(self.node, cell) or own
        yield from self._open(0)


class Ray:
    """What `RayRunner` uses of the module ray, on nodes a and b with one CPU each."""

    exceptions = ray.exceptions

    def __init__(self, behaviour: Any) -> None:
        self.behaviour, self.actors, self.names = behaviour, list[Any](), "ab"

    def nodes(self) -> list[dict[str, Any]]:
        return [NAMES | {"NodeID": name * 56, "NodeName": name} for name in self.names]

    def remote(self, _: Any) -> Any:
        def made(settings: Settings, node: str, size: int) -> Any:
            self.actors.append(Actor(node, self.behaviour))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made))

    def wait(self, refs: list[Any], timeout: float) -> Any:
        return refs[:1], refs[1:]

    def get(self, ref: Any) -> Any:
        return ref()

    def kill(self, actor: Any) -> None:
        self.actors.remove(actor)


NAMES = {
    "NodeManagerAddress": "", "NodeManagerHostname": "", "Alive": True, "Resources": {"CPU": 1},
}  # fmt: skip
GROUPS = [((Case(seq_len=n), ("naive", "sdpa")),) for n in (16, 32, 64, 128)]


def run_on_fake(
    behaviour: Any, planned_on: str = "", taken: Any = iter, **given: Any
) -> tuple[list[Record], Ray, list[str]]:
    runner = RayRunner(Settings(processes=2), "auto")
    runner._there, runner._ray = Settings(device="cpu"), Ray(behaviour)
    vars(runner).update(given)
    if planned_on:
        runner._ray.names = planned_on
        runner.start()
        runner._ray.names = "ab"
    jobs = [Job(groups=(group,), process=process) for process in (0, 1) for group in GROUPS]
    events = list(runner.run(taken(jobs)))
    warnings = [event.message for event in events if isinstance(event, Warned)]
    return [each for each in events if isinstance(each, Record)], runner._ray, warnings


def test_jobs_are_taken_as_slots_come_free_also_where_cases_live_elsewhere(monkeypatch):
    """--max-total-time decides when a job is taken: all of them at once would all be admitted.

    Here b joins for the second pass, of which every case lives on a.
    """
    begun, ahead, nodes = set[Any](), list[int](), Ray.nodes

    def joining(fake: Ray) -> list[dict[str, Any]]:
        fake.names = "ab" if len(begun) >= len(GROUPS) else "a"
        return nodes(fake)

    monkeypatch.setattr(Ray, "nodes", joining)
    monkeypatch.setattr(cluster_module, "_LOOK_S", 0.0)

    def taken(jobs: list[Job]) -> Iterator[Job]:
        for number, job in enumerate(jobs):
            ahead.append(number - len(begun))
            yield job

    def behaviour(node: str, cell: Cell) -> None:
        begun.add((cell.case.case_id, cell in begun_before))
        begun_before.add(cell)

    begun_before = set[Cell]()
    records, *_ = run_on_fake(behaviour, taken=taken)
    assert len(records) == 16
    assert len(ahead) == 8
    assert max(ahead) <= 2, "those that wait for a slot, one for each"


def test_what_is_tried_once_more_is_known_to_the_slot_that_tries_it():
    """Which then isolates it, and waits for late harm."""
    key = GROUPS[1][0][0].case_id, "sdpa"
    _, found, _ = run_on_fake(lambda *_: None, suspects={key: "crashed: by a signal"})
    seen = [suspects for actor in found.actors for suspects in actor.suspects]
    assert seen.count({key: "crashed: by a signal"}) == 2, "in both processes of its case"
    assert seen.count({}) == 6


def test_a_cell_that_ends_slots_of_nodes_that_live_has_crashed_in_the_end():
    died: list[str] = []

    def behaviour(node: str, cell: Cell) -> None:
        if cell.impl == "sdpa" and cell.case.seq_len == 32:
            died.append(node)
            raise ray.exceptions.ActorDiedError

    records, _, warnings = run_on_fake(behaviour)
    assert len({(*r.cell.key, r.process) for r in records}) == len(records) == 16
    bad = [r for r in records if r.status != "ok"]
    assert [(r.cell.impl, r.cell.case.seq_len, r.status) for r in bad] == [
        ("sdpa", 32, "crashed")
    ] * 2
    assert {r.process for r in bad} == {0, 1}
    assert "lost 3 times" in str(bad[0].reason)
    assert len(died) == 8
    assert len(warnings) == 6


@pytest.mark.parametrize("first", ["a", "b"])
def test_what_planned_is_the_slot_of_its_own_device_whatever_joins_meanwhile(first):
    records, found, _ = run_on_fake(lambda *_: None, planned_on=first)
    assert sorted(actor.node for actor in found.actors) == ["a", "b"]
    assert {r.environment for r in records} == {"a", "b"}


def test_machines_that_are_not_of_the_run_are_left_out_and_refused_if_there_is_no_other():
    def admit(facts: dict[str, Any], refused: str) -> dict[str, Any]:
        if facts["device_name"] in refused:
            raise UsageError(f"device_name is {facts['device_name']}")
        return facts

    records, _, warnings = run_on_fake(lambda *_: None, admit=partial(admit, refused="b"))
    assert ({r.environment for r in records}, len(records)) == ({"a"}, 16)
    assert warnings == ["node b: device_name is b"]
    with pytest.raises(UsageError, match="device_name is"):
        run_on_fake(lambda *_: None, admit=partial(admit, refused="ab"))


def test_a_file_is_sent_with_its_folder_but_for_what_is_hidden_or_no_file(tmp_path: Path) -> None:
    (tmp_path / "own" / ".git").mkdir(parents=True)
    for name in ("mine.py", "data.bin", ".git/pack"):
        (tmp_path / "own" / name).write_text("x")
    (tmp_path / "own" / "pipe").symlink_to("/dev/zero")
    (file,) = _staged([str(tmp_path / "own" / "mine.py")], tmp_path / "sent")
    sent = (tmp_path / "sent" / file).parent
    assert {path.name for path in sent.iterdir()} == {"mine.py", "data.bin"}

"""Jobs on the devices of a Ray cluster; the cells of a node that is lost run on another."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import os
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil

from attnbench.errors import AttnbenchError, UsageError, WorkerError
from attnbench.execution.events import Warned, Working
from attnbench.execution.process import Settings
from attnbench.execution.runner import Executor, Limits, LocalRunner
from attnbench.machine.host import affinity
from attnbench.planning.plan import Job, jobs_of
from attnbench.schema.messages import Catalogue
from attnbench.schema.record import Cell, Record
from attnbench.theory.traits import case_label

Key = tuple[str, str]  # of a cell
Facts = dict[str, Any]
Known = tuple[dict[str, Facts], float, float]

_PATIENCE_S = 300.0  # for an answer of the node that plans
_SHOW_S, _LOOK_S = 1.0, 5.0  # between what is shown, and looks at which nodes there are
_LOSSES = 3  # slots that a group may end, on nodes that go on


class _Slot:
    """What runs on a node, as an actor: a `LocalRunner` on one GPU, or on so many CPUs (`size`)."""

    def __init__(self, settings: Settings, node: str, size: int) -> None:
        if os.environ.get("OMP_NUM_THREADS") == str(size):
            del os.environ["OMP_NUM_THREADS"]  # Ray's; cases say how many threads they take
        with contextlib.suppress(OSError):  # Ray's processes yield to all others
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        files = tuple(str(Path(file).resolve()) for file in settings.files)  # as they were sent
        place: Facts = {"node": node, "nice": os.getpriority(os.PRIO_PROCESS, 0)}
        if settings.device == "cuda":
            place["device_index"] = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.runner, self.size = LocalRunner(replace(settings, files=files), place=place), size
        self.runner.start()

    def ask(self, question: str, *args: Any) -> tuple[Any, tuple[tuple[str, ...], ...], list[str]]:
        """What the runner answers, and then knows of the user's files."""
        answer = getattr(self.runner, question)(*args)
        return answer, self.runner.own, self.runner.warnings

    def open(self, place: int) -> Iterator[Known]:
        """Keep to CPUs that are of this place alone, where there are enough."""
        if not self.runner.environments:
            self.runner.catalogue()  # of the whole node
        cpus = (affinity() or [])[place * self.size :][: self.size]
        if self.runner.settings.device == "cpu" and len(cpus) == self.size:
            with contextlib.suppress(psutil.Error):  # a server that begins later inherits it
                for process in psutil.Process(), *psutil.Process().children():
                    process.cpu_affinity(cpus)
        yield self.known()

    def begin(
        self, job: Job, limits: Limits | None, suspects: dict[Key, str]
    ) -> Iterator[Record | Known]:
        """The records of a job as they come, and what is then known."""
        self.runner.limits, self.runner.suspects = limits, suspects
        yield from (each for each in self.runner.run([job]) if isinstance(each, Record))
        yield self.known()

    def known(self) -> Known:
        """The facts by their key, and the seconds spent on start-up and ceilings since asked."""
        spent_s = self.runner.start_up_s, self.runner.ceilings_s
        self.runner.start_up_s = self.runner.ceilings_s = 0.0
        return self.runner.environments, *spent_s


@dataclass(eq=False)
class _Work:
    """Cells of a group that have no record yet; `losses` counts the slots that ended at them."""

    cells: dict[Key, Cell]
    process: int
    losses: int = 0


@dataclass(eq=False)
class _Place:
    """A slot as the driver knows it: where it is, and what it is at."""

    node: Facts
    number: int
    actor: Any = None
    work: _Work | None = None
    before: _Work | None = None  # what the slot was at that it replaces
    environment: str = ""  # its key, once the slot is open

    @property
    def name(self) -> str:
        """Of the node: its own, or that of its host."""
        own, host = self.node["NodeName"], self.node["NodeManagerHostname"]
        return str(host if own == self.node["NodeManagerAddress"] else own)


class RayRunner(Executor):
    """Runs groups on every device of a Ray cluster, one at a time on each.

    attnbench and the user's files are sent along; torch must be there. The nodes differ in memory:
    each knows for itself what ran out of it.
    """

    def __init__(self, settings: Settings, address: str) -> None:
        super().__init__(settings)
        self._address = address
        self._looked = -math.inf
        self._opened: set[tuple[str, int]] = set()  # devices that have, or had, a slot
        self._planner: _Place | None = None
        self._places: list[_Place] = []
        self._pending: list[_Work] = []
        self._limited: set[str] = set()  # environments whose ceilings are being measured
        self._homes: dict[str, str] = {}  # environments of cases that are measured several times

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as begun:
            folder = begun.enter_context(tempfile.TemporaryDirectory(prefix="attnbench-"))
            files = _staged(self.settings.files, Path(folder))
            self._ray = _connected(self._address, folder)
            begun.callback(self._ray.shutdown)
            device = self.settings.device
            if device == "auto":
                device = "cuda" if self._ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
            self._there = replace(self.settings, device=device, files=files)
            if self._there.ceilings == "cached":  # slots know nothing of what others have there
                self._there = replace(self._there, ceilings="fresh")
            self._held = begun.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def start(self) -> None:
        """Begin to plan, on a node that has the device."""
        if self._planner is None:
            self._planner = self._open(*self._devices(1)[0], 1)

    def catalogue(self) -> Catalogue:
        """As `Executor.catalogue`, of the first node."""
        found: Catalogue = self._ask("catalogue")
        return found

    def reasons(self, cells: Iterable[Cell]) -> dict[Key, str | None]:
        """As `Executor.reasons`, on the first node; some node must have as many CPUs."""
        asked = list(cells)
        self._devices(max(cell.case.threads for cell in asked))
        found: dict[Key, str | None] = self._ask("reasons", asked)
        return found

    def needs(self, cells: Iterable[Cell]) -> tuple[dict[Key, int | None], int | None]:
        """As `Executor.needs`, on the first node."""
        found: tuple[dict[Key, int | None], int | None] = self._ask("needs", list(cells))
        return found

    def _ask(self, question: str, *args: Any) -> Any:
        self.start()
        assert self._planner is not None, "it was just started"
        try:
            asked = self._planner.actor.ask.remote(question, *args)
            answer, self.own, self.warnings = self._ray.get(asked, timeout=_PATIENCE_S)
            return answer
        except self._ray.exceptions.RayError as err:
            why = getattr(err, "cause", None) or err
            kind = UsageError if isinstance(why, UsageError) else WorkerError
            raise kind(f"node {self._planner.name}: {_line(why)}") from err

    def run(self, jobs: Iterable[Job]) -> Iterator[Record | Working | Warned]:
        """As `Executor.run`, on all devices at once, in jobs of one group.

        The cells without a record of a slot that is lost go to another: nothing comes twice.

        Raises:
            UsageError: no device has so many CPUs, or none is admitted.
            WorkerError: all of them are lost.
        """
        ray, size = self._ray, max(self.limits[1], default=1) if self.limits else 1
        groups = (replace(job, groups=(group,)) for job in jobs for group in job.groups)
        stream = (_Work({c.key: c for c in job.cells()}, job.process) for job in groups)
        self._devices(size)  # raises where there are none
        planner, self._planner = self._planner, None
        if planner is not None and size > 1:
            ray.kill(planner.actor)
            planner = None
            self._opened.clear()
        self._places, asked, idle = [], dict[Any, _Place](), list[_Place]()
        lost: Exception | None = None
        while True:
            for place in filter(None, (planner, *self._joined(size))):
                self._places.append(place)
                asked[place.actor.open.remote(place.number)] = place
            for place in list(idle):
                if work := self._work_for(place, stream):
                    idle.remove(place)
                    place.work, (job,) = work, jobs_of(work.cells.values())
                    job, here = replace(job, process=work.process), place.environment
                    known = here in self._limited or "ceilings" in self.environments[here]
                    self._limited.add(here)
                    suspects = {key: why for key, why in self.suspects.items() if key in work.cells}
                    begun = place.actor.begin.remote(job, None if known else self.limits, suspects)
                    asked[begun] = place
            working = any(place.work for place in self._places)
            if not asked or (idle and not working):  # slots of others' jobs are not waited for
                break
            planner = None
            for answers in ray.wait(list(asked), timeout=_SHOW_S)[0]:
                place = asked[answers]
                try:
                    answer = ray.get(next(answers))
                    if not isinstance(answer, Record):
                        del asked[answers]
                        self._learn(place, answer)
                        idle.append(place)
                        continue
                except (ray.exceptions.RayError, UsageError) as err:
                    asked.pop(answers, None)
                    lost = getattr(err, "cause", None) or err
                    yield from self._lost(place, lost)
                    if place.environment and not isinstance(lost, AttnbenchError):
                        again = self._open(place.node, place.number, size)
                        again.before = place.work
                        self._places.append(again)
                        asked[again.actor.open.remote(again.number)] = again
                    continue
                assert place.work is not None, "it has a record"
                del place.work.cells[answer.cell.key]
                if self.settings.processes > 1:
                    self._homes[answer.cell.case.case_id] = place.environment
                yield answer
            yield self._at_work()
        for place in asked.values():
            ray.kill(place.actor)
        if lost is not None and (self._pending or next(stream, None)):
            kind = UsageError if isinstance(lost, UsageError) else WorkerError
            raise kind(f"no device of the Ray cluster is left: {_line(lost)}")

    def _devices(self, size: int) -> list[tuple[dict[str, Any], int]]:
        """Each node with the number of a GPU, or of a slot of so many CPUs."""
        what, each = ("GPU", 1) if self._there.device == "cuda" else ("CPU", size)
        nodes = sorted(self._ray.nodes(), key=lambda node: str(node["NodeName"]))
        nodes = [node for node in nodes if node["Alive"]]
        found = [(n, i) for n in nodes for i in range(int(n["Resources"].get(what, 0) // each))]
        if not found:
            raise UsageError(f"no node of the Ray cluster has {each} {what}{'s' * (each > 1)}")
        return found

    def _joined(self, size: int) -> Iterator[_Place]:
        """Slots on devices that had none yet: at first on all, and later where nodes join."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        with contextlib.suppress(UsageError):  # none is left, for now
            for node, number in self._devices(size):
                if (node["NodeID"], number) not in self._opened:
                    yield self._open(node, number, size)

    def _open(self, node: Facts, number: int, size: int) -> _Place:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = _Place(node, number)
        self._opened.add((node["NodeID"], number))
        actor = self._ray.remote(_Slot).options(
            num_cpus=size,
            num_gpus=int(self._there.device == "cuda"),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        place.actor = actor.remote(self._there, place.name, size)
        return place

    def _work_for(self, place: _Place, stream: Iterator[_Work]) -> _Work | None:
        """What to give to an idle slot; a case that was measured stays on its device, if alive.

        The stream decides when it is asked: what waits for other slots is at most one job a slot.
        """
        others = {other.environment for other in self._places} - {place.environment}
        room = max(0, len(self._places) - len(self._pending))
        for work in itertools.chain(list(self._pending), itertools.islice(stream, room)):
            if work in self._pending:
                self._pending.remove(work)
            if self._homes.get(next(iter(work.cells))[0]) not in others:
                return work
            self._pending.append(work)
        return None

    def _learn(self, place: _Place, known: Known) -> None:
        """A slot is open, or done with its job. Raises a UsageError if it is not admitted."""
        environments, start_up_s, ceilings_s = known
        ((key, facts),) = environments.items()
        if place.before is not None:  # the node lives: the slot alone was lost
            place.before.losses += 1
        if key not in self.environments:
            self.environments[key] = self.admit(facts)
        elif "ceilings" in facts and "ceilings" not in self.environments[key]:
            self.environments[key] = facts
        self.start_up_s += start_up_s
        self.ceilings_s += ceilings_s
        place.environment, place.work, place.before = key, None, None

    def _lost(self, place: _Place, err: Exception) -> Iterator[Record | Warned]:
        """Put back what a slot was at, unless it ended too many: then its cells have crashed."""
        self._places.remove(place)
        self._ray.kill(place.actor)
        self._limited.discard(place.environment)
        work, why = place.work or _Work({}, 0), f"node {place.name}: {_line(err)}"
        if work.losses < _LOSSES:
            self._pending[:0] = [work] if work.cells else []
            again = f"; {len(work.cells)} cells will run on another device" * bool(work.cells)
            if place.environment or isinstance(err, AttnbenchError):  # else it never opened
                yield Warned(why + again)
            return
        reason = f"it was lost {_LOSSES} times, with its process: {why}"
        for cell in work.cells.values():
            made = Record(cell=cell, status="crashed", reason=reason, process=work.process)
            yield replace(made, environment=place.environment)

    def _at_work(self) -> Working:
        """How many slots are busy, and what one of them is at."""
        busy = [place for place in self._places if place.work and place.work.cells]
        if not busy:
            return Working("waiting for a slot")
        at = busy[int(time.monotonic()) % len(busy)]
        assert at.work is not None, "it is busy"
        case = next(iter(at.work.cells.values())).case
        slots = f"{len(busy)} of {len(self._places)} slots busy"
        return Working(f"{slots}, node {at.name}: {case_label(case)}")


def _line(err: Exception) -> str:
    """What an error says in a line; of Ray's, which go on for pages, the kind."""
    ours = not type(err).__module__.startswith("ray.")
    return (ours and " ".join(str(err).split())[:300]) or f"lost ({type(err).__name__})"


def _connected(address: str, folder: str) -> Any:
    """The module `ray`, connected to a cluster that has sent the folder to its nodes."""
    try:
        import ray
    except ImportError as err:
        raise UsageError("--on ray needs Ray: pip install 'attnbench[ray]'") from err
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here
    given = {"include_dashboard": False} if address == "local" else {}
    sent = {"working_dir": folder}
    if address == "local":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex())  # else Ray writes to the home
        sent["py_executable"] = shlex.quote(sys.executable)  # of which Ray makes a shell's line
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal() and "/" not in host:  # Ray tries for two minutes, and then aborts
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR", runtime_env=sent, **given)
    except Exception as err:  # of many kinds, for an address that is not there, old or unreadable
        ray.shutdown()
        raise UsageError(
            f"no Ray cluster at --ray-address {address} ({_line(err)})"
            + "; start one with: ray start --head, or take the cores of this machine with:"
            " --ray-address local" * (address != "local")
        ) from err
    return ray


def _staged(files: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Copy to `folder` what nodes need: attnbench, and each user's file with the folder it is in.

    Returns the files there.
    """
    package = Path(__file__).resolve().parents[1]
    spec = importlib.util.find_spec("attnbench_impls")
    built_in = Path(spec.origin).parent if spec and spec.origin else package.parent / "impls"
    copied = partial(shutil.copytree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    copied(package, folder / "attnbench")
    copied(built_in, folder / "attnbench_impls")
    for number, file in enumerate(map(Path, files)):
        try:
            copied(file.parent, folder / "files" / str(number), copy_function=_copied_if_file)
        except OSError as err:  # also of a file beside it
            raise UsageError(f"{file} (--impl) cannot be sent: {_line(err)}") from err
    return tuple(f"files/{number}/{Path(file).name}" for number, file in enumerate(files))


def _copied_if_file(source: str, target: str) -> None:
    if os.path.isfile(source):  # no pipe or socket that lies beside it
        shutil.copyfile(source, target)

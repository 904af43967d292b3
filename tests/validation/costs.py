"""Random tiny cells over all axes, right built-ins: none may be incorrect, fail or end a process.

A cell is drawn from its number and a seed, so that these find it again. It takes the way of a cell
of a sweep up to where it would be timed: reasons, what it needs, two checks, the distance from
exact attention. Then its costs are counted: FLOPs that were dispatched must be those that it
executes by its formula, and the workspace what was predicted, or at most the bound. A process
serves some hundred cells and is then replaced; one that ends is the fault of the cell that it was
at. Sweeps with random lists of axes go through the command line.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from attnbench.api import IMPLEMENTATIONS, Implementation, implementation
from attnbench.api.loader import load_built_in
from attnbench.base.parameters import Parameter, base_name
from attnbench.errors import AttnbenchError
from attnbench.machine.state import remember
from attnbench.schema.axes import AXES
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.schema.mask import MASKS
from attnbench.schema.position import POSITIONS
from attnbench.schema.record import Record
from attnbench.store.runs import load_run
from attnbench.theory.caches import CACHES
from attnbench.theory.flags import case_flags
from attnbench.theory.projections import PROJECTIONS
from attnbench.theory.pruning import Pruning
from attnbench.theory.traits import TRAITS, case_label, work
from attnbench.worker.catalogue import fitting, reasons_against
from attnbench.worker.checking import Entry, Reporter, check_twice, measure_distances
from attnbench.worker.inputs import Draw
from attnbench.worker.trial import Trial
from attnbench.worker.workloads import WORKLOADS
from tests.validation.runner import Ended, Tell

WELL = ("ok", "unsupported", "skipped")
SILENT_S = 120.0  # after which a cell hangs, on a machine with other work
_A_PROCESS = 500  # cells
_COUNTED = 4  # one in so many has its costs counted, which takes longer than all the rest
_LENGTHS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 21, 31, 32, 33, 40, 47, 65)
_DIMS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 16, 17, 20, 24, 32, 33)
# Parameters whose size is that of a sequence, or of a vector; others are small numbers.
_SMALL = (1, 2, 3, 4, 5, 6, 8, 12, 16)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One drawn cell, and what became of it."""

    number: int
    case: Case
    impl: str
    status: str = "ok"
    reason: str | None = None


def _with_values(rng: random.Random, name: str, declared: Any, length: int) -> str:
    """The name with random small parameters: most of them, and each that must be given."""
    parts = [name]
    for key, parameter in declared.items():
        if parameter.default is None or rng.random() < 0.6:
            parts.append(f"{key}={_value(rng, key, parameter, length)}")
    return ":".join(parts)


def _value(rng: random.Random, key: str, parameter: Parameter, length: int) -> str:
    if parameter.many:
        few = rng.choice((1, 2, 2, 3))
        return "+".join(str(rng.randint(1, length + 3)) for _ in range(few))
    if parameter.real:
        least, most = parameter.least, parameter.most or 40.0
        return f"{rng.uniform(max(least, 0.05), min(most, 40.0)):.3g}"
    if key in ("width", "keys", "window", "length", "capacity"):
        drawn = rng.choice((rng.randint(1, length + 3), rng.choice(_SMALL)))
        return str(max(int(parameter.least), drawn + 12 * (key == "capacity")))
    if key == "buckets":
        return str(rng.choice((2, 4, 8, 8, 16, 32)))
    return str(max(int(parameter.least), rng.choice((*_SMALL, int(parameter.least)))))


def _drawn(rng: random.Random) -> dict[str, Any]:
    """The fields of a case; they may contradict each other."""
    workload = rng.choices(("attention", "layer", "decode", "recurrent"), (50, 23, 24, 3))[0]
    traits = TRAITS.get(workload)
    groups, sharing = rng.choice((1, 1, 2, 3, 4)), rng.choice((1, 1, 2, 3, 3, 4, 5))
    length, d = rng.choice(_LENGTHS), rng.choice(_DIMS)
    row: dict[str, Any] = {
        "workload": workload,
        "pass_": rng.choice(traits.passes),
        "dtype": rng.choices(("float32", "bfloat16", "float16", "float64"), (45, 20, 15, 20))[0],
        "batch": rng.randint(1, 3),
        "heads": groups * sharing,
        "kv_heads": groups,
        "seq_len": length,
        "head_dim": d,
        "value_dim": rng.choice((d, d, rng.choice(_DIMS))),
    }
    if not traits.heads:
        row |= {"heads": 1, "kv_heads": 1, "value_dim": d}
    if AXES["kv_len"].applies(workload) and rng.random() < 0.6:
        row["kv_len"] = rng.choice(_LENGTHS)
    longest = max(length, row.get("kv_len", length))
    kind = "full" if rng.random() < 0.2 else rng.choice(MASKS.names())
    mask = _with_values(rng, kind, MASKS.get(kind).parameters, longest)
    row["mask"] = parse_mask("causal" if traits.causal and mask == "full" else mask)
    if traits.heads and rng.random() < 0.6:
        name = rng.choice(POSITIONS.names())
        text = _with_values(rng, name, POSITIONS.get(name).parameters, longest)
        row["position"] = parse_position(text)
    own: dict[str, Callable[[], Any]] = {
        "width": lambda: rng.choice((row["heads"] * d, row["heads"] * d, rng.randint(1, 60))),
        "projection": lambda: _of(rng, PROJECTIONS, longest),
        "cache": lambda: _of(rng, CACHES, longest),
        "new_tokens": lambda: rng.choice((1, 2, 3, 4, 6)),
        "query_tokens": lambda: rng.choice((1, 1, 1, 2, 3)),
        "layers": lambda: rng.choice((1, 1, 1, 2, 3, 4, 8, 12)),
    }
    # Every field that a sweep would fill in, too: width, projection, cache.
    row |= {axis: own[axis]() for axis in own if AXES[axis].applies(workload)}
    if rng.random() < 0.2:
        row["scale"] = rng.choice((1.0, 0.5, 0.3, 0.05, 1.7))
    return row


def _of(rng: random.Random, registry: Any, length: int) -> str:
    name = rng.choice(registry.names())
    return _with_values(rng, name, registry.get(name).parameters, length)


def serving(workload: str) -> list[Implementation]:
    """The built-ins that serve a workload on this machine without compiling."""
    built_in = (impl for _, impl in IMPLEMENTATIONS.items() if "impls" in impl.file)
    able = (impl for impl in built_in if "cpu" in impl.devices and not impl.compiles)
    return [impl for impl in able if workload in impl.workloads]


def drawn(number: int, seed: int) -> Cell:
    """The cell of a number: the first one drawn that its implementation takes."""
    rng = random.Random(f"{seed} {number}")
    while True:
        try:
            case = Case(**_drawn(rng))
        except Exception:  # parameters that do not fit together
            continue
        impl = rng.choice(serving(case.workload))
        name = implementation(_with_values(rng, impl.name, impl.parameters, case.kv_len)).name
        (reason,) = reasons_against([case], [name])[name]
        if reason is None:
            return Cell(number=number, case=case, impl=name)
        if "raised" in reason:
            reason = f"supports: {reason}"
            return Cell(number=number, case=case, impl=name, status="error", reason=reason)


def ended(cell: Cell) -> Cell:
    """What becomes of it up to where it would be timed."""
    if cell.status != "ok":
        return cell
    records: list[Record] = []
    reporter = Reporter(at=lambda *_: None, record=lambda _, found: records.append(found))
    entry = Entry(index=0, case=Case.from_json(cell.case.to_json()), impls=(cell.impl,))
    if entry.case != cell.case:
        return replace(cell, status="error", reason="its JSON is another case")
    reason = None
    for fit in fitting([entry], reporter, Pruning()):
        reason = _checked(fit, cell.number, reporter)
    if records:
        return replace(cell, status=records[0].status, reason=records[0].reason)
    return replace(cell, status="costs", reason=reason) if reason else cell


def _checked(entry: Entry, seed: int, reporter: Reporter) -> str | None:
    """Check a cell; of one in some, say how its costs differ from what is predicted."""
    workload, (name,), counted = WORKLOADS.get(entry.case.workload), entry.impls, seed % _COUNTED
    case, tensors = entry.case, workload.tensors(entry.case)
    trial = Trial(impl=implementation(name), case=case, tensors=tensors, checks_alone=bool(counted))
    trials, draws = {name: trial}, (Draw(seed=2 * seed + 1, needles=True), Draw(seed=2 * seed + 2))
    check_twice(entry, trials, draws, reporter)
    measure_distances(entry, trials, draws[1].seed, reporter)
    workload.fill(case, tensors, Draw(seed=seed))
    # Of what oneDNN keeps inside nothing is predicted.
    with torch.backends.mkldnn.flags(enabled=False):
        for left in list(trials):
            with reporter.stage(entry.index, trials, left, "probe"):
                trial.costs() if counted else trial.probe()
    return None if counted or not trials else off(trial.metrics)


def off(metrics: dict[str, Any]) -> str | None:
    """How counted FLOPs or the measured workspace contradict what follows from the sizes.

    A workspace is predicted to the byte but for a few numbers that stand alone.
    """
    executed, counted = metrics["flops_executed"], metrics["flops_counted"]
    if metrics["flops_counted_source"] == "dispatched" and executed not in (None, counted):
        return f"it executes {counted} FLOPs, by its formula {executed}"
    measured = metrics["memory_workspace_bytes"]
    predicted, most = metrics["memory_predicted_bytes"], metrics["memory_bound_bytes"]
    if predicted is not None and abs(predicted - measured) > 64:
        return f"its workspace is {measured} bytes, predicted {predicted}"
    # A bound is for admission: it leaves out what does not grow.
    if most is not None and measured > 1.05 * most + 2**18:
        return f"its workspace is {measured} bytes, at most {most} by its bound"
    return None


def _serve(numbers: range, seed: int, send: Connection) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # which torch's profiler writes to
    torch.set_num_threads(1)
    remember(1)
    for number in numbers:
        cell = Cell(number=number, case=Case(), impl="")
        try:
            cell = drawn(number, seed)
            cell = ended(cell)
        except Exception as err:  # of the worker's own code: nothing may get through
            last = traceback.extract_tb(err.__traceback__)[-1]
            text = " ".join(f"{type(err).__name__}: {err}".split())[:200]
            reason = f"{Path(last.filename).name}:{last.lineno}: {text}"
            cell = replace(cell, status="internal", reason=reason)
        send.send(cell)


def examined(numbers: range, seed: int, tell: Tell) -> Iterator[Cell]:
    """Each cell of the numbers, and what became of it."""
    context, at = multiprocessing.get_context("fork"), numbers.start
    while at < numbers.stop:
        some = range(at, min(at + _A_PROCESS, numbers.stop))
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(some, seed, send))
        process.start()
        send.close()
        status = "timeout"
        try:
            while at < some.stop and receive.poll(SILENT_S):
                yield receive.recv()
                at += 1
        except EOFError:
            status = "crashed"
            process.join()
        finally:
            process.kill()
            process.join()
            receive.close()
        if at < some.stop:
            reason = f"the process ended with {process.exitcode}"
            yield replace(drawn(at, seed), status=status, reason=reason)
            at += 1
        tell(f"{at} of {numbers.stop}: --first {at} goes on from here")


def examine(tell: Tell, *, cells: int, first: int, sweeps: int, seed: int) -> Ended:
    """What became of so many cells from the `first` number on, and of so many sweeps."""
    load_built_in()
    found, lines, exits, begin = list[Cell](), list[str](), Counter[int](), time.monotonic()
    interrupted = False
    try:
        for cell in examined(range(first, max(first, cells)), seed, tell):
            found.append(cell)
            if cell.status not in WELL:
                tell(f"{cell.number}: {cell.status} {cell.impl}: {case_label(cell.case)}")
        tell(f"{len(found)} cells in {time.monotonic() - begin:.0f} s, seed {seed}")
        for number in range(sweeps):
            code, said = swept(number, seed)
            exits[code] += 1
            lines += [said] if said else []
    except KeyboardInterrupt:
        interrupted = True
    wrong, met = [cell for cell in found if cell.status not in WELL], not lines
    lines += told(wrong)
    for what, counts in (("cells", Counter(cell.status for cell in found)), ("exit", exits)):
        lines += [f"{times} {what} {end}" for end, times in sorted(counts.items())]
    return Ended(met=met and not wrong, lines=lines, interrupted=interrupted)


def _sweep(*flags: str) -> str:
    return shlex.join(["attnbench", "sweep", *flags])


def told(wrong: list[Cell]) -> Iterator[str]:
    """Cells that went wrong alike, by the simplest of them; the most frequent first."""
    groups: dict[Any, list[Cell]] = {}
    for cell in wrong:
        reason = re.sub(r"\d[\d.e+-]*|\bnan\b|\binf\b", "#", cell.reason or "")[:110]
        key = cell.status, base_name(cell.impl), cell.case.workload, reason
        groups.setdefault(key, []).append(cell)
    for group in sorted(groups.values(), key=len, reverse=True):
        cell = min(group, key=lambda cell: (cell.case.scale is not None, work(cell.case)))
        numbers = ", ".join(str(cell.number) for cell in group[:8])
        yield f"{len(group)} {cell.status}: {cell.impl}: {case_label(cell.case)}"
        yield f"  {cell.reason}; numbers {numbers}"
        scale = (
            "" if cell.case.scale is None else f" (scale {cell.case.scale:g}, which no flag has)"
        )
        yield f"  {_sweep('--impls', cell.impl, *case_flags(cell.case))}{scale}"


# Sweeps through the command line.


def sweep_command(number: int, seed: int) -> list[str]:
    """A cell with random lists of some axes around it: about ten, some of which make no sense."""
    rng, others = random.Random(f"sweep {seed} {number}"), list[Case]()
    base = drawn(10**6 + number, seed)
    row, able = replace(base.case, scale=None), serving(base.case.workload)
    while len(others) < 2:
        with contextlib.suppress(AttnbenchError):  # parameters that do not fit together
            others.append(Case(**(_drawn(rng) | {"workload": row.workload, "scale": None})))
    lists = _flags(row)
    varied = rng.sample(list(lists), min(len(lists), 2))
    for theirs in map(_flags, others):
        for flag in varied:
            value = theirs.get(flag)
            if flag != "--workload" and value and value not in lists[flag].split(","):
                lists[flag] += f",{value}"
    impls = rng.sample(able, min(2, len(able)))
    names = [_with_values(rng, impl.name, impl.parameters, row.kv_len) for impl in impls]
    flags = [word for pair in lists.items() for word in pair]
    return ["--impls", ",".join(dict.fromkeys([base.impl, *names])), *flags]


def _flags(case: Case) -> dict[str, str]:
    words = case_flags(case)
    return dict(zip(words[::2], words[1::2], strict=True))


def swept(number: int, seed: int) -> tuple[int, str]:
    """One sweep: its exit code, and what went wrong in it, after its command."""
    flags = sweep_command(number, seed)
    quick = ["--min-time", "0.001", "--max-time", "0.002", "--ceilings", "none", "--device", "cpu"]
    with tempfile.TemporaryDirectory(prefix="attnbench-cells-") as folder:
        command = [sys.executable, "-m", "attnbench", "sweep", *flags, *quick, "--output", folder]
        command += ["--name", "run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        bad = [] if done.returncode in (0, 2, 3) else [f"exit {done.returncode}"]
        stored = (Path(folder) / "run" / "records.jsonl").exists()
        records = load_run(Path(folder) / "run").records if stored else ()
        bad += [f"{r.status}: {r.cell.impl}: {r.reason}" for r in records if r.status not in WELL]
        if bad and done.returncode == 70:
            bad.append(done.stderr[-600:])
    said = f"{_sweep(*flags)}: {'; '.join(bad)}" if bad else ""
    return done.returncode, said

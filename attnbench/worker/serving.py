"""A worker: reads requests, writes events, ends with its runner.

Requests and events are lines of JSON, the first of them a `WorkerConfig`. Whatever implementations
print goes to standard error.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

import torch

from attnbench.api.loader import load_built_in, load_entry_points, load_file, load_side
from attnbench.base.jsontext import decode, encode
from attnbench.errors import AttnbenchError, ExitCode, WorkerError
from attnbench.machine import host, state
from attnbench.machine.facts import free_bytes, limit_memory
from attnbench.measure.ceilings import measure_ceilings
from attnbench.measure.clock import Clock
from attnbench.measure.race import Race
from attnbench.schema import messages
from attnbench.schema.record import Cell, Record
from attnbench.theory.pruning import Pruning
from attnbench.worker import reference
from attnbench.worker.catalogue import describe, fitting, needs_of, reasons_against
from attnbench.worker.checking import Entry, Reporter, check_item
from attnbench.worker.diagnosis import diagnose
from attnbench.worker.measuring import Instruments, measure_group
from attnbench.worker.tracing import profile_cell, trace_cell
from attnbench.worker.trial import classify, device_is_lost

Emit = Callable[[messages.Event], None]
_LOST, _FORKED = 70, 71
_LEFT = 0.7  # of the memory that was free before the first group


def main(read: int, write: int, beat: int) -> None:
    """Serve requests until there are no more; `beat` is the descriptor of the heartbeat's file."""
    heartbeat = messages.Heartbeat(beat)
    os.close(beat)  # it is mapped
    reference.on_block = heartbeat.beat
    emit = _event_writer(write)
    pipe = os.fdopen(read, "rb")
    if not (line := pipe.readline()):
        return  # nobody wants it any more
    config = decode(line, messages.WorkerConfig)
    requests = _request_queue(pipe)
    gpu = config.device != "cpu" and torch.cuda.is_available()
    limit_memory(config.memory_limit, "cuda" if gpu else "cpu")
    torch.get_num_threads()  # from here on no variable changes it
    os.environ.update(host.pools())  # for what the user's files load
    state.remember(config.threads)
    try:
        warnings, names = _load(config)
    except AttnbenchError as err:
        emit(messages.Failed(str(err), err.exit_code == ExitCode.USAGE))
        return
    emit(messages.Ready(tuple(warnings), tuple(names)))
    while True:
        _serve(requests.get(), heartbeat, emit)
        heartbeat.write(messages.NOBODY, messages.NOBODY, "idle")
        emit(messages.Done())


def _load(config: messages.WorkerConfig) -> tuple[list[str], list[tuple[str, ...]]]:
    """Import implementations; return warnings, and the names that each of the user's files has.

    Of two versions of a repository only that one is loaded: what is installed by entry points
    may be the other, in editable mode.
    """
    load_built_in()
    state.settle()
    if config.root is not None:
        names = [tuple(load_side(config.files, config.root, config.other_root))]
        state.adopt(folder=True)
        return _put_back(", ".join(config.files)), names
    warnings = load_entry_points() + _put_back("an installed package")
    for file in config.files:
        load_file(file, replace=config.replace)
        warnings += _put_back(file)
    return warnings, [tuple(load_file(file)) for file in config.files]  # as they are called now


def _put_back(who: str) -> list[str]:
    """Put back what loading changed; return a warning that says so, if anything."""
    state.adopt()
    changed = state.restore_clocks() + state.settle()
    if lasting := state.beyond_repair():
        raise WorkerError(f"loading {who} changed {lasting}, which attnbench could not restore")
    if not changed:
        return []
    return [f"loading {who} changed {', '.join(changed)}; restored"]


def _serve(request: messages.Request, heartbeat: messages.Heartbeat, emit: Emit) -> None:
    stage = partial(heartbeat.write, messages.NOBODY, messages.NOBODY)
    match request:
        case messages.Describe(device):
            emit(describe(device, stage))
        case messages.AskReasons(cases, names):
            reasons = reasons_against(cases, names, stage)
            state.restore_clocks()  # `supports` is anyone's code, too
            state.settle()
            emit(messages.Reasons(reasons))
        case messages.AskNeeds(cases, names):
            emit(messages.Needs(needs_of(cases, names), free_bytes(cases[0].device)))
        case messages.MeasureCeilings(device, dtypes, threads):
            state.settle(threads if device == "cpu" else None)
            emit(messages.Facts(measure_ceilings(device, list(dtypes))))
        case messages.Diagnose(device):
            emit(messages.Facts(diagnose(device, lambda words: emit(messages.Testing(words)))))
        case messages.Measure():
            _measure(request, heartbeat, emit)
        case messages.Profile(cases, seed):
            for index, (case, impls) in enumerate(cases):
                for number, impl in enumerate(impls):
                    at = partial(heartbeat.write, index, number, name=impl)
                    status, metrics = profile_cell(case, impl, seed, at)
                    emit(messages.CellProfiled(index, impl, metrics))
                    _end_if_lost(status)
        case messages.Trace():
            traced = trace_cell(request, partial(heartbeat.write, 0, 0))
            emit(traced)
            _end_if_lost(traced.status)
        case messages.Check(items, seed):
            for index, item in enumerate(items):
                at = partial(heartbeat.write, index, 0, name=item.impl)
                found = check_item(item.case, item.impl, item.draw, seed, at)
                emit(messages.ItemChecked(index, item.impl, **found))
                _end_if_lost(found["status"])


def _measure(request: messages.Measure, heartbeat: messages.Heartbeat, emit: Emit) -> None:
    numbers = itertools.count()
    groups = [
        [Entry(index=next(numbers), case=case, impls=impls) for case, impls in group]
        for group in request.groups
    ]
    entries = list(itertools.chain.from_iterable(groups))
    if entries[0].case.device == "cpu":
        state.take_cores(entries[0].case.threads)  # all have the same

    def at(case: int, impl: str | None, stage: str) -> None:
        number = messages.NOBODY if impl is None else entries[case].impls.index(impl)
        limit_s = min(race.call_limit_s, race.left_s + messages.LATE_S) if race else math.inf
        heartbeat.write(case, number, stage, impl if stage == "build" else None, limit_s)

    race: Race | None = None
    pruning = Pruning(request.oom, enabled=request.prune)

    def record(case: int, found: Record, clock: Clock | None = None) -> None:
        if found.status == "oom":
            pruning.oom.append(found.cell)
        emit(messages.CellMeasured(case, found))
        _end_if_lost(found.status, clock)

    try:
        instruments = Instruments.of(request, entries[0].case.device)
        race = instruments.race
        stream = instruments.stream()
    except Exception as err:  # no memory for the flush, no graphs in this torch: no cell's fault
        status, reason = classify(err, "set-up")
        for entry in entries:
            for impl in entry.impls:
                cell = Cell(case=entry.case, impl=impl)
                record(entry.index, Record(cell=cell, status=status, reason=reason))
        return
    reporter = Reporter(at=at, record=partial(record, clock=instruments.clock))
    device = entries[0].case.device
    with stream:
        least = _LEFT * (free_bytes(device) or 0)
        for group in groups:
            host.return_freed_memory()
            if (free_bytes(device) or 0) < least:  # someone keeps it: a fresh process has it again
                heartbeat.write(messages.NOBODY, messages.NOBODY, "idle")
                os._exit(_LOST)
            if fit := fitting(group, reporter, pruning):
                measure_group(fit, instruments, reporter)


def _end_if_lost(status: str, clock: Clock | None = None) -> None:
    """Leave the rest to a fresh process if this one has lost the device, a setting or its clock."""
    broken = clock is not None and clock.broken
    if broken or (status in ("crashed", "error") and device_is_lost()) or state.beyond_repair():
        os._exit(_LOST)


def _event_writer(descriptor: int) -> Emit:
    stream, process = os.fdopen(descriptor, "wb", buffering=0), os.getpid()

    def emit(event: messages.Event) -> None:
        if os.getpid() != process:
            os._exit(_FORKED)  # an implementation forked, and returned in the child as well
        # The first newline ends what someone else may have written.
        rest = memoryview(b"\n" + encode(event) + b"\n")
        while rest:
            rest = rest[stream.write(rest) :]

    return emit


def _request_queue(pipe: BinaryIO) -> queue.Queue[messages.Request]:
    """Requests as they arrive. When the runner closes the pipe, or dies, this process ends."""
    requests: queue.Queue[messages.Request] = queue.Queue()

    def read() -> None:
        for line in pipe:
            requests.put(decode(line, messages.Request))  # type: ignore[arg-type]
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return requests

"""What a program called: each distinct call with its count, as the cases of a list."""

from __future__ import annotations

import json
import math
import operator
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from attnbench.base.files import write_whole
from attnbench.capturing.masks import Fingerprints, Found
from attnbench.schema.case import CAPTURE_VERSION, DTYPE_BYTES

Call = dict[str, Any]  # as in the list, flat: with op, backend, device, grad, problems
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__
_CACHES = 256  # distinct tensors of keys that are told apart
_GROUPS = 4  # groups that the growing caches of a generation are counted in


@dataclass
class Row:
    """How often a call came: `recomputed` are those of a checkpoint, in the backward pass."""

    call: Call
    count: int = 0
    backward: int = 0
    recomputed: int = 0
    time_s: float = 0.0
    places: Counter[tuple[CodeType, int]] = field(default_factory=Counter)
    modules: Counter[str] = field(default_factory=Counter)
    keys: set[int] = field(default_factory=set)  # where those of the last calls begin
    caches: int = 0

    def took(self, keys: int) -> None:
        """Count the tensors of keys, by where they begin, until one comes again; up to 256."""
        if keys in self.keys or len(self.keys) == _CACHES:
            self.keys.clear()
        self.keys.add(keys)
        self.caches = max(self.caches, len(self.keys))

    def came_backward(self, _gradients: Any) -> None:
        """Count a backward pass; what made an output calls it with gradients, which stay."""
        self.backward += 1

    def cases(self, steps: int) -> Iterator[dict[str, Any]]:
        """A row of the list for each pass; `call` has what a case does not say, for people."""
        lines = Counter[str]()
        for (code, line), count in self.places.items():
            lines[f"{code.co_filename}:{line} {code.co_qualname}"] += count
        row = {name: value for name, value in self.call.items() if value not in (None, ())}
        about = {name: row.pop(name) for name in ("op", "backend", "device", "grad")}
        about |= {
            "refusals": dict(row.pop("refusals", ())), "caches": self.caches or None,
            "places": lines.most_common(5), "modules": dict(self.modules.most_common()),
        }  # fmt: skip
        forward = self.count - self.backward
        for pass_, count in (("both", self.backward), ("forward", forward)):
            if count > 0:
                about["recomputed"] = 0 if pass_ == "both" and forward else self.recomputed
                call = about | {"calls": count, "time_s": self.time_s * count / self.count}
                yield row | {"pass": pass_, "count": max(1, round(count / steps)), "call": call}


class Seen:
    """The calls of attention that were made while it was active, from all threads.

    `cases` is the case list: `sweep --cases` and `advise --cases` read the file of `save`.
    """

    def __init__(self) -> None:
        self.most, self.until_s = math.inf, math.inf
        self.began_s, self.ended_s = time.perf_counter(), 0.0
        self.stopped = ""
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self.fingerprints = Fingerprints()
        self.restart()

    def restart(self, first: Callable[[], None] | None = None) -> None:
        """Forget all calls, as in a forked process; `first` is called before the next counts."""
        self.rows: dict[Any, Row] = {}
        self.undescribed: Counter[str] = Counter()
        self.count, self.steps, self.first = 0, 0, first
        self._lock = threading.Lock()
        self._by_key: dict[Any, Row] = {}

    def add(
        self, key: Any, make: Callable[[], Call], keys: int, out: Any, time_s: float,
        frame: FrameType,
    ) -> None:  # fmt: skip
        """Count a call; `make` describes it where `key` is new, its `keys` begin there or at 0."""
        if (first := self.first) is not None:
            self.first = None
            first()
        module = self._module(frame)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back  # to the innermost line that is neither torch's nor ours
        place = (frame.f_code, frame.f_lineno)
        row = self._by_key.get(key)
        call = make() if row is None else {}
        with self._lock:
            if row is None:
                if len(self._by_key) > 4096:
                    self._by_key.clear()
                row = self.rows.setdefault(tuple(call.items()), Row(call))
                self._by_key[key] = row
            self.count += 1
            row.count += 1
            row.time_s += time_s
            row.recomputed += torch._C._current_graph_task_id() != -1
            if keys:
                row.took(keys)
            if place in row.places or len(row.places) < 16:
                row.places[place] += 1
            if module and (module in row.modules or len(row.modules) < 64):
                row.modules[module] += 1
        if getattr(out, "requires_grad", False):
            out.grad_fn.register_prehook(row.came_backward)  # half the time of a tensor's hook

    def _module(self, frame: FrameType | None) -> str:
        """The module that a frame is called by, named from the outermost one; "" for none.

        Only frames of `__call__` are asked for locals: those it keeps in any case.
        """
        while frame is not None and frame.f_code is not _MODULE_CALL:
            frame = frame.f_back
        if frame is None:
            return ""
        module = root = frame.f_locals["self"]
        if (name := self._names.get(module)) is None:
            while (frame := frame.f_back) is not None:
                if frame.f_code is _MODULE_CALL:
                    root = frame.f_locals["self"]
            for path, part in root.named_modules(prefix=type(root).__name__):
                self._names.setdefault(part, path)
            name = self._names.setdefault(module, type(module).__name__)
        return name

    def step(self) -> None:
        """Mark the end of a step, such as one of training: each `count` is then per step."""
        self.steps += 1

    def end_if_asked(self) -> None:
        """End the program where as many calls or seconds are over as were asked for."""
        if self.count >= self.most:
            self.stopped = f"after {self.count} calls"
        elif time.perf_counter() - self.began_s >= self.until_s:
            self.stopped = f"after {self.until_s:g} s"
        if self.stopped:
            raise SystemExit(0)

    @property
    def cases(self) -> list[dict[str, Any]]:
        """The case list, what most time went to first; without what no case has."""
        cases: list[dict[str, Any]] = self.report()["cases"]
        return cases

    def report(self) -> dict[str, Any]:
        """All that was seen, as plain JSON; in `left_out` the calls that no case describes."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        with self._lock:
            rows = list(self.rows.values())
        listed = [case for row in _grouped(rows) for case in row.cases(max(1, self.steps))]
        listed.sort(key=lambda row: -row["call"]["time_s"])
        return {
            "capture": CAPTURE_VERSION,
            "wall_s": (self.ended_s or time.perf_counter()) - self.began_s,
            "calls": self.count, "steps": self.steps, "stopped": self.stopped,
            "torch": torch.__version__,
            "compiled": int(utils.counters["frames"]["ok"]) if utils else 0,
            "undescribed": dict(self.undescribed),
            "cases": [row for row in listed if "problems" not in row],
            "left_out": [row for row in listed if "problems" in row],
        }  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the case list with all that was seen.

        Raises:
            StoreError: the file cannot be written.
        """
        write_whole(Path(path), json.dumps(self.report(), indent=1) + "\n")


def _grouped(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows; those of a generation, alike but for the cache's length, in groups of near lengths.

    A group has the mean of its lengths: of the cache, or of each item of a batch.
    """
    alike: dict[Any, list[tuple[list[int], Row]]] = {}
    for row in rows:
        call, lengths = dict(row.call), [row.call["S"]]
        if call["L"] == 1 < call["S"] and not call["grad"]:
            if call["mask"] == "full":
                call["S"] = 0
            elif found := re.fullmatch(r"padding:([\d+]+)", call["mask"]):
                items = [int(n) for n in found[1].split("+")]
                lengths, call["mask"] = [call["S"], *items], f"padding:{len(items)}"
                call["S"] = 0 if max(items) == call["S"] else call["S"]  # it grows, or has room
        alike.setdefault(tuple(call.items()), []).append((lengths, row))
    for group in alike.values():
        group.sort(key=lambda item: item[0])
        size = -(-len(group) // _GROUPS)
        for part in (group[at : at + size] for at in range(0, len(group), size)):
            total = Row(part[0][1].call)
            for _, row in part:
                for name in ("count", "backward", "recomputed", "time_s"):
                    setattr(total, name, getattr(total, name) + getattr(row, name))
                total.places.update(row.places)
                total.modules.update(row.modules)
                total.caches = max(total.caches, row.caches)
            if len(part) > 1:
                counts = [row.count for _, row in part]
                S, *items = (
                    round(sum(map(operator.mul, column, counts)) / total.count)
                    for column in zip(*(lengths for lengths, _ in part), strict=True)
                )
                mask = f"padding:{'+'.join(map(str, items))}" if items else total.call["mask"]
                total.call = total.call | {"S": S, "mask": mask}
            yield total


def described(
    op: str, tensors: Iterable[torch.Tensor], mask: Found, *, device: str,
    scale: float | None = None, grad: bool = False, backend: str = "",
    problems: Iterable[str] = (), softcap: float | None = None, sinks: str | None = None,
) -> Call:  # fmt: skip
    """A call by its q, k and v: (L, D), (B, L, D), or (…, H, L, D) with … as one batch."""
    q_BHLD, k_BGSD, v_BGSV = tensors
    while q_BHLD.dim() < 4:
        q_BHLD, k_BGSD, v_BGSV = (x.unsqueeze(-3) for x in (q_BHLD, k_BGSD, v_BGSV))
    D, dtype = q_BHLD.shape[-1], q_BHLD.dtype
    if torch.is_autocast_enabled(device) and dtype is torch.float32:
        dtype = torch.get_autocast_dtype(device)
    name = str(dtype).removeprefix("torch.")
    wrong = [*problems, *([mask.problem] if mask.problem else [])]
    wrong += [f"dtype {name}"] * (name not in DTYPE_BYTES)
    wrong += [f"scale {scale}"] * (scale is not None and not 0 < scale < math.inf)
    return {
        "B": math.prod(q_BHLD.shape[:-3]), "H": q_BHLD.shape[-3], "G": k_BGSD.shape[-3],
        "L": q_BHLD.shape[-2], "S": mask.keys, "D": D, "V": v_BGSV.shape[-1], "dtype": name,
        "mask": mask.text, "layout": _layout(q_BHLD, k_BGSD, v_BGSV),
        "scale": None if scale is None or math.isclose(scale, D**-0.5) else float(scale),
        "softcap": softcap, "sinks": sinks,
        "op": op, "backend": backend, "device": device, "grad": grad, "problems": tuple(wrong),
    }  # fmt: skip


def _layout(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor) -> str:
    """`packed` for parts of one (B, L, H·D + G·D + G·V) buffer, else the layout of the keys."""
    parts = (q_BHLD, k_BGSD, v_BGSV)
    sizes = [x.shape[-3] * x.shape[-1] for x in parts]
    starts = [x.data_ptr() // x.element_size() for x in parts]
    follow = [b - a for a, b in pairwise(starts)] == sizes[:2]
    if follow and all(x.stride()[-3:] == (x.shape[-1], sum(sizes), 1) for x in parts):
        return "packed"
    by_token = not k_BGSD.is_contiguous() and k_BGSD.transpose(-2, -3).is_contiguous()
    return "BLHD" if by_token else "BHLD"

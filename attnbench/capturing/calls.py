"""What a program called: each distinct call with its count, as the cases of a list."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from attnbench.capturing.masks import Fingerprints, Found
from attnbench.errors import StoreError
from attnbench.schema.case import DTYPE_BYTES

VERSION = 1
_SIZES = {"B": "batch", "H": "heads", "G": "kv_heads", "L": "seq_len", "S": "kv_len",
          "D": "head_dim", "V": "value_dim"}  # fmt: skip
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_STEPS = 4  # groups that the growing caches of a generation are counted in


@dataclass(frozen=True, kw_only=True)
class Call:
    """One distinct call, without contents. Sizes as in `Case`; `kept_len` is S of the tensors.

    `problems` name what no case has: a bias, dropout. `backend` is SDPA's, `why` the reason that a
    CPU takes no faster one.
    """

    op: str
    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: str
    device: str
    layout: str = "BHLD"
    layouts: str = ""
    scale: float | None = None
    mask: str = "full"
    kept_len: int = 0
    grad: bool = False
    autocast: bool = False
    backend: str = ""
    why: str = ""
    problems: tuple[str, ...] = ()

    @property
    def regime(self) -> str:
        """Where in a model's life such a call is made: train, decode or prefill."""
        decodes = self.seq_len == 1 < self.kept_len
        return "train" if self.grad else "decode" if decodes else "prefill"

    def case(self, pass_: str) -> dict[str, Any]:
        """Its row in a case list, but for the count."""
        row = {letter: getattr(self, name) for letter, name in _SIZES.items()}
        row |= {"dtype": self.dtype, "mask": self.mask, "layout": self.layout, "pass": pass_}
        return row | ({} if self.scale is None else {"scale": self.scale})


@dataclass
class Row:
    """How often a call came: `recomputed` are those of a checkpoint, in the backward pass."""

    call: Call
    count: int = 0
    backward: int = 0
    recomputed: int = 0
    time_s: float = 0.0
    places: Counter[tuple[CodeType, int]] = field(default_factory=Counter)
    caches: set[int] = field(default_factory=set)

    def came_backward(self, _gradient: torch.Tensor) -> None:
        """Count a backward pass; the hook of an output, whose gradient it leaves as it is."""
        self.backward += 1

    def joined(self, other: Row) -> Row:
        """Both as one, with the call of the other."""
        return Row(
            other.call, self.count + other.count, self.backward + other.backward,
            self.recomputed + other.recomputed, self.time_s + other.time_s,
            self.places + other.places, self.caches | other.caches,
        )  # fmt: skip

    def about(self) -> dict[str, Any]:
        """What a case does not say, for people and for later steps."""
        lines = Counter[str]()
        for (code, line), count in self.places.items():
            lines[f"{code.co_filename}:{line} {code.co_qualname}"] += count
        call = {k: v for k, v in asdict(self.call).items() if k not in _IN_CASES and v}
        return call | {
            "regime": self.call.regime, "calls": self.count, "time_s": self.time_s,
            "backward": self.backward, "recomputed": self.recomputed,
            "caches": len(self.caches), "places": lines.most_common(5),
        }  # fmt: skip


_IN_CASES = {item.name for item in fields(Call)} & {
    *_SIZES.values(), "dtype", "mask", "layout", "scale", "problems"
}  # fmt: skip


class Seen:
    """The calls of attention that were made while it was active, from all threads.

    `cases` is the case list: `sweep --cases` and `advise --cases` read the file of `save`.
    """

    def __init__(self, places: bool = True) -> None:
        self.rows: dict[Call, Row] = {}
        self.undescribed: Counter[str] = Counter()
        self.count, self.most, self.until_s = 0, math.inf, math.inf
        self.began_s, self.ended_s = time.perf_counter(), 0.0
        self.stopped = ""
        self._places, self._lock = places, threading.Lock()
        self._by_key: dict[Any, Row] = {}
        self.fingerprints = Fingerprints()

    def add(
        self, key: Any, make: Callable[[], Call], out: Any, time_s: float, cache: int,
        frame: FrameType | None,
    ) -> None:  # fmt: skip
        """Count a call; `make` describes it where `key` is new."""
        place = _place(frame) if self._places else None
        with self._lock:
            row = self._by_key.get(key)
        if row is None:
            call = make()
            with self._lock:
                if len(self._by_key) > 4096:
                    self._by_key.clear()
                row = self._by_key[key] = self.rows.setdefault(call, Row(call))
        with self._lock:
            self.count += 1
            row.count += 1
            row.time_s += time_s
            row.recomputed += torch._C._current_graph_task_id() != -1
            if place is not None and (place in row.places or len(row.places) < 16):
                row.places[place] += 1
            if len(row.caches) < 64:
                row.caches.add(cache)
        if getattr(out, "requires_grad", False):
            out.register_hook(row.came_backward)

    def ends(self) -> bool:
        """Whether as many calls or seconds are over as were asked for."""
        if self.count >= self.most:
            self.stopped = f"after {self.count} calls"
        elif time.perf_counter() - self.began_s >= self.until_s:
            self.stopped = f"after {self.until_s:g} s"
        return bool(self.stopped)

    @property
    def calls(self) -> list[Row]:
        """Each distinct call, the one that most time went to first; a generation in few rows."""
        with self._lock:
            rows = list(self.rows.values())
        return sorted(_steps(rows), key=lambda row: -row.time_s)

    @property
    def cases(self) -> list[dict[str, Any]]:
        """The case list, with `count` and, for people, `call`; without what no case has."""
        listed = []
        for row in self.calls:
            for pass_, count in (("both", row.backward), ("forward", row.count - row.backward)):
                if count > 0 and not row.call.problems:
                    listed.append(row.call.case(pass_) | {"count": count, "call": row.about()})
        return listed

    def report(self) -> dict[str, Any]:
        """All that was seen, as plain JSON."""
        return {
            "capture": VERSION,
            "wall_s": (self.ended_s or time.perf_counter()) - self.began_s,
            "calls": self.count, "stopped": self.stopped, "torch": torch.__version__,
            "compiled": _compiled_frames(), "undescribed": dict(self.undescribed),
            "cases": self.cases,
            "left_out": [
                {"problems": row.call.problems, **row.call.case("forward"), "count": row.count,
                 "call": row.about()}
                for row in self.calls if row.call.problems
            ],
        }  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the case list with all that was seen.

        Raises:
            StoreError: the file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(self.report(), indent=1) + "\n", "utf-8")
        except OSError as err:
            raise StoreError(f"cannot write {path} ({err.strerror})") from err


def _compiled_frames() -> int:
    """How many functions torch.compile took: of what they call nothing is seen."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["ok"]) if utils else 0


def _place(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """The innermost line that is neither torch's nor ours."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame and (frame.f_code, frame.f_lineno)


def _steps(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows; those of a generation, alike but for the cache's length, in groups of near lengths.

    A group has the mean of its lengths: of the cache, or of what is in one with room left.
    """
    alike: dict[Any, list[tuple[int, Row]]] = {}
    for row in rows:
        call, length = row.call, row.call.kv_len
        if call.regime == "decode" and re.fullmatch(r"full|padding:\d+", call.mask):
            if call.mask == "full":
                call = replace(call, kv_len=0, kept_len=0)
            else:
                length, call = int(call.mask.partition(":")[2]), replace(call, mask="padding:0")
        alike.setdefault(call, []).append((length, row))
    for call, group in alike.items():
        group.sort(key=lambda item: item[0])
        size = -(-len(group) // _STEPS)
        for part in (group[at : at + size] for at in range(0, len(group), size)):
            total = reduce(Row.joined, (row for _, row in part))
            mean = round(sum(length * row.count for length, row in part) / total.count)
            if len(part) > 1 and call.mask == "full":
                total = replace(total, call=replace(call, kv_len=mean, kept_len=mean))
            elif len(part) > 1:
                total = replace(total, call=replace(call, mask=f"padding:{mean}"))
            yield total


def described(
    op: str, tensors: Iterable[torch.Tensor], mask: Found, *, scale: float | None,
    problems: Iterable[str] = (), device: str = "", **more: Any,
) -> Call:  # fmt: skip
    """A call by its q, k and v: (L, D), (B, L, D), or (…, H, L, D) with … as one batch."""
    q_BHLD, k_BGSD, v_BGSV = tensors
    while q_BHLD.dim() < 4:
        q_BHLD, k_BGSD, v_BGSV = (x.unsqueeze(-3) for x in (q_BHLD, k_BGSD, v_BGSV))
    D, dtype = q_BHLD.shape[-1], str(q_BHLD.dtype).removeprefix("torch.")
    device = device or q_BHLD.device.type
    autocast = torch.is_autocast_enabled(device) and dtype == "float32"
    if autocast:
        dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    wrong = [*problems, *([mask.problem] if mask.problem else [])]
    wrong += [f"dtype {dtype}"] * (dtype not in DTYPE_BYTES)
    wrong += [f"scale {scale}"] * (scale is not None and not 0 < scale < math.inf)
    layouts = [_layout(x) for x in (q_BHLD, k_BGSD, v_BGSV)]
    packed = _is_packed(q_BHLD, k_BGSD, v_BGSV)
    layout = "packed" if packed else layouts[1] if layouts[1] != "other" else "BHLD"
    mixed = not packed and set(layouts) != {layout}
    return Call(
        op=op, batch=math.prod(q_BHLD.shape[:-3]), heads=q_BHLD.shape[-3],
        kv_heads=k_BGSD.shape[-3], seq_len=q_BHLD.shape[-2], kv_len=mask.keys, head_dim=D,
        value_dim=v_BGSV.shape[-1], kept_len=k_BGSD.shape[-2], dtype=dtype, device=device,
        layout=layout, layouts=", ".join(map(" ".join, zip("qkv", layouts, strict=True))) * mixed,
        scale=None if scale is None or math.isclose(scale, D**-0.5) else float(scale),
        mask=mask.text, autocast=autocast, problems=tuple(wrong), **more,
    )  # fmt: skip


def _layout(x_BHLD: torch.Tensor) -> str:
    if x_BHLD.is_contiguous():
        return "BHLD"
    return "BLHD" if x_BHLD.transpose(-2, -3).is_contiguous() else "other"


def _is_packed(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor) -> bool:
    """Whether they are parts of one (B, L, H·D + G·D + G·V) buffer, in this order."""
    parts = (q_BHLD, k_BGSD, v_BGSV)
    width = sum(x.shape[-3] * x.shape[-1] for x in parts)
    starts = [x.data_ptr() // x.element_size() for x in parts]
    sizes = [x.shape[-3] * x.shape[-1] for x in parts[:2]]
    follow = [b - a for a, b in pairwise(starts)] == sizes
    return follow and all(x.stride()[-3:] == (x.shape[-1], width, 1) for x in parts)


def sdpa_backend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, dropout: float, **more: Any
) -> dict[str, str]:
    """The kernel that SDPA takes, and where that is math on a CPU the reason."""
    names = ("math", "flash", "efficient", "cudnn", "overrideable")
    chosen = names[torch._fused_sdp_choice(q, k, v, attn_mask=mask, dropout_p=dropout, **more)]
    reasons = {
        "not of four dimensions": q.dim() != 4,
        "a mask of three dimensions": mask is not None and mask.dim() == 3,
        "dropout": dropout > 0,
        "V ≠ D": q.shape[-1] != v.shape[-1],
        "a mask that requires grad": mask is not None and mask.requires_grad,
    }
    math_on_cpu = chosen == "math" and q.device.type == "cpu"
    return {"backend": chosen, "why": ", ".join(filter(reasons.get, reasons)) * math_on_cpu}

"""The case: one problem, frozen, with an id that does not change when axes are added."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, Self, get_args

import msgspec

from attnbench.base.registry import require
from attnbench.errors import UsageError
from attnbench.schema.axes import AXES
from attnbench.schema.mask import FULL
from attnbench.schema.mask import Mask as Mask
from attnbench.schema.mask import parse_mask as parse_mask
from attnbench.schema.position import NONE
from attnbench.schema.position import Position as Position
from attnbench.schema.position import parse_position as parse_position

Pass = Literal["forward", "backward", "both"]
Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Layout = Literal["BHLD", "BLHD", "packed"]
Sinks = Literal["learned"]

PASSES: tuple[Pass, ...] = get_args(Pass)
DEVICES: tuple[Device, ...] = get_args(Device)
CAPTURE_VERSION = 1  # of a file of `attnbench capture`, a list of cases
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem: what is computed, on which device, at which sizes.

    Sizes are counts, not bytes: `batch` B, `heads` H, `kv_heads` G, `seq_len` L, `kv_len` S,
    `head_dim` D, `value_dim` V, `width` E. `kv_heads`, `kv_len` and `value_dim` equal `heads`,
    `seq_len` and `head_dim` unless given. `scale` multiplies the scores; None means 1/√D.
    `softcap` c makes c · tanh(s / c) of scaled scores s, before bias and mask; None is no cap. With
    `sinks` "learned" each query head has a logit in the softmax's sum, without a value.
    `layers` are one after another; each adds its output to what it was given, but the last. In
    `decode` each is given hidden states of its own.
    For `decode`, `seq_len` is the context before the first of `new_tokens` generated tokens,
    of which `query_tokens` go through a step at once.
    `layout` is that of q, k and v of `attention` in memory: contiguous BHLD, BLHD as projections
    leave them, or `packed`, parts of one (B, L, H·D + G·D + G·V) buffer.
    `threads` are the CPU threads of the timed calls; on a GPU always 1, whatever the host does.

    Raises:
        UsageError: a size below 1, a scale or a softcap not above 0, an unknown pass, device, dtype
            or kind of sinks. Sizes that do not fit together are not an error here:
            `traits.impossible` names the reason, which becomes a row.
    """

    workload: str = "attention"
    pass_: Pass = "forward"
    device: Device = "cpu"
    dtype: Dtype = "float32"
    batch: int = 1
    heads: int = 4
    kv_heads: int = 0  # 0 is replaced by `heads`; the same for the next two
    seq_len: int = 512
    kv_len: int = 0
    head_dim: int = 64
    value_dim: int = 0
    mask: Mask = FULL
    position: Position = NONE
    width: int | None = None
    projection: str | None = None
    cache: str | None = None
    new_tokens: int | None = None
    query_tokens: int = 1
    layers: int = 1
    scale: float | None = None
    softcap: float | None = None
    sinks: Sinks | None = None
    layout: Layout = "BHLD"
    threads: int = 1

    def __post_init__(self) -> None:
        for name, source in FOLLOWS.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, getattr(self, source))
        require("pass", [str(self.pass_)], PASSES, "--passes")
        require("device", [str(self.device)], DEVICES, "--device")
        require("dtype", [str(self.dtype)], DTYPE_BYTES, "--dtypes")
        require("layout", [str(self.layout)], get_args(Layout), "--layouts")
        for name in ("softcap", "sinks"):
            if getattr(self, name) == "none":
                object.__setattr__(self, name, None)
        require("sinks", [self.sinks or "none"], ("none", *get_args(Sinks)), "--sinks")
        for name in ("scale", "softcap"):
            if (number := getattr(self, name)) is not None:
                if not (isinstance(number, (int, float)) and 0 < number < math.inf):
                    raise UsageError(f"--{name}s takes a number above 0, not {number!r}")
                object.__setattr__(self, name, float(number))
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and (type(size) is not int or size < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, not {size!r}")

    @property
    def model_width(self) -> int:
        """E: `width`, or H·D where that is not given."""
        return self.width or self.heads * self.head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores: `scale`, or 1/√D."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors that attention is called with, in this order."""
        return ("q", "k", "v", "sink") if self.sinks else ("q", "k", "v")

    @property
    def units(self) -> int:
        """What a call does that times and FLOPs are of: the tokens of a decode, else 1."""
        return self.new_tokens or 1

    @property
    def total_len(self) -> int:
        """Tokens at the end of a call: L, and those that decoding adds."""
        return self.seq_len + (self.new_tokens or 0)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element in the case's dtype."""
        return DTYPE_BYTES[self.dtype]

    @property
    def needs_grad(self) -> bool:
        """True for the passes that differentiate."""
        return self.pass_ != "forward"

    @property
    def unmasked(self) -> bool:
        """True where the mask admits every pair: `full`, or causal with a single query."""
        return self.mask.admits_all(self.seq_len, self.kv_len)

    @property
    def unpadded(self) -> Self:
        """Of a batch that is padded to its longest item the same tokens packed, else itself.

        Of a single query over a cache that is longer than its tokens: the cache cut to these.
        """
        lengths, causal = self.mask.lengths, self.mask.after == 0
        if self.workload != "attention" or not lengths or 0 in lengths:
            return self
        if self.seq_len == len(set(lengths)) == 1:
            return replace(self, kv_len=min(lengths[0], self.kv_len), mask=FULL)
        if len(lengths) != self.batch or not self.seq_len == self.kv_len == max(lengths):
            return self
        mask = parse_mask(f"document:{'+'.join(map(str, lengths))}:causal={causal:d}")
        return replace(self, batch=1, seq_len=sum(lengths), kv_len=sum(lengths), mask=mask)

    @cached_property
    def case_id(self) -> str:
        """Twelve hex digits over the fields that differ from their default."""
        plain = self.to_json()
        default = DEFAULTS | {name: plain[source] for name, source in FOLLOWS.items()}
        differing = {name: value for name, value in plain.items() if value != default[name]}
        text = json.dumps(differing, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """Every field as plain JSON; `pass_` is written `pass`, mask and position as text."""
        row = {name: getattr(self, own) for name, own in _NAMES.items()}
        return row | {"mask": self.mask.text, "position": self.position.text}

    @classmethod
    def from_json(cls, row: Any) -> Self:
        """Inverse of `to_json`; missing fields take their default.

        Raises:
            UsageError: unknown fields, or values that make no case.
        """
        try:
            values = {_NAMES[name]: value for name, value in row.items()}
            for name, parse in (("mask", parse_mask), ("position", parse_position)):
                if name in values:
                    values[name] = parse(values[name])
            return msgspec.convert(values, cls)
        except KeyError as err:
            raise UsageError(f"not a case: it has an unknown field {err}") from err
        except (msgspec.ValidationError, AttributeError, TypeError) as err:
            raise UsageError(f"not a case: {err}") from err


_NAMES = {item.name.rstrip("_"): item.name for item in fields(Case)}  # in JSON, and here
FOLLOWS = {name: axis.follows for name, axis in AXES.items() if axis.follows}
_SIZES = [item.name for item in fields(Case) if str(item.type).startswith("int")]
DEFAULTS = Case().to_json()

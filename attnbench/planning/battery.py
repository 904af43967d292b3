"""The built-in battery of `attnbench check`: the cases in which attention kernels go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from attnbench.schema.case import Case, Device, Dtype
from attnbench.schema.messages import ImplementationInfo

_Fields = dict[str, Any]  # of a case, as its JSON has them
# Rotary encodings past the length that they were trained for.
_BEYOND = (
    "rope-partial", "rope-matrix", "rope-linear:factor=3", "rope-ntk:factor=3",
    "rope-dynamic:length=16", "rope-yarn:factor=3:length=16", "rope-llama3:factor=3:length=16",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Item:
    """One check: a name for people, the case, and how its inputs are drawn.

    Or, as `draw["property"]`, which of `worker.properties` is to hold.
    `brief` items are also run for implementations that compile, which takes many seconds a case.
    """

    name: str
    case: Case
    draw: dict[str, Any] = field(default_factory=dict)
    brief: bool = False


def small(info: ImplementationInfo) -> str | None:
    """The implementation with whole parameters an eighth as large; None where it has none.

    At those it is used with, a window or a block may hold all that the battery's cases have.
    """
    values = [
        f"{key}={max(1, parameter.default // 8)}"
        for key, parameter in info.parameters.items()
        if isinstance(parameter.default, int) and parameter.default > 1
    ]
    return ":".join([info.name, *values]) if values else None


def battery(device: Device, dtypes: tuple[Dtype, ...]) -> list[Item]:
    """Every item on `device`: the shapes and masks in each dtype, then what surrounds a core.

    Layers, decoding and the recurrent network are checked in the first dtype alone.

    `both` passes check the output and all three gradients; an implementation without a
    backward is checked on its forward by the `forward` items.
    """
    # What is no dtype is refused here, with its flag.
    plain = [Case(device=device, dtype=dtype) for dtype in dtypes]
    items = [item for case in plain for item in _attention(case.device, case.dtype)]
    around = {"device": device, "dtype": dtypes[0], "batch": 2, "head_dim": 16, "width": 48}
    properties = _properties(device, dtypes[0])
    return [*items, *properties, *_decode(around), *_layer(around), *_recurrent(around)]


def _properties(device: Device, dtype: Dtype) -> Iterator[Item]:
    """Items of `worker.properties`, by name. Long enough for several blocks of what has blocks."""
    sizes: _Fields = {"device": device, "dtype": dtype, "head_dim": 16}
    long: _Fields = sizes | {"seq_len": 600, "heads": 2}
    tiny: _Fields = sizes | {"dtype": "float64", "seq_len": 9, "heads": 2, "head_dim": 3}
    cases: dict[str, list[_Fields]] = {
        "no-look-ahead": [long | {"mask": "causal"}],
        "batch-and-heads-apart": [long | {"batch": 2, "mask": mask} for mask in ("full", "causal")],
        "any-order-of-keys": [long],
        "any-block-size": [long | {"mask": mask} for mask in ("full", "causal")],
        "exact-in-its-limit": [long | {"seq_len": 256, "mask": m} for m in ("full", "causal")],
        "gradcheck": [tiny | {"pass": "both", "mask": mask} for mask in ("full", "causal")],
    }
    for name, several in cases.items():
        for chosen in several:
            yield Item(name=name, case=Case.from_json(chosen), draw={"property": name})


def _attention(device: Device, dtype: Dtype) -> Iterator[Item]:
    base: _Fields = {"device": device, "dtype": dtype, "heads": 4, "head_dim": 32}
    shapes: dict[str, _Fields] = {
        "square": {"seq_len": 64},
        "causal": {"seq_len": 64, "mask": "causal"},
        "odd lengths": {"seq_len": 37, "kv_len": 53, "batch": 2},
        "causal, L < S": {"seq_len": 37, "kv_len": 53, "mask": "causal"},
        "causal, L > S: rows without keys": {"seq_len": 53, "kv_len": 37, "mask": "causal"},
        "one token": {"seq_len": 1},
        "one query": {"seq_len": 1, "kv_len": 65, "mask": "causal"},
        "grouped heads": {"seq_len": 48, "kv_heads": 2, "mask": "causal"},
        "one key/value head": {"seq_len": 48, "kv_heads": 1},
        "wider values": {"seq_len": 48, "value_dim": 48, "mask": "causal"},
        "narrower values": {"seq_len": 48, "value_dim": 16},
        "window": {"seq_len": 61, "mask": "window:8"},
        "large logits": {"seq_len": 64, "mask": "causal"},
        "strided inputs": {"seq_len": 50, "batch": 3},
        "several blocks": {"seq_len": 1100, "heads": 2, "mask": "causal"},
        "several blocks, unmasked": {"seq_len": 531, "head_dim": 128, "heads": 2},
        "few queries, many keys": {"seq_len": 3, "kv_len": 1025, "head_dim": 64},
        "long grouped heads": {"seq_len": 333, "kv_heads": 2, "head_dim": 80},
        "long window": {"seq_len": 400, "heads": 2, "mask": "window:100"},
        "prefix": {"seq_len": 37, "kv_len": 53, "mask": "prefix:20"},
        "prefix, L > S": {"seq_len": 53, "kv_len": 37, "mask": "prefix:5"},
        "documents": {"seq_len": 64, "batch": 2, "mask": "document:16"},
        "documents cut off": {"seq_len": 37, "kv_len": 53, "mask": "document:9+20"},
        "one long document": {"seq_len": 48, "mask": "document:100"},
        "long documents": {"seq_len": 700, "heads": 2, "mask": "document:300+7"},
        "padding": {"seq_len": 40, "batch": 3, "kv_heads": 2, "mask": "padding:25+1+60"},
        "long padding": {
            "seq_len": 140, "kv_len": 600, "heads": 2, "batch": 2, "mask": "padding:550+20",
        },
        "rope": {"seq_len": 33, "kv_len": 48, "position": "rope"},
        "rope-interleaved, odd width": {
            "seq_len": 48, "head_dim": 33, "position": "rope-interleaved",
        },
        **{name: {"seq_len": 33, "kv_len": 48, "position": name} for name in _BEYOND},
        "alibi, L < S": {
            "seq_len": 37, "kv_len": 53, "kv_heads": 2, "mask": "causal", "position": "alibi",
        },
        "t5, L > S": {"seq_len": 53, "kv_len": 37, "kv_heads": 2, "position": "t5:distance=20"},
        "shaw, several blocks": {
            "seq_len": 600, "heads": 2, "mask": "causal", "position": "shaw:5",
        },
    }  # fmt: skip
    draws: dict[str, _Fields] = {
        "large logits": {"query_amplitude": 30.0},
        "strided inputs": {"strided": True},
    }
    brief = ("causal, L < S", "grouped heads", "padding")
    for name, sizes in shapes.items():
        for pass_ in ("both", "forward"):  # in a row: the reference of the one serves the other
            yield Item(
                name=name,
                case=Case.from_json(base | sizes | {"pass": pass_}),
                draw=draws.get(name, {}),
                brief=name in brief and dtype == "float32",
            )


def _decode(around: _Fields) -> Iterator[Item]:
    around = around | {"workload": "decode", "kv_heads": 2, "seq_len": 29, "mask": "causal"}
    items: dict[str, _Fields] = {
        cache: {"cache": cache}
        for cache in ("rerun", "none", "concat", "static", "paged:4", "int8", "int8-head")
    }
    items |= {f"{name}, rope": sizes | {"position": "rope"} for name, sizes in items.items()}
    items |= {
        "sliding": {"cache": "sliding", "mask": "window:8", "position": "rope"},
        "latent": {"cache": "latent:24"},
        "sliding, wider than the context": {"cache": "sliding", "mask": "window:31"},
        "shared": {"cache": "shared", "layers": 2},
        "half empty": {"cache": "static:64"},
        "lengths": {"cache": "static", "mask": "padding:29+12", "position": "rope"},
        "lengths, paged": {"cache": "paged:4", "mask": "padding:29+12"},
        "two queries": {"cache": "concat", "query_tokens": 2, "position": "rope"},
        "alibi": {"cache": "static", "position": "alibi"},
        "sinusoidal": {"cache": "concat", "position": "sinusoidal"},
        "learned": {"cache": "rerun", "position": "learned"},
        "two queries, t5": {"cache": "static", "query_tokens": 2, "position": "t5"},
        "two queries, window": {"cache": "static", "query_tokens": 2, "mask": "window:8"},
    }
    for name, sizes in items.items():
        yield Item(name=f"decode, {name}", case=Case.from_json(around | {"new_tokens": 4} | sizes))


def _layer(around: _Fields) -> Iterator[Item]:
    around = around | {"workload": "layer"}
    shapes: dict[str, _Fields] = {
        "both": {"pass": "both", "seq_len": 40},
        "causal, grouped heads": {"pass": "both", "seq_len": 37, "kv_heads": 2, "mask": "causal"},
        "rope, wider values": {"seq_len": 33, "value_dim": 24, "position": "rope"},
        "sinusoidal": {"pass": "both", "seq_len": 33, "position": "sinusoidal"},
    }
    for projection in ("fused", "separate", "per-head"):
        for name, sizes in shapes.items():
            case = Case.from_json(around | sizes | {"projection": projection})
            yield Item(name=f"layer, {projection}, {name}", case=case)
    others: dict[str, _Fields] = {
        "separate": {"layers": 2},
        "mla:16": {"layers": 2},
        "pruned:2": {"kv_heads": 2},
        "tied": {"kv_heads": 1},
        "tied-layers": {"layers": 3, "position": "alibi"},
    }
    for projection, sizes in others.items():
        alike = {"pass": "both", "seq_len": 37, "mask": "causal", "projection": projection}
        case = Case.from_json(around | alike | sizes)
        yield Item(name=f"layer, {projection}, layers={case.layers}", case=case)


def _recurrent(around: _Fields) -> Iterator[Item]:
    around = around | {"workload": "recurrent", "seq_len": 29, "mask": "causal"}
    for pass_ in ("both", "forward"):
        yield Item(name="recurrent", case=Case.from_json(around | {"pass": pass_}))

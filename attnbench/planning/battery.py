"""The built-in battery of `attnbench check`: the cases in which attention kernels go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from attnbench.schema.case import Case, Device, Dtype, Pass, parse_mask, parse_position
from attnbench.schema.messages import ImplementationInfo

_FULL, _CAUSAL, _WINDOW = parse_mask("full"), parse_mask("causal"), parse_mask("window:8")

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
    items = [item for dtype in dtypes for item in _attention(device, dtype)]
    around: dict[str, Any] = {
        "device": device, "dtype": dtypes[0], "batch": 2, "head_dim": 16, "width": 48
    }  # fmt: skip
    properties = _properties(device, dtypes[0])
    return [*items, *properties, *_decode(around), *_layer(around), *_recurrent(around)]


def _properties(device: Device, dtype: Dtype) -> Iterator[Item]:
    """Items of `worker.properties`, by name. Long enough for several blocks of what has blocks."""
    sizes: dict[str, Any] = {"device": device, "dtype": dtype, "head_dim": 16}
    long: dict[str, Any] = sizes | {"seq_len": 600, "heads": 2}
    tiny: dict[str, Any] = sizes | {"dtype": "float64", "seq_len": 9, "heads": 2, "head_dim": 3}
    cases: dict[str, list[dict[str, Any]]] = {
        "no-look-ahead": [long | {"mask": _CAUSAL}],
        "batch-and-heads-apart": [long | {"batch": 2, "mask": mask} for mask in (_FULL, _CAUSAL)],
        "any-order-of-keys": [long],
        "any-block-size": [long | {"mask": mask} for mask in (_FULL, _CAUSAL)],
        "exact-in-its-limit": [long | {"seq_len": 256, "mask": mask} for mask in (_FULL, _CAUSAL)],
        "gradcheck": [tiny | {"pass_": "both", "mask": mask} for mask in (_FULL, _CAUSAL)],
    }
    for name, several in cases.items():
        for chosen in several:
            yield Item(name=name, case=Case(**chosen), draw={"property": name})


def _attention(device: Device, dtype: Dtype) -> Iterator[Item]:
    base: dict[str, Any] = {"device": device, "dtype": dtype, "heads": 4, "head_dim": 32}
    shapes: dict[str, dict[str, Any]] = {
        "square": {"seq_len": 64},
        "causal": {"seq_len": 64, "mask": _CAUSAL},
        "odd lengths": {"seq_len": 37, "kv_len": 53, "batch": 2},
        "causal, L < S": {"seq_len": 37, "kv_len": 53, "mask": _CAUSAL},
        "causal, L > S: rows without keys": {"seq_len": 53, "kv_len": 37, "mask": _CAUSAL},
        "one token": {"seq_len": 1},
        "one query": {"seq_len": 1, "kv_len": 65, "mask": _CAUSAL},
        "grouped heads": {"seq_len": 48, "kv_heads": 2, "mask": _CAUSAL},
        "one key/value head": {"seq_len": 48, "kv_heads": 1},
        "wider values": {"seq_len": 48, "value_dim": 48, "mask": _CAUSAL},
        "narrower values": {"seq_len": 48, "value_dim": 16},
        "window": {"seq_len": 61, "mask": _WINDOW},
        "large logits": {"seq_len": 64, "mask": _CAUSAL},
        "strided inputs": {"seq_len": 50, "batch": 3},
        "several blocks": {"seq_len": 1100, "heads": 2, "mask": _CAUSAL},
        "several blocks, unmasked": {"seq_len": 531, "head_dim": 128, "heads": 2},
        "few queries, many keys": {"seq_len": 3, "kv_len": 1025, "head_dim": 64},
        "long grouped heads": {"seq_len": 333, "kv_heads": 2, "head_dim": 80},
        "long window": {"seq_len": 400, "heads": 2, "mask": parse_mask("window:100")},
        "prefix": {"seq_len": 37, "kv_len": 53, "mask": parse_mask("prefix:20")},
        "prefix, L > S": {"seq_len": 53, "kv_len": 37, "mask": parse_mask("prefix:5")},
        "documents": {"seq_len": 64, "batch": 2, "mask": parse_mask("document:16")},
        "documents cut off": {"seq_len": 37, "kv_len": 53, "mask": parse_mask("document:9+20")},
        "one long document": {"seq_len": 48, "mask": parse_mask("document:100")},
        "long documents": {"seq_len": 700, "heads": 2, "mask": parse_mask("document:300+7")},
        "padding": {
            "seq_len": 40, "batch": 3, "kv_heads": 2, "mask": parse_mask("padding:25+1+60"),
        },
        "long padding": {
            "seq_len": 140, "kv_len": 600, "heads": 2, "batch": 2,
            "mask": parse_mask("padding:550+20"),
        },
        "rope": {"seq_len": 33, "kv_len": 48, "position": parse_position("rope")},
        "rope-interleaved, odd width": {
            "seq_len": 48, "head_dim": 33, "position": parse_position("rope-interleaved"),
        },
        **{
            name: {"seq_len": 33, "kv_len": 48, "position": parse_position(name)}
            for name in _BEYOND
        },
        "alibi, L < S": {
            "seq_len": 37, "kv_len": 53, "kv_heads": 2, "mask": _CAUSAL,
            "position": parse_position("alibi"),
        },
        "t5, L > S": {
            "seq_len": 53, "kv_len": 37, "kv_heads": 2,
            "position": parse_position("t5:distance=20"),
        },
        "shaw, several blocks": {
            "seq_len": 600, "heads": 2, "mask": _CAUSAL, "position": parse_position("shaw:5"),
        },
    }  # fmt: skip
    draws: dict[str, dict[str, Any]] = {
        "large logits": {"query_amplitude": 30.0},
        "strided inputs": {"strided": True},
    }
    brief = ("causal, L < S", "grouped heads", "padding")
    for name, sizes in shapes.items():
        for pass_ in ("both", "forward"):  # in a row: the reference of the one serves the other
            yield Item(
                name=name,
                case=Case(**(base | sizes), pass_=pass_),  # type: ignore[arg-type]
                draw=draws.get(name, {}),
                brief=name in brief and dtype == "float32",
            )


def _decode(around: dict[str, Any]) -> Iterator[Item]:
    base: dict[str, Any] = {"kv_heads": 2, "seq_len": 29, "mask": _CAUSAL, "new_tokens": 4}
    lengths, rope = parse_mask("padding:29+12"), parse_position("rope")
    items: dict[str, dict[str, Any]] = {
        cache: {"cache": cache}
        for cache in ("rerun", "none", "concat", "static", "paged:4", "int8", "int8-head")
    }
    items |= {f"{name}, rope": sizes | {"position": rope} for name, sizes in items.items()}
    items |= {
        "sliding": {"cache": "sliding", "mask": _WINDOW, "position": rope},
        "latent": {"cache": "latent:24"},
        "sliding, wider than the context": {"cache": "sliding", "mask": parse_mask("window:31")},
        "shared": {"cache": "shared", "layers": 2},
        "half empty": {"cache": "static:64"},
        "lengths": {"cache": "static", "mask": lengths, "position": rope},
        "lengths, paged": {"cache": "paged:4", "mask": lengths},
        "two queries": {"cache": "concat", "query_tokens": 2, "position": rope},
        "alibi": {"cache": "static", "position": parse_position("alibi")},
        "sinusoidal": {"cache": "concat", "position": parse_position("sinusoidal")},
        "learned": {"cache": "rerun", "position": parse_position("learned")},
        "two queries, t5": {"cache": "static", "query_tokens": 2, "position": parse_position("t5")},
        "two queries, window": {"cache": "static", "query_tokens": 2, "mask": _WINDOW},
    }
    for name, sizes in items.items():
        yield Item(name=f"decode, {name}", case=Case(**around, **(base | sizes), workload="decode"))


def _layer(around: dict[str, Any]) -> Iterator[Item]:
    shapes: dict[str, dict[str, Any]] = {
        "both": {"pass_": "both", "seq_len": 40},
        "causal, grouped heads": {"pass_": "both", "seq_len": 37, "kv_heads": 2, "mask": _CAUSAL},
        "rope, wider values": {"seq_len": 33, "value_dim": 24, "position": parse_position("rope")},
        "sinusoidal": {"pass_": "both", "seq_len": 33, "position": parse_position("sinusoidal")},
    }
    for projection in ("fused", "separate", "per-head"):
        for name, sizes in shapes.items():
            case = Case(**around, **sizes, workload="layer", projection=projection)
            yield Item(name=f"layer, {projection}, {name}", case=case)
    others: dict[str, dict[str, Any]] = {
        "separate": {"layers": 2},
        "mla:16": {"layers": 2},
        "pruned:2": {"kv_heads": 2},
        "tied": {"kv_heads": 1},
        "tied-layers": {"layers": 3, "position": parse_position("alibi")},
    }
    for projection, sizes in others.items():
        alike: dict[str, Any] = {"workload": "layer", "pass_": "both", "seq_len": 37}
        case = Case(**around, **alike, **sizes, mask=_CAUSAL, projection=projection)
        yield Item(name=f"layer, {projection}, layers={case.layers}", case=case)


def _recurrent(around: dict[str, Any]) -> Iterator[Item]:
    passes: tuple[Pass, ...] = ("both", "forward")
    for pass_ in passes:
        case = Case(**around, workload="recurrent", pass_=pass_, seq_len=29, mask=_CAUSAL)
        yield Item(name="recurrent", case=case)

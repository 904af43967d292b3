"""Models: the calls of attention that a config.json, as transformers writes it, stands for."""

from __future__ import annotations

import contextlib
import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from attnbench.base import files, jsontext
from attnbench.base.registry import require, unknown
from attnbench.base.units import parse_sizes
from attnbench.errors import UsageError
from attnbench.planning.caselist import is_captured, listed
from attnbench.planning.plan import Axes, expand, overridden
from attnbench.schema.case import Case
from attnbench.schema.messages import ModelSizes
from attnbench.schema.position import parse_position

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
ARCHITECTURES, ROPE, MODELS = (_TABLE[name] for name in ("architectures", "rope", "models"))
ACTIVATIONS = _TABLE["activations"]["names"]
_NEEDED = ("hidden_size", "num_attention_heads", "num_hidden_layers")
STEPS = ("prefill", "decode", "train")
_FULL, _SLIDING = "full_attention", "sliding_attention"  # as layer_types has them
Row = Mapping[str, Any]
_TYPES: dict[str, Any] = {
    "size": Annotated[int, msgspec.Meta(ge=1, le=1 << 40)],
    "count": Annotated[int, msgspec.Meta(ge=1, le=10_000)],
    "real": Annotated[float, msgspec.Meta(gt=0)],
    "part": Annotated[float, msgspec.Meta(gt=0, le=1)],
    "share": Annotated[float, msgspec.Meta(ge=0)],
    "numbers": list[Annotated[float, msgspec.Meta(gt=0)]],
    "kinds": list[Literal["full_attention", "sliding_attention"]],
    "flag": bool, "text": str, "object": dict[str, Any],
}  # fmt: skip
Config: Any = msgspec.defstruct(
    "Config",
    [(key, _TYPES[kind] | None, None) for kind, v in _TABLE["keys"].items() for key in v.split()],
)


def asked_sweeps(
    plain: Sequence[Axes], axes: Row, preset: str | None = None, model: str | None = None,
    step: str | None = None, tokens: Any = None, case: Sequence[str] | None = None,
    cases: Path | None = None,
) -> tuple[tuple[Axes, ...], str]:  # fmt: skip
    """The sweeps asked for: `plain` ones, listed cases, or a model's step; and what it has beside.

    `axes` are those given, too, which hold in place of what a list or a model says.

    Raises:
        UnknownNameError: there is no such model and no such file, or no such step.
        UsageError: options exclude each other; or the file does not say what is needed, contradicts
            itself, or is of another architecture; or the model has no such step or length.
    """
    workload = axes.get("workload") or "attention"
    if model is None and (step or tokens is not None):
        raise UsageError("--step and --tokens go with --model NAME")
    given = {"--preset": preset, "--model": model, "--case or --cases": case or cases}
    if len(flags := [flag for flag, value in given.items() if value]) > 1:
        raise UsageError(f"take only one of {', '.join(flags)}")
    if case or cases:
        return overridden(listed(case or (), cases, axes), {**axes, "workload": None}), ""
    if model is None:
        return overridden(plain, axes), ""
    if axes.get("seq_lens") or axes.get("kv_lens"):
        raise UsageError("--model takes --tokens, not --seq-lens or --kv-lens")
    try:
        sweeps, left_out = _sweeps(_config(model), step, tokens, workload)
    except UsageError as err:
        raise UsageError(f"--model {model:.200}: {err}") from err
    return overridden(sweeps, {**axes, "workload": None}), left_out


def calls_of(model: str) -> tuple[list[tuple[str, int, Case]], str]:
    """The calls of each step that a model has, at usual lengths; and what no case has of it.

    A call is the name of its step, how many layers make it, and its case. Of a file of `attnbench
    capture` they are what it holds.
    """
    if is_captured(file := Path(model)):
        rows = listed((), file, {})
        return [(of.step, of.count, case) for of in rows for case in expand(of, "cpu")], ""
    calls, left_out = [], ""
    for step in STEPS:
        with contextlib.suppress(*[UsageError] * (step == "decode")):  # an encoder has none
            sweeps, left_out = asked_sweeps((), {}, model=model, step=step)
            calls += [(of.step, of.count, case) for of in sweeps for case in expand(of, "cpu")]
    return calls, left_out  # training leaves out what the others do, and dropout


def model_sizes(model: str | None, workload: str | None) -> ModelSizes | None:
    """What stands around attention in a model, for the workloads that time it; None of others.

    Raises:
        UsageError: its config.json contradicts itself, or is of another architecture.
    """
    if model is None or workload not in ("layer", "decode"):
        return None
    (row, arch), notes = _known(_config(model)), list[str]()
    experts = row.num_local_experts or row.num_experts or row.n_routed_experts or 1
    inner = (row.moe_intermediate_size if experts > 1 else None) or row.intermediate_size
    encoder, act = "encoder" in arch, row.hidden_activation or row.hidden_act
    act = act or ("gelu" if encoder else "silu")
    if act not in ACTIVATIONS:
        notes, inner = [f"MLP not timed: no activation {act:.60}"], 0
    elif inner is None:
        notes = ["MLP not timed: no intermediate_size"]
    if row.vocab_size is None and not encoder:
        notes.append("head not timed: no vocab_size")
    return ModelSizes(
        layers=_given(row, "num_hidden_layers"), inner=inner or 0, gated=not encoder,
        experts=experts, chosen=row.num_experts_per_tok or 1, notes=tuple(notes),
        activation=ACTIVATIONS.get(act, "silu"), vocab=0 if encoder else row.vocab_size or 0,
    )  # fmt: skip


def _sweeps(outer: Row, step: str | None, tokens: Any, workload: str) -> tuple[list[Axes], str]:
    """One sweep for each length and kind of layer."""
    step = step or "prefill"
    require("step", [step], STEPS, "--step")
    row, arch = _known(outer)
    # Images and sound come to the language model as embeddings, by parts of their own.
    left_out = [name for name in ("vision_config", "audio_config") if outer.get(name)]
    left_out += _unread(outer)
    sizes, encoder = _sizes(row), "encoder" in arch
    layers = _layers(row, arch, sizes["head_dims"], left_out)
    if encoder and "decode" in (step, workload):
        raise UsageError("an encoder has no decode step; take --step prefill, or train")
    if row.kv_lora_rank and workload != "attention":
        raise UsageError(f"{workload} has not all parts of its latent attention (--workload)")
    sinks = "learned" if "sinks" in arch and workload != "layer" else None
    left_out += ["attention sinks"] if "sinks" in arch and not sinks else []
    if step == "train" and (p := row.attention_dropout or row.attention_probs_dropout_prob):
        left_out.append(f"dropout of {p:g}")
    most, usual = math.inf, 2048
    if "image" in arch:
        usual = (_given(row, "image_size") // _given(row, "patch_size")) ** 2 + 1
    elif encoder:
        usual = most = _given(row, "max_position_embeddings")
    sweeps, name = [], "forward" if encoder and step == "prefill" else step
    tokens = parse_sizes(tokens, "--tokens") if isinstance(tokens, str) else tokens
    for n in Axes(seq_lens=usual if tokens is None else tokens).values["seq_lens"]:
        if n > most:
            raise UsageError(f"it has {most} positions, too few for --tokens {n}")
        calls: Counter[tuple[tuple[str, Any], ...]] = Counter()
        for (window, position), count in layers.items():
            call: dict[str, Any] = {"passes": "both"} if step == "train" else {}
            # A window that hides nothing is none. What a step of decoding reads was turned, and cut
            # to the window, when it was cached; else q, k and v lie as projections leave them.
            mask = "full" if encoder else f"window:{window}" if 0 < window < n else "causal"
            call |= {"sinks": sinks} if sinks else {}
            if workload != "attention":
                call |= {"seq_lens": n, "masks": mask, "positions": position}
                call |= {"widths": row.hidden_size}
            elif step == "decode":
                call |= {"seq_lens": 1, "kv_lens": min(n, window or n)}
            else:
                call |= {"seq_lens": n, "masks": mask, "layouts": "BLHD"}
                call |= {} if encoder else {"positions": position}
            calls[tuple(call.items())] += count
        sweeps += [
            Axes(workload, count=count, step=f"{name} {n}", **dict(call), **sizes)
            for call, count in calls.items()
        ]
    return sweeps, ", ".join(dict.fromkeys(left_out))


def _config(text: str) -> Row:
    """What a preset has, or a file, or config.json in a folder."""
    path = Path(text)
    if text in MODELS:
        return dict(MODELS[text]["config"])
    try:
        path = path / "config.json" if path.is_dir() else path
        return jsontext.decode(files.read(path), dict[str, Any])
    except OSError as err:
        if path.suffix == ".json":
            raise UsageError(f"cannot read {path}: {err.strerror or err}") from err
        raise UsageError(f"{unknown('model', text, MODELS)}; or a path of a config.json") from err
    except ValueError as err:
        raise UsageError(f"it is not an object of JSON: {err}") from err


def _known(outer: Row) -> tuple[Any, Row]:
    """The keys of the language model, and what is known of its architecture."""
    inner = outer["text_config"] if isinstance(outer.get("text_config"), dict) else outer
    kind = inner.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UsageError(
            ("it has no model_type" if kind is None else f"model_type {kind!r:.60} is unknown")
            + f"; known: {', '.join(ARCHITECTURES)}; another needs a row of"
            " attnbench/planning/models.toml, or give --heads, --kv-heads, --head-dims,"
            " --masks, --positions and --scales yourself, without --model"
        )
    arch = ARCHITECTURES[kind]
    dtypes = {key: outer.get(key) for key in ("dtype", "torch_dtype")}
    row = _read(arch.get("absent", {}) | dtypes | inner)
    for key in ("use_bidirectional_attention", "is_decoder", "add_cross_attention"):
        if getattr(row, key):
            raise UsageError(f"{key} is not known of {kind}: it changes the mask, or adds calls")
    return row, arch


def _unread(outer: Row) -> Iterator[str]:
    """What keys change attention that nothing here reads."""
    for path, (words, *plain) in _TABLE["unread"].items():
        for value in (outer, outer.get("text_config")):
            for key in path.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value and value not in plain:
                yield words.format(value)


def _sizes(row: Any) -> dict[str, Any]:
    """Values of axes that all layers share."""
    width, heads = _given(row, "hidden_size"), _given(row, "num_attention_heads")
    groups, scale = row.num_key_value_heads or heads, None
    if heads % groups or (row.kv_lora_rank and groups < heads):
        raise UsageError(
            f"num_key_value_heads {groups}, given or transformers' default, contradicts"
            f" num_attention_heads {heads}"
        )
    if row.kv_lora_rank:
        head_dim = _given(row, "qk_nope_head_dim") + _given(row, "qk_rope_head_dim")
        value_dim, rope = _given(row, "v_head_dim"), _rope_row(row, _FULL)
        spread = (rope.mscale_all_dim or 0.0) * math.log(max(1.0, rope.factor or 1.0))
        scale = head_dim**-0.5 * (1 + 0.1 * spread) ** 2  # YaRN's temperature is here
    else:
        if row.head_dim is None and width % heads:
            raise UsageError(f"hidden_size {width} is not a multiple of {heads} heads")
        head_dim = value_dim = row.head_dim or width // heads
        if row.query_pre_attn_scalar not in (None, head_dim):
            scale = row.query_pre_attn_scalar**-0.5
    return {
        "heads": heads, "kv_heads": groups, "head_dims": head_dim, "value_dims": value_dim,
        "scales": (scale,), "softcaps": (row.attn_logit_softcapping,),
        "dtypes": row.dtype or row.torch_dtype or "float32",
    }  # fmt: skip


def _layers(row: Any, arch: Row, head_dim: int, left_out: list[str]) -> Counter[tuple[int, str]]:
    """How many layers have each window (0: none) and position encoding."""
    layers, windows = _given(row, "num_hidden_layers"), arch.get("windows")
    window = 0 if row.use_sliding_window is False else row.sliding_window or 0
    kinds = [_SLIDING if window and windows else _FULL] * layers
    if windows == "types":
        every, after = row.sliding_window_pattern, row.max_window_layers or 0
        slides = [window and ((i + 1) % every if every else i >= after) for i in range(layers)]
        kinds = row.layer_types or [_SLIDING if each else _FULL for each in slides]
    if row.layer_types and (count := len(row.layer_types)) != layers:
        raise UsageError(f"{count} layer_types contradict num_hidden_layers {layers}")
    if _SLIDING in kinds and not window:
        raise UsageError(f"layer_types has {_SLIDING}, but there is no sliding_window in use")
    if row.kv_lora_rank:
        left_out.append(f"rotary positions of {row.qk_rope_head_dim} of {head_dim} dims")
        places = dict.fromkeys(kinds, "none")
    elif "encoder" in arch:
        places = dict.fromkeys(kinds, "learned")
    else:
        places = {each: _rope(row, each, head_dim, left_out) for each in dict.fromkeys(kinds)}
    return Counter((window if each == _SLIDING else 0, places[each]) for each in kinds)


def _read(row: Row) -> Any:
    try:
        return msgspec.convert({k: v for k, v in row.items() if v is not None}, Config)
    except msgspec.ValidationError as err:
        raise UsageError(str(err)) from err


def _given(row: Any, name: str) -> Any:
    if (value := getattr(row, name)) is None:
        lacks = [n for n in dict.fromkeys((name, *_NEEDED)) if getattr(row, n) is None]
        needed = "which is needed" if len(lacks) == 1 else "which are needed"
        raise UsageError(f"it has no {', no '.join(lacks)}, {needed}")
    return value


def _rope_row(row: Any, kind: str) -> Any:
    """What transformers knows of rotary positions in layers of this kind."""
    found = row.rope_parameters or row.rope_scaling or {}
    if {_FULL, _SLIDING} & found.keys():
        found = found.get(kind) or {}
    elif kind == _SLIDING and row.rope_local_base_freq:
        found = {"rope_theta": row.rope_local_base_freq}
    if not isinstance(found, dict):
        raise UsageError(f"its rope_parameters of {kind} are not an object")
    rope = _read(msgspec.structs.asdict(row) | found)
    trained = row.original_max_position_embeddings or rope.original_max_position_embeddings
    rope.original_max_position_embeddings = trained or rope.max_position_embeddings
    return rope


def _rope(row: Any, kind: str, head_dim: int, left_out: list[str]) -> str:
    """The position encoding of layers of this kind, as its axis has it."""
    rope = _rope_row(row, kind)
    scaled = rope.rope_type or rope.type or "default"
    scaled = "longrope" if scaled == "su" else scaled  # as early Phi-3 has it
    require("rope_type", [scaled], ("default", *ROPE))
    share = rope.partial_rotary_factor or 1.0
    if (turned := int(head_dim * share)) % 2:
        raise UsageError(f"rotary positions turn pairs of dims, and it has {turned}")
    if share != 1 and scaled != "default":
        left_out.append(f"rotary positions of {turned} of {head_dim} dims, scaled by {scaled}")
        return "none"
    name, values = "rope", dict[str, Any](base=rope.rope_theta or 10000.0)
    if share != 1:
        name, values["share"] = "rope-partial", share
    if scaled != "default":
        name = ROPE[scaled]["name"]
        if scaled in ("yarn", "longrope") and not rope.factor and rope.max_position_embeddings:
            rope.factor = rope.max_position_embeddings / rope.original_max_position_embeddings
        if not (rope.mscale and rope.mscale_all_dim):  # transformers takes both or none
            rope.mscale = rope.mscale_all_dim = None
        for own, key in ROPE[scaled]["keys"].items():
            value = _given(rope, key[:-1]) if key.endswith("!") else getattr(rope, key)
            values |= {} if value is None else {own: value}
    for key in {"short", "long"} & values.keys():
        if len(values[key]) != head_dim // 2:
            raise UsageError(f"{key}_factor has not {head_dim // 2} numbers, one a pair")
    parts = {key: x if isinstance(x, list) else [x] for key, x in values.items()}
    texts = [f"{key}={'+'.join(str(+y) for y in own)}" for key, own in parts.items()]
    return parse_position(":".join([name, *texts])).text

"""Does attention take the share of a step that is predicted?

Models of transformers with random weights, as they run by themselves, against the layer, MLP and
head that stand for them, in turn and on one thread. Norms, residuals, biases and embedding are in
the measured share alone.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attnbench.analysis.advice import envelope
from attnbench.analysis.pairs import core_times, ratio_of, step_times
from attnbench.api.loader import load_built_in
from attnbench.base.stats import median
from attnbench.measure.clock import clock_for
from attnbench.measure.sampling import StoppingRule
from attnbench.measure.watch import Watch
from attnbench.planning.models import asked_sweeps, model_sizes
from attnbench.planning.plan import expand
from attnbench.schema.record import Record
from attnbench.theory.choices import as_transformers
from attnbench.worker.checking import Entry, Reporter
from attnbench.worker.measuring import Instruments, measure_group
from tests.validation.page import Table
from tests.validation.runner import Ended, Tell

OFF, OUTSIDE, HEADS, WIDTH, INNER = 0.15, 1, 16, 1024, 2816
CALLS = 5  # of the model in a round
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": INNER}
SHARED = {**SIZES, "num_key_value_heads": 4, "vocab_size": 16_000}
MODELS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {  # class, step, tokens, layers
    "Llama, prefill": ("Llama", "prefill", 1024, 2, SHARED | {"num_key_value_heads": HEADS}),
    "Qwen2, prefill": ("Qwen2", "prefill", 1024, 2, SHARED),
    "BERT": ("Bert", "prefill", 512, 2, SIZES),
    "Llama, decode": ("Llama", "decode", 2048, 8, SHARED),
}  # fmt: skip
Call = Callable[[], float]


def transformer(
    name: str, step: str, tokens: int, layers: int, sizes: dict[str, Any], dtype: str
) -> tuple[Call, dict[str, Any]]:
    """A call of the model that returns the share of its attention function; and its config."""
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    spent_s = [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        found = sdpa_attention_forward(*args, **kwargs)
        spent_s[0] += time.perf_counter() - begin
        return found

    AttentionInterface.register("timed", timed)
    AttentionMaskInterface.register("timed", sdpa_mask)
    kind = "Model" if name == "Bert" else "ForCausalLM"
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=layers, **sizes)
    config._attn_implementation = "timed"
    model = getattr(transformers, name + kind)(config).to(getattr(torch, dtype)).eval()
    ids, cache = torch.randint(0, 1000, (1, tokens)), transformers.DynamicCache(config=config)
    last = {} if name == "Bert" else {"logits_to_keep": 1}
    more: dict[str, Any] = last if name == "Bert" else {"use_cache": False, **last}
    if step == "decode":
        model(ids, cache=cache, **last)
        ids, more = ids[:, :1], {"cache": cache}

    def call() -> float:
        spent_s[0], begin = 0.0, time.perf_counter()
        model(ids, **more)
        share = spent_s[0] / (time.perf_counter() - begin)
        if step == "decode":
            cache.crop(-1)
        return share

    return call, {**config.to_dict(), "dtype": dtype}


def prediction(config: dict[str, Any], step: str, tokens: int) -> Callable[[], Record]:
    """Measures the layer around the call that transformers makes, with MLP and head."""
    workload = "decode" if step == "decode" else "layer"
    axes = {"workload": workload} | ({"caches": ("concat",)} if step == "decode" else {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config))
        model: Any = {"model": str(file), "step": step, "tokens": (tokens,)}
        [sweep], _ = asked_sweeps((), axes, **model)
        [[core], _] = asked_sweeps((), {}, **model)
        sizes = model_sizes(str(file), workload)
    [case], [call] = expand(sweep, "cpu"), expand(core, "cpu")
    entry = Entry(index=0, case=case, impls=(as_transformers(call),))
    rule = StoppingRule(min_time_s=0.3, max_time_s=1.0)

    def measured() -> Record:
        records: list[Record] = []
        clock = clock_for("cpu", l2="cold" if step == "decode" else "warm")
        with_model = Instruments(rule=rule, clock=clock, watch=Watch(), model=sizes)
        collect = Reporter(at=lambda *_: None, record=lambda _, record: records.append(record))
        measure_group([entry], with_model, collect)
        return records[0]

    return measured


def examine(tell: Tell, *, rounds: int) -> Ended:
    """A table of shares, and whether they are met."""
    load_built_in()
    torch.set_num_threads(1)
    rows, off, outside = [], list[str](), list[str]()
    for name, (kind, step, tokens, layers, sizes) in MODELS.items():
        for dtype in ("float32", "bfloat16"):
            with torch.no_grad():
                call, config = transformer(kind, step, tokens, layers, sizes, dtype)
            predict, seen, ratios = prediction(config, step, tokens), list[float](), []
            for number in range(rounds):
                with torch.no_grad():
                    seen += [call() for _ in range(CALLS)]
                record = predict()
                core, whole = core_times(record), step_times(record)
                if core is None or whole is None:
                    raise RuntimeError(f"{name}, {dtype}: {record.status}: {record.reason}")
                value, interval = ratio_of(core, whole)
                ratios.append((value, *(interval or (None, None))))
                tell(f"{name}, {dtype}: round {number + 1} of {rounds}")
            share, (middle, low, high) = median(seen), envelope(ratios)
            ratio = (middle or 0.0) / share
            off += [f"{name}, {dtype}: {ratio:.2f}"] * (abs(ratio - 1) > OFF)
            holds = low is not None and high is not None and low <= share <= high
            outside += [f"{name}, {dtype}"] * (not holds)
            ends = f"{100 * (low or 0):.1f}–{100 * (high or 0):.1f} %"
            percents = (f"{100 * x:.1f} %" for x in (share, middle or 0.0))
            rows.append((f"{name}, {dtype}", *percents, ends, f"{ratio:.2f}"))
    header = ("step", "measured", "predicted", "interval", "ratio")
    lines = [f"off: {'; '.join(off) or 'none'}", f"outside: {'; '.join(outside) or 'none'}"]
    table = Table(title="Shares of attention", header=header, rows=tuple(rows))
    return Ended(met=not off and len(outside) <= OUTSIDE, tables=[table], lines=lines)

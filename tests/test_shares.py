"""What stands around attention in a model is timed as transformers has it, and shares add up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnbench.analysis.pairs import cell_times, core_times, step_times
from attnbench.api import implementation
from attnbench.measure.clock import clock_for
from attnbench.measure.sampling import StoppingRule
from attnbench.measure.watch import Watch
from attnbench.planning.models import model_sizes
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.messages import ModelSizes
from attnbench.schema.record import Record
from attnbench.worker.checking import Entry
from attnbench.worker.inputs import Draw
from attnbench.worker.measuring import Instruments, measure_group
from attnbench.worker.model import MOST_FLOPS, part_of
from attnbench.worker.workloads import WORKLOADS
from tests.conftest import collector

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
         "num_hidden_layers": 3, "intermediate_size": 96, "vocab_size": 128}  # fmt: skip
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
LAYER = Case(workload="layer", heads=4, head_dim=16, width=64, seq_len=24, batch=2)


def sizes_of(tmp_path, config) -> ModelSizes:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = model_sizes(str(path), "layer")
    assert found is not None
    return found


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def timed_flops(part, sizes, case) -> int:
    with torch.set_grad_enabled(case.needs_grad):
        return flops(part_of(sizes, case, {}, head=part == "head")[0])


def published(name: str):
    from transformers import BertConfig, DeepseekV3Config, MistralConfig, ViTConfig

    classes = {"bert-base": BertConfig, "deepseek-v3": DeepseekV3Config,
               "mistral-7b-v0.1": MistralConfig, "vit-b-16": ViTConfig}  # fmt: skip
    return classes[name]()


@pytest.mark.parametrize("name", ["bert-base", "deepseek-v3", "mistral-7b-v0.1", "vit-b-16"])
def test_a_published_model_has_the_sizes_of_its_class_in_transformers(name):
    found, config = model_sizes(name, "layer"), published(name)
    assert found is not None
    encoder = name in ("bert-base", "vit-b-16")
    assert found.vocab == (0 if encoder else config.vocab_size)
    assert found.layers == config.num_hidden_layers
    if name == "deepseek-v3":
        assert (found.experts, found.chosen) == (256, config.num_experts_per_tok)
        assert found.inner == config.moe_intermediate_size
    else:
        assert (found.inner, found.activation) == (
            config.intermediate_size, {"silu": "silu", "gelu": "gelu"}[config.hidden_act]
        )  # fmt: skip


def test_an_mlp_and_a_head_compute_what_those_of_transformers_do(tmp_path):
    from transformers import BertConfig, LlamaConfig
    from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput
    from transformers.models.llama.modeling_llama import LlamaMLP

    x = torch.randn(1, 48, 64)
    llama, bert = sizes_of(tmp_path, LLAMA), sizes_of(tmp_path, LLAMA | {"model_type": "bert"})
    of: Any = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    mlp, encoder = LlamaMLP(LlamaConfig(**of)), BertConfig(**of)
    inner, outer = BertIntermediate(encoder), BertOutput(encoder)
    assert timed_flops("mlp", llama, LAYER) == flops(lambda: mlp(x))
    assert timed_flops("mlp", bert, LAYER) == flops(lambda: outer(inner(x), x))
    of_mlp = {"w0.0": mlp.gate_proj, "w0.1": mlp.up_proj, "down0": mlp.down_proj}
    weights = {f"{n} {tuple(x.weight.shape)} float32": x.weight.detach() for n, x in of_mlp.items()}
    call, share, _ = part_of(llama, LAYER, weights | {"x (48, 64) float32": x[0]}, head=False)
    torch.testing.assert_close(call(), [mlp(x[0])])
    assert share == 1
    assert timed_flops("head", llama, LAYER) == 2 * 2 * 64 * 128, "of the last token alone"


def test_training_multiplies_three_times_as_much_and_needs_the_logits_of_all_tokens(tmp_path):
    sizes, train = sizes_of(tmp_path, LLAMA), Case.from_json(LAYER.to_json() | {"pass": "both"})
    assert timed_flops("mlp", sizes, train) == 3 * timed_flops("mlp", sizes, LAYER)
    assert timed_flops("head", sizes, train) == 3 * 2 * 48 * 64 * 128


def test_every_expert_gets_as_many_tokens_and_in_decode_those_that_are_chosen_run(tmp_path):
    mixture = {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}
    sizes = sizes_of(tmp_path, LLAMA | mixture)
    dense = timed_flops("mlp", sizes_of(tmp_path, LLAMA), LAYER)
    assert timed_flops("mlp", sizes, LAYER) == 2 * dense
    step = Case(workload="decode", heads=4, head_dim=16, width=64, new_tokens=4, batch=1)
    assert timed_flops("mlp", sizes, step) == 2 * dense / 48


def test_part_of_a_long_call_is_that_share_of_its_work(tmp_path, monkeypatch):
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    long = Case.from_json(LAYER.to_json() | {"seq_len": 1024, "kv_len": 1024})
    for config, words in ((LLAMA, "256 of 2048 tokens"), (LLAMA | mixture, "1 of 4 experts")):
        sizes = sizes_of(tmp_path, config)
        whole = timed_flops("mlp", sizes, long)
        with monkeypatch.context() as patch:
            patch.setitem(MOST_FLOPS, "cpu", 1e6)
            _, share, said = part_of(sizes, long, {}, head=False)
            assert said == words
            assert timed_flops("mlp", sizes, long) == share * whole


@pytest.mark.parametrize(("workload", "pass_"), [
    ("layer", "forward"), ("layer", "both"), ("decode", "forward"),
])  # fmt: skip
def test_core_mlp_and_head_are_timed_in_the_rounds_of_their_layer(
    tmp_path, one_thread, workload, pass_
):
    model, records = sizes_of(tmp_path, LLAMA), list[Record]()
    rule = StoppingRule(precision=0.5, min_time_s=0.001, max_time_s=0.01)
    more: Any = {"new_tokens": 4, "mask": parse_mask("causal")} if workload == "decode" else {}
    case = replace(LAYER, workload=workload, pass_=pass_, **more)
    instruments = Instruments(rule=rule, clock=clock_for("cpu"), watch=Watch(), model=model)
    measure_group([Entry(index=0, case=case, impls=("naive",))], instruments, collector(records))
    [record] = records
    assert record.status == "ok", record.reason
    complete = [s for s in record.kept if s.core_us and s.mlp_us and s.head_us]
    assert len(complete) > 2
    core, step = core_times(record), step_times(record)
    assert core
    assert step
    own_us = cell_times(record).time_us
    assert core.time_us < own_us < step.time_us
    assert record.metrics["model_layers"] == 3
    assert {"core", "mlp", "head"} <= record.spent_s.keys()


@pytest.mark.parametrize(("config", "note"), [
    (SMALL | {"model_type": "llama", "vocab_size": 9}, "MLP not timed: no intermediate_size"),
    (LLAMA | {"vocab_size": None}, "head not timed: no vocab_size"),
    (LLAMA | {"hidden_act": "snake"}, "MLP not timed: no activation snake"),
])  # fmt: skip
def test_what_a_config_does_not_give_is_said(tmp_path, config, note):
    assert sizes_of(tmp_path, config).notes == (note,)


@pytest.mark.parametrize(("cache", "written"), [("concat", True), ("static", False)])
def test_keys_that_a_step_makes_are_as_hot_for_its_attention_alone_as_in_the_step(cache, written):
    case = Case(workload="decode", heads=2, head_dim=8, seq_len=16, new_tokens=4, cache=cache,
                mask=parse_mask("causal"))  # fmt: skip
    workload = WORKLOADS.get("decode")
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=0))
    bound = workload.bind(case, implementation("naive"), tensors)
    assert bound.core is not None
    core: Any = bound.core({})
    before = core.args[1]._version
    clock_for("cpu", l2="cold").batch(core, 2)
    assert (core.args[1]._version > before) == written

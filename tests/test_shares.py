"""What stands around attention in a model is timed as transformers has it, and shares add up."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnbench.planning.models import model_sizes
from attnbench.schema.case import Case
from attnbench.schema.model import ModelSizes
from attnbench.worker.model import call_of, work_of

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


def timed_flops(part, sizes, case, *, cut=False) -> int:
    with torch.set_grad_enabled(case.needs_grad):
        work, _, _ = work_of(part, sizes, case, cut=cut)
        return flops(call_of(part, sizes, case, work, {}))


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
        assert found.inner == found.shared == config.moe_intermediate_size
        assert "first 3 of its layers" in found.notes[0]
    else:
        assert (found.inner, found.activation) == (
            config.intermediate_size, {"silu": "silu", "gelu": "gelu"}[config.hidden_act]
        )  # fmt: skip


def test_an_mlp_and_a_head_compute_what_those_of_transformers_do(tmp_path):
    from transformers import BertConfig, LlamaConfig
    from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput
    from transformers.models.llama.modeling_llama import LlamaMLP

    x = torch.randn(2, 24, 64)
    llama, bert = sizes_of(tmp_path, LLAMA), sizes_of(tmp_path, LLAMA | {"model_type": "bert"})
    of: Any = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    mlp, encoder = LlamaMLP(LlamaConfig(**of)), BertConfig(**of)
    inner, outer = BertIntermediate(encoder), BertOutput(encoder)
    assert timed_flops("mlp", llama, LAYER) == flops(lambda: mlp(x))
    assert timed_flops("mlp", bert, LAYER) == flops(lambda: outer(inner(x), x))
    work, _, _ = work_of("mlp", llama, LAYER, cut=False)
    weights = {"x (48, 64) float32": x.view(48, 64)} | {
        f"{name}0 {tuple(w.shape)} float32": w.detach()
        for name, w in (("gate", mlp.gate_proj.weight), ("up", mlp.up_proj.weight),
                        ("down", mlp.down_proj.weight))
    }  # fmt: skip
    torch.testing.assert_close(call_of("mlp", llama, LAYER, work, weights)(), mlp(x).view(48, 64))
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
    [work], share, _ = work_of("mlp", sizes, step, cut=True)
    assert (work.copies, work.tokens, share) == (2, 1, 1.0)


def test_part_of_a_long_call_is_that_share_of_its_work(tmp_path):
    sizes = sizes_of(tmp_path, LLAMA)
    long = Case.from_json(LAYER.to_json() | {"seq_len": 1024, "kv_len": 1024})
    _, share, words = work_of("mlp", sizes, long, cut=True)
    assert (share, words) == (1 / 8, "256 of 2048 tokens")
    parts = timed_flops("mlp", sizes, long, cut=True), timed_flops("mlp", sizes, long)
    assert parts[0] == share * parts[1]


@pytest.mark.parametrize(("config", "note"), [
    (SMALL | {"model_type": "llama", "vocab_size": 9}, "MLP not timed: no intermediate_size"),
    (LLAMA | {"vocab_size": None}, "head not timed: no vocab_size"),
    (LLAMA | {"hidden_act": "snake"}, "MLP not timed: no activation snake"),
])  # fmt: skip
def test_what_a_config_does_not_give_is_said(tmp_path, config, note):
    assert sizes_of(tmp_path, config).notes == (note,)

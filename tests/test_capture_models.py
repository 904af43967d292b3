"""Models of transformers with random weights: each call against counts from their configs."""

import subprocess
import sys

import pytest
import torch

from tests.test_capture import SIZES, counts, unchanged

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 50,
}  # fmt: skip
GQA = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
IDS = torch.arange(24).view(2, 12)
ALL = torch.ones_like(IDS)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA)).eval()


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_a_llama_reads_a_prompt_with_its_own_number_of_heads(llama, how):
    llama.set_attn_implementation(how)
    with torch.no_grad():
        seen = unchanged(lambda: [llama(IDS).logits])
    llama.set_attn_implementation("sdpa")
    expected = {(2, 4, 2, 12, 12, 8, "causal", "forward", f"transformers {how}"): 2}
    assert counts(seen, *SIZES, "mask", "pass", "op") == expected
    (where,) = {case["call"]["places"][0][0] for case in seen.cases}
    assert "modeling_llama.py" in where


@pytest.mark.parametrize(
    ("cache", "calls"),
    [
        ("dynamic", {(1, n, "full"): 2 for n in (13, 14, 15, 16)} | {(12, 12, "causal"): 2}),
        ("static", {(1, 16, f"padding:{n}"): 2 for n in (13, 14, 15)}
                   | {(1, 16, "full"): 2, (12, 12, "causal"): 2}),
    ],
)  # fmt: skip
def test_a_generation_is_seen_step_by_step_in_either_cache(llama, cache, calls):
    def program():
        kinds = {"cache_implementation": cache}
        return [llama.generate(IDS, attention_mask=ALL, max_new_tokens=5, do_sample=False,
                               pad_token_id=0, **kinds)]  # fmt: skip

    seen = unchanged(program)
    assert counts(seen, "L", "S", "mask") == calls
    assert counts(seen, "B", "H", "G") == {(2, 4, 2): 10}


def test_a_training_step_of_bert_with_padding_and_dropout():
    torch.manual_seed(0)
    dropout = {"attention_probs_dropout_prob": 0.0}
    model = transformers.BertModel(transformers.BertConfig(**SMALL, **dropout)).train()
    there = ALL.clone()
    there[1, 7:] = 0

    def program():
        model.zero_grad()
        out = model(IDS, attention_mask=there).last_hidden_state
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    seen = unchanged(program)
    expected = {(2, 4, 4, 12, 12, 8, "padding:12+7", "both"): 2}
    assert counts(seen, *SIZES, "mask", "pass") == expected


def test_gemma_2_is_eager_and_its_soft_cap_is_in_its_cases():
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**GQA, sliding_window=4)
    model = transformers.Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        seen = unchanged(lambda: [model(IDS).logits])
    found = counts(seen, "softcap", "G", "mask")
    assert found == {(50.0, 2, "causal"): 1, (50.0, 2, "window:4"): 1}


def test_gpt_oss_is_captured_with_its_sinks():
    config = transformers.GptOssConfig(
        **GQA | {"num_hidden_layers": 1}, layer_types=["full_attention"], num_local_experts=2,
        num_experts_per_tok=1,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        seen = unchanged(lambda: [model(IDS).logits])
    assert counts(seen, "sinks", "mask") == {("learned", "causal"): 1}


def test_transformers_is_imported_by_the_program_alone():
    code = (
        "import sys, torch, attnbench\nwith attnbench.capture() as seen:\n"
        "    torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3)\n"
        "assert 'transformers' not in sys.modules\n"
        "with attnbench.capture() as seen:\n"
        "    import transformers\n"
        "    config = transformers.BertConfig(hidden_size=8, intermediate_size=8, vocab_size=9,"
        " num_hidden_layers=1, num_attention_heads=2, attn_implementation='eager')\n"
        "    transformers.BertModel(config).eval()(torch.ones(1, 4, dtype=torch.long))\n"
        "print([(case['H'], case['L'], case['count']) for case in seen.cases])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[(2, 4, 1)]\n", done.stderr

"""A model's calls are those that transformers makes of its config.json; else one line says why."""

import json
import re

import pytest

import attnbench
from attnbench.errors import AttnbenchError
from attnbench.planning.models import MODELS, asked_sweeps
from attnbench.planning.plan import expand
from attnbench.theory.traits import case_label


def calls(model, step=None, tokens=None, **axes) -> tuple[list[str], str]:
    """Each call as a count and a label, `n=…` from there on; and what the cases leave out."""
    sweeps, left_out = asked_sweeps((), axes, model=str(model), step=step, tokens=tokens)
    found = [(axes.count, case) for axes in sweeps for case in expand(axes, "cpu")]
    return [f"{n} {case_label(case).partition(' ')[2]}" for n, case in found], left_out


# Numbers from the published config.json, whose address stands beside them in models.toml, and what
# transformers 5.24 was seen to pass to its attention function: shapes, scale, mask and strides.
PUBLISHED = {
    ("llama-3.1-8b", "prefill", 4096): (
        "32 forward n=4096 B=1 H=32 G=8 D=128 bfloat16 causal rope-llama3 BLHD", ""
    ),
    ("llama-3.1-8b", "decode", 4096): ("32 forward n=1 S=4096 B=1 H=32 G=8 D=128 bfloat16", ""),
    ("llama-3.1-8b", "train", 1024): (
        "32 both n=1024 B=1 H=32 G=8 D=128 bfloat16 causal rope-llama3 BLHD", ""
    ),
    ("mistral-7b-v0.1", "prefill", 4096): (
        "32 forward n=4096 B=1 H=32 G=8 D=128 bfloat16 causal rope BLHD", ""
    ),
    ("mistral-7b-v0.1", "prefill", 8192): (
        "32 forward n=8192 B=1 H=32 G=8 D=128 bfloat16 window:4096 rope BLHD", ""
    ),
    ("mistral-7b-v0.1", "decode", 8192): ("32 forward n=1 S=4096 B=1 H=32 G=8 D=128 bfloat16", ""),
    ("qwen3-8b", "prefill", 2048): (
        "36 forward n=2048 B=1 H=32 G=8 D=128 bfloat16 causal rope:1e+06 BLHD", ""
    ),
    # 192^-0.5 · (0.1 ln 40 + 1)²
    ("deepseek-v3", "prefill", 2048): (
        "61 forward n=2048 B=1 H=128 D=192 V=128 bfloat16 causal scale=0.1352337788608801 BLHD",
        "rotary positions of 64 of 192 dims",
    ),
    ("bert-base", "train", None): (
        "12 both n=512 B=1 H=12 D=64 float32 BLHD", "dropout of 0.1"
    ),
    ("vit-b-16", "prefill", None): ("12 forward n=197 B=1 H=12 D=64 float32 BLHD", ""),
}  # fmt: skip


@pytest.mark.parametrize(("name", "step", "tokens"), PUBLISHED)
def test_a_published_model_has_the_calls_of_its_config(name, step, tokens):
    expected, left_out = PUBLISHED[name, step, tokens]
    assert calls(name, step, tokens and [tokens]) == ([expected], left_out)


def test_every_published_model_is_tested_and_has_its_source():
    assert {name for name, *_ in PUBLISHED} == MODELS.keys()
    assert all(row["source"].startswith("https://huggingface.co/") for row in MODELS.values())


LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 8,
         "num_hidden_layers": 3, "max_position_embeddings": 4096}  # fmt: skip
TYPES = ["full_attention", "sliding_attention", "full_attention"]
QWEN3 = LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2, "use_sliding_window": True,
                 "sliding_window": 32}  # fmt: skip
NESTED = {
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 64},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 128, "num_hidden_layers": 7,
        "sliding_window": 32, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}  # fmt: skip
LATENT = {"model_type": "deepseek_v3", "hidden_size": 128, "num_hidden_layers": 2,
          "num_attention_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 8, "v_head_dim": 16}  # fmt: skip
ONES, TWOS = "+".join("1" * 16), "+".join("2" * 16)


def scaled(**rope):
    return LLAMA | {"rope_scaling": rope}


CONFIGS = {
    "several key/value heads by their absence": (LLAMA, "H=8 D=32 float32 causal rope"),
    "or by a null": (LLAMA | {"num_key_value_heads": None}, "H=8 D=32 float32 causal rope"),
    "one key/value head": (LLAMA | {"num_key_value_heads": 1}, "H=8 G=1 D=32 float32 causal rope"),
    "a head_dim of its own": (LLAMA | {"head_dim": 80}, "H=8 D=80 float32 causal rope"),
    "linear": (scaled(type="linear", factor=2), "H=8 D=32 float32 causal rope-linear:2"),
    "dynamic": (
        scaled(type="dynamic", factor=2.0), "H=8 D=32 float32 causal rope-dynamic:4096:factor=2"
    ),
    "yarn whose factor follows": (
        scaled(rope_type="yarn", original_max_position_embeddings=512, truncate=True),
        "H=8 D=32 float32 causal rope-yarn:8:length=512",
    ),
    "yarn with one mscale, which transformers drops": (
        LLAMA | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6,
                                     "mscale": 0.7, "truncate": False}},
        "H=8 D=32 float32 causal rope-yarn:4:truncate=0:base=1e+06",
    ),
    "llama3": (
        scaled(rope_type="llama3", factor=2, low_freq_factor=1, high_freq_factor=4,
               original_max_position_embeddings=512),
        "H=8 D=32 float32 causal rope-llama3:2:length=512:base=10000",
    ),
    "longrope by its first name": (
        LLAMA | {"model_type": "phi3", "original_max_position_embeddings": 1024, "rope_scaling": {
            "type": "su", "short_factor": [1.0] * 16, "long_factor": [2] * 16}},
        f"H=8 D=32 float32 causal rope-longrope:4:length=1024:short={ONES}:long={TWOS}",
    ),
    "part of the dims turned": (
        LLAMA | {"model_type": "phi3", "partial_rotary_factor": 0.5},
        "H=8 D=32 float32 causal rope-partial:0.5",
    ),
    "a window that its class has": (
        LLAMA | {"model_type": "mistral", "sliding_window": 32},
        "H=8 D=32 float32 window:32 rope",
    ),
    "a window that its class has not": (
        LLAMA | {"sliding_window": 32}, "H=8 D=32 float32 causal rope"
    ),
}  # fmt: skip


def written(tmp_path, config) -> str:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(("config", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_is_read_as_transformers_reads_it(tmp_path, config, expected):
    found, left_out = calls(written(tmp_path, config), tokens=[96])
    assert (found, left_out) == ([f"3 forward n=96 B=1 {expected} BLHD"], "")


SEVERAL = {
    "layer_types": (
        QWEN3 | {"layer_types": TYPES},
        ["2 forward n=96 B=1 H=8 G=2 D=128 float32 causal rope BLHD",
         "1 forward n=96 B=1 H=8 G=2 D=128 float32 window:32 rope BLHD"], ""
    ),
    "max_window_layers": (
        QWEN3 | {"max_window_layers": 1, "head_dim": 32},
        ["1 forward n=96 B=1 H=8 G=2 D=32 float32 causal rope BLHD",
         "2 forward n=96 B=1 H=8 G=2 D=32 float32 window:32 rope BLHD"], ""
    ),
    "a language model within another, with a base for each kind": (
        NESTED,
        ["6 forward n=96 B=1 H=8 G=4 D=256 bfloat16 window:32 rope BLHD",
         "1 forward n=96 B=1 H=8 G=4 D=256 bfloat16 causal rope-linear:8:base=1e+06 BLHD"],
        "vision_config",
    ),
    "soft-capping, and a scale": (
        LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": 64, "sliding_window": 500},
        ["3 forward n=96 B=1 H=8 G=4 D=256 float32 causal rope scale=0.125 softcap=50.0 BLHD"], ""
    ),
    "sinks": (
        LLAMA | {"model_type": "gpt_oss", "num_hidden_layers": 1},
        ["1 forward n=96 B=1 H=8 D=64 float32 causal rope-yarn:32:truncate=0:base=150000"
         " sinks=learned BLHD"], ""
    ),
    "what nothing reads": (
        LLAMA | {"position_embedding_type": "relative_key", "dual_chunk_attention_config": {"a": 1},
                 "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
        ["3 forward n=96 B=1 H=8 D=32 float32 causal rope BLHD"],
        "relative_key positions, dual chunks, a quantised cache",
    ),
    "latents": (
        LATENT,
        ["2 forward n=96 B=1 H=4 D=24 V=16 float32 causal scale=0.2041241452319315 BLHD"],
        "rotary positions of 8 of 24 dims",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "expected", "left_out"), SEVERAL.values(), ids=SEVERAL)
def test_layers_of_each_kind_are_counted_and_what_no_case_has_is_named(
    tmp_path, config, expected, left_out
):
    assert calls(written(tmp_path, config), tokens=[96]) == (expected, left_out)


WRONG = {
    "an architecture that is not known": ({"model_type": "falcon"}, "'falcon' is unknown; known"),
    "none": ({"hidden_size": 8}, "it has no model_type"),
    "no heads": ({"model_type": "llama", "hidden_size": 8}, "no num_attention_heads"),
    "heads as text": (LLAMA | {"num_attention_heads": "8"}, "got `str` - at `$.num_attention_hea"),
    "no layers": (LLAMA | {"num_hidden_layers": 0}, ">= 1 - at `$.num_hidden_layers`"),
    "a width that does not divide": (LLAMA | {"num_attention_heads": 7}, "256 is not a multiple"),
    "groups that do not divide": (LLAMA | {"num_key_value_heads": 3}, "value_heads 3, given or"),
    "an odd head_dim": (LLAMA | {"head_dim": 33}, "pairs of dims, and it has 33"),
    "more kinds than layers": (QWEN3 | {"layer_types": TYPES * 2}, "6 layer_types contradict"),
    "a kind that is not known": (QWEN3 | {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    "a window that is missing": (
        QWEN3 | {"layer_types": TYPES, "use_sliding_window": False}, "no sliding_window in use"
    ),
    "a scaling that is not known": (scaled(rope_type="mrope"), "unknown rope_type 'mrope'"),
    "a scaling without its factor": (scaled(type="linear"), "no factor, which is needed"),
    "a scaling out of range": (scaled(type="linear", factor=0.5), "factor is a number, 1 or more"),
    "a kind without an object": (scaled(full_attention=3), "full_attention are not an object"),
    "a list that is too short": (
        scaled(type="longrope", factor=2, short_factor=[1], long_factor=[1]), "not 16 numbers"
    ),
    "more than all dims turned": (LLAMA | {"partial_rotary_factor": 2}, "partial_rotary_factor"),
    "a decoder by name": (LLAMA | {"model_type": "bert", "is_decoder": True}, "is_decoder"),
    "latents without their dims": (LATENT | {"v_head_dim": None}, "no v_head_dim"),
    "no sizes": (
        {"model_type": "llama", "hidden_size": 64},
        "it has no num_attention_heads, no num_hidden_layers, which are needed",
    ),
    "no JSON": ("{", "not an object of JSON"),
    "a list": ("[]", "not an object of JSON"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "says"), WRONG.values(), ids=WRONG)
def test_a_config_that_is_wrong_or_not_known_is_one_line(tmp_path, config, says):
    with pytest.raises(AttnbenchError, match=re.escape(says)) as raised:
        calls(written(tmp_path, config))
    assert str(raised.value).startswith("--model ")
    assert "\n" not in str(raised.value)


def test_flags_hold_in_place_of_what_the_model_says():
    own = {"dtypes": ("bfloat16",), "layouts": ("BHLD",), "batch_sizes": (2,)}
    found, _ = calls("bert-base", tokens=[64, 128], **own)
    assert found == [f"12 forward n={n} B=2 H=12 D=64 bfloat16" for n in (64, 128)]
    found, _ = calls("bert-base", tokens=[64], workload="layer")
    assert found == ["12 forward n=64 B=1 H=12 D=64 float32 learned fused"]
    found, _ = calls("mistral-7b-v0.1", "decode", [8192], workload="decode")
    assert found == ["32 forward n=8192 B=1 H=32 G=8 D=128 bfloat16 window:4096 rope static"]


def test_list_shows_the_calls_of_a_model_(cli, tmp_path):
    (tmp_path / "gemma.json").write_text(json.dumps(NESTED))
    path = str(tmp_path / "gemma.json")
    found = json.loads(cli("list", path, "bert-base", "--json").stdout)
    tables = [section["parts"][0]["table"] for section in found["sections"]]
    rows = [(row["step"], row["count"], row["kv_len"], row["mask"]) for row in tables[0]]
    assert rows[:3] == [
        ("prefill 2048", 6, 2048, "window:32"), ("prefill 2048", 1, 2048, "causal"),
        ("decode 2048", 6, 32, "full"),
    ]  # fmt: skip
    shared = {(row["dtype"], row["head_dim"], row["scale"]["value"]) for row in tables[0]}
    assert shared == {("bfloat16", 256, 256**-0.5)}
    assert [row["step"] for row in tables[1]] == ["forward 512", "train 512"]
    assert "no case has: vision_config" in str(found["sections"][0])
    wrong = cli("list", str(tmp_path / "none.json"))
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)
    assert "none.json" in wrong.stderr


@pytest.mark.usefixtures("imagined_worker")
def test_a_list_of_all_names_the_models(cli):
    assert all(name in cli("list").stdout for name in MODELS)
    assert "did you mean 'llama-3.1-8b'?" in cli("list", "llama-3.1-8").stderr


@pytest.mark.usefixtures("imagined_worker")
def test_a_model_is_swept_from_the_command_line_and_from_python(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, NESTED)
    result = cli("sweep", "--model", path, "--tokens", "64", "--impls", "sdpa", "--name", "typed")
    assert result.exit_code == 0, result.output
    assert "Warning: the cases leave out what the model has: vision_config" in result.stderr
    with pytest.warns(RuntimeWarning, match="vision_config"):
        table = attnbench.sweep(model=path, tokens="64", impls="sdpa")
    assert list(table["mask"]) == list(attnbench.load("typed")["mask"]) == ["causal", "window:32"]
    assert {*table["dtype"], *table["kv_heads"]} == {"bfloat16", 4}

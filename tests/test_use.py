"""Advice in a program: what matches is answered by what was advised, and nothing is silent."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import attnbench
from attnbench.api import IMPLEMENTATIONS, attention
from attnbench.errors import AttnbenchError, DispatchError, UsageError

ORIGINAL = (F.scaled_dot_product_attention,)  # a name of its own would be exchanged, too
CASE = "B=2,H=4,G=2,L=32,S=32,D=16,mask=causal"
TRAINED = f"{CASE},pass=both"


def right(q, k, v, causal, scale):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * scale
    if causal:
        L, S = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(L, S, dtype=torch.bool).tril(S - L), -torch.inf)
    return scores.softmax(-1) @ v


CALLS: list[str] = []


def raising(*_):
    raise ValueError("no such kernel")


def late(q, *rest):
    return right(q, *rest) + (CALLS.count("late") >= 10)


def transposed(q, *rest):
    return right(q, *rest).mT.contiguous().mT


def reentrant(q, k, v, causal, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def no_gradient(q, *rest):
    o = right(q, *rest)
    return o + (o.detach() - o) * (q * 0 + 1)


KINDS = {
    "right": right, "raises": raising, "late": late, "transposed": transposed,
    "reentrant": reentrant,
    "wrong": lambda *x: right(*x) * 1.01, "nan": lambda *x: right(*x) * torch.nan,
    "double": lambda *x: right(*x).double(), "short": lambda *x: right(*x)[:, :, 1:],
    "list": lambda *x: [right(*x)], "no-gradient": no_gradient,
}  # fmt: skip


@pytest.fixture(autouse=True)
def kinds():
    """Implementations called by these names, and a look that all is as before."""
    CALLS.clear()
    for name, function in KINDS.items():

        def called(q, k, v, *, causal, scale, name=name, function=function):
            CALLS.append(name)
            return function(q, k, v, causal, scale)

        attention(name)(called)
    yield
    for name in KINDS:
        IMPLEMENTATIONS.remove(name)
    assert F.scaled_dot_product_attention is ORIGINAL[0]
    assert torch._C._nn.scaled_dot_product_attention is ORIGINAL[0]


def inputs(grad=False, dtype=torch.float32, L=32, S=32):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, L, 16), (2, 2, S, 16), (2, 2, S, 16)
    made = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [x.requires_grad_(grad) for x in made]


def call(qkv=None, **options):
    options = {"is_causal": True, "enable_gqa": True} | options
    return F.scaled_dot_product_attention(*(qkv or inputs()), **options)


def counted(use):
    stats = use.stats()
    return sum(stats["hits"].values()), stats["misses"], stats["fallbacks"]


def test_a_call_that_matches_goes_to_what_was_advised_and_is_checked_once():
    expected = call()
    with attnbench.use({CASE: "right"}) as use:
        first, second = call(), call()
    call()
    assert CALLS == ["right"] * 2
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected)
    assert counted(use) == (2, {}, {})
    assert use.stats()["check_s"] > 0


def test_sdpa_advised_for_sdpa_changes_no_bit():
    expected = call()
    with attnbench.use({CASE: "sdpa"}) as use:
        assert torch.equal(call(), expected)
    assert counted(use) == (1, {}, {})


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raises", "raised ValueError: no such kernel"), ("wrong", "o is off by"),
        ("nan", "not finite"), ("double", "o is torch.float64"), ("short", "o has shape"),
        ("list", "o is list"),
    ],
)  # fmt: skip
def test_what_fails_raises_with_its_case_and_leniently_goes_to_the_original(kind, said):
    expected = call()
    with attnbench.use({CASE: kind}), pytest.raises(DispatchError, match=said) as raised:
        call()
    assert f"{kind} for B=2,L=32,S=32,H=4,G=2" in str(raised.value)
    with attnbench.use({CASE: kind}, lenient=True) as use:
        assert torch.equal(call(), expected)
        assert torch.equal(call(), expected)
    hits, misses, fallbacks = counted(use)
    assert (hits, misses, sum(fallbacks.values())) == (0, {}, 2)
    assert all(said in reason for reason in fallbacks)


def test_what_is_wrong_from_the_tenth_call_on_is_not_caught():
    with attnbench.use({CASE: "late"}):
        outs = [call() for _ in range(10)]
    assert torch.equal(outs[0], outs[8])
    assert not torch.equal(outs[0], outs[9])


def test_an_output_that_is_not_contiguous_is_handed_on():
    with attnbench.use({CASE: "transposed"}):
        out = call()
    assert not out.is_contiguous()
    torch.testing.assert_close(out, call())


def test_an_implementation_that_calls_sdpa_is_not_sent_to_itself():
    with attnbench.use({CASE: "reentrant"}) as use:
        call()
    assert CALLS == ["reentrant"]
    assert counted(use) == (1, {}, {})


def test_gradients_are_those_of_what_was_advised_also_in_a_second_backward_pass():
    def gradients():
        qkv = inputs(grad=True)
        loss = call(qkv).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad for x in qkv]

    expected = gradients()
    with attnbench.use({TRAINED: "right"}) as use:
        found = gradients()
    assert counted(use) == (1, {}, {})
    torch.testing.assert_close(found, expected)


def test_wrong_gradients_raise_at_the_first_call():
    with attnbench.use({TRAINED: "no-gradient"}), pytest.raises(DispatchError, match=r"d[qkv] is"):
        call(inputs(grad=True))


def test_a_checkpoint_calls_the_same_again():
    with attnbench.use({TRAINED: "right"}) as use:
        checkpoint(lambda *qkv: call(qkv), *inputs(grad=True), use_reentrant=False).sum().backward()
    assert counted(use)[0] == 2


def test_a_case_without_gradients_is_no_advice_for_training():
    with attnbench.use({CASE: "right"}) as use:
        call(inputs(grad=True))
        with torch.no_grad():
            call(inputs(grad=True))
    hits, misses, _ = counted(use)
    assert (hits, list(misses.values())) == (1, [1])
    assert "pass=both" in next(iter(misses))


def forced(**options):
    return lambda: call(**options)


def in_kernel():
    with sdpa_kernel([SDPBackend.MATH]):
        call()


def in_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        call()


def call_plain(x):
    return F.scaled_dot_product_attention(x, x, x)


def half_mask():
    mask = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < 0.5
    call(is_causal=False, attn_mask=mask)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (forced(dropout_p=0.1), "dropout"), (in_kernel, "sdpa_kernel"),
        (in_autocast, "autocast of inputs in float32"), (half_mask, "a mask with"),
        (lambda: torch.func.vmap(call_plain)(torch.ones(2, 1, 4, 4, 8)), "torch.func"),
        (lambda: call(inputs(dtype=torch.bfloat16)), "no case has H=4"),
        (lambda: call(inputs(S=65), is_causal=False), "mask=full"),
        (lambda: call(inputs(L=65, S=65)), "near lengths"),
        (lambda: call(inputs(L=1)), "no case has"),
        (lambda: call_plain(torch.ones(4, 8)), "four axes"),
        (lambda: nn.MultiheadAttention(8, 2)(*[torch.ones(4, 1, 8)] * 3), "MultiheadAttention"),
    ],
)  # fmt: skip
def test_what_the_program_asks_for_is_not_overridden_and_counts_with_the_reason(program, reason):
    with attnbench.use({CASE: "raises"}) as use:
        program()
    hits, misses, fallbacks = counted(use)
    assert (hits, list(misses.values()), fallbacks) == (0, [1], {})
    assert reason in next(iter(misses))
    assert not CALLS


def test_autocast_of_inputs_that_have_its_dtype_matches():
    qkv = inputs(dtype=torch.bfloat16)
    advised = attnbench.use({f"{CASE},dtype=bfloat16": "right"})
    with advised as use, torch.autocast("cpu", torch.bfloat16):
        assert call(qkv).dtype is torch.bfloat16
    assert counted(use) == (1, {}, {})


def test_the_nearest_length_within_a_factor_of_two_is_taken():
    cases = {CASE: "right", CASE.replace("32", "48"): "transposed"}
    with attnbench.use(cases):
        for n in (16, 39, 40, 96):
            call(inputs(L=n, S=n))
    assert CALLS == ["right", "right", "transposed", "transposed"]


def test_a_mask_counts_by_its_content_wherever_it_differs():
    mask = torch.ones(512, 512, dtype=torch.bool).tril()
    with attnbench.use({"B=2,H=4,G=2,L=512,D=16,mask=causal": "right"}) as use:
        call(inputs(L=512, S=512), is_causal=False, attn_mask=mask)
        mask[300, 7] = False
        call(inputs(L=512, S=512), is_causal=False, attn_mask=mask)
    hits, misses, _ = counted(use)
    assert (hits, sum(misses.values())) == (1, 1)


def test_all_threads_are_answered():
    with attnbench.use({CASE: "right"}) as use:
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counted(use) == (3, {}, {})


def test_an_exception_in_the_block_restores_the_originals():
    with pytest.raises(KeyError), attnbench.use({CASE: "right"}):
        raise KeyError
    assert F.scaled_dot_product_attention is ORIGINAL[0]


def test_a_generator_that_is_abandoned_restores_the_originals():
    def steps():
        with attnbench.use({CASE: "right"}):
            yield call()

    running = steps()
    next(running)
    assert F.scaled_dot_product_attention is not ORIGINAL[0]
    del running
    gc.collect()
    assert F.scaled_dot_product_attention is ORIGINAL[0]


def test_of_nested_advice_the_inner_is_asked_first():
    with attnbench.use({CASE: "right"}) as outer:
        with attnbench.use({CASE: "transposed"}) as inner:
            call()
            with pytest.raises(UsageError, match="in use already"), inner:
                pass
        call()
    assert CALLS == ["transposed", "right"]
    assert (counted(inner)[0], counted(outer)[0]) == (1, 1)


def test_a_capture_around_or_inside_counts_what_the_program_calls():
    use = attnbench.use({CASE: "right"})
    with attnbench.capture() as around, use, attnbench.capture() as inside:
        call()
    assert [case["count"] for case in (*around.cases, *inside.cases)] == [1, 1]
    with attnbench.use([(around.cases[0], "right")]) as again:
        call()
    assert counted(use)[0] == counted(again)[0] == 1


def test_only_the_patched_model_is_answered_until_it_is_restored():
    class Model(nn.Module):
        def forward(self):
            return call()

    model, other = Model(), Model()
    use = attnbench.use({CASE: "right"}).patch(model)
    model(), other(), call()
    use.restore()
    model()
    use.restore()
    assert counted(use) == (1, {}, {})
    assert not model._forward_hooks
    assert F.scaled_dot_product_attention is ORIGINAL[0]


def test_a_compiled_function_keeps_its_graph_and_counts_as_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *qkv: call(qkv), backend="aot_eager", fullgraph=True)
    expected = call()
    with attnbench.use({CASE: "raises"}) as use:
        for _ in range(3):
            torch.testing.assert_close(compiled(*inputs()), expected)
    assert list(use.stats()["misses"]) == ["compiled"]
    assert not CALLS
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("advice", "said"),
    [
        ({CASE: "sdpaa"}, "sdpa"), ({"B=x": "sdpa"}, "B"), ({}, "no case"),
        ("no-such-run", "no-such-run"), ({f"{CASE},dtype=float8": "sdpa"}, "float8"),
        ({"workload=decode": "sdpa"}, "decode"), ({f"{CASE},softcaps=5": "sdpa"}, "softcap"),
    ],
)  # fmt: skip
def test_advice_that_makes_no_sense_is_one_line(advice, said):
    with pytest.raises(AttnbenchError, match=said) as raised:
        attnbench.use(advice)
    assert "\n" not in str(raised.value)


MINE = """
from attnbench.api import attention
from tests.test_use import right

@attention("mine")
def mine(q, k, v, *, causal, scale):
    return right(q, k, v, causal, scale)
"""


def test_a_file_has_implementations_of_yours(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    with attnbench.use({CASE: "mine"}, files=tmp_path / "mine.py") as use:
        call()
    IMPLEMENTATIONS.remove("mine")
    assert counted(use) == (1, {}, {})


PROGRAM = """
import os, sys, torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
q = torch.ones(2, 8, 512, 64)
mask = torch.ones(2, 1, 1, 512, dtype=torch.bool)
mask[1, ..., 128:] = False
for _ in range(3):
    sdpa(q, q, q, attn_mask=mask)
sdpa(q, q, q, dropout_p=0.5)
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, __file__, "child"]) if not os.fork() else os.wait()
"""


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_program_runs_with_the_advice_of_a_run_as_do_its_children(tmp_path, options):
    (tmp_path / "program.py").write_text(PROGRAM)
    attnbench_use = [sys.executable, "-m", "attnbench", "use", "results/advise-cpu", *options]
    command = [*attnbench_use, "--", sys.executable, str(tmp_path / "program.py")]
    wide = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=wide)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    assert "6 of 8 calls" in done.stderr
    assert "sdpa-items for B=2,L=512" in done.stderr
    assert "dropout" in done.stderr
    assert ("would go" in done.stderr) == bool(options)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "advice and a program"), (["latest"], "advice and a program"),
        (["no-such-run", "--", sys.executable], "no-such"),
        (["results/advise-cpu", "--", "no-such-program"], "no program no-such-program"),
        (["results/advise-cpu", "--", sys.executable, "-c", "1"], "nothing was used"),
        (["results/advise-cpu", "--impl", "no-such.py", "--", sys.executable, "-c",
          "import torch"], "no-such.py"),
        (["results/advise-cpu", "--", sys.executable, "-c", "import torch"], "0 of 0 calls"),
    ],
)  # fmt: skip
def test_a_program_that_cannot_have_the_advice_exits_with_2_and_one_line(given, said):
    command = [sys.executable, "-m", "attnbench", "use", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


transformers = pytest.importorskip("transformers")
SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 50,
}  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_llama_generates_the_same_with_what_was_advised(cache):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config).eval()

    def generated():
        return model.generate(
            torch.arange(1, 25).view(2, 12), max_new_tokens=5, do_sample=False, pad_token_id=0,
            cache_implementation=cache, output_logits=True, return_dict_in_generate=True,
        ).logits  # fmt: skip

    with attnbench.capture() as seen:
        expected = generated()
    for name in ("sdpa", "right"):
        by_case = [(case, name if case["mask"] in ("full", "causal") else "naive")
                   for case in seen.cases]  # fmt: skip
        use = attnbench.use(by_case).patch(model)
        torch.testing.assert_close(generated(), expected)
        use.restore()
        assert counted(use) == (10, {}, {})
    with attnbench.use([(case, "sdpa") for case in seen.cases]):
        assert all(map(torch.equal, generated(), expected))


def test_a_padded_bert_has_the_states_of_its_tokens():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL)).eval()
    given = {"input_ids": torch.arange(24).view(2, 12), "attention_mask": torch.ones(2, 12).long()}
    given["attention_mask"][1, 7:] = 0
    with torch.no_grad(), attnbench.capture() as seen:
        expected = model(**given).last_hidden_state
    with torch.no_grad(), attnbench.use([(case, "naive") for case in seen.cases]) as use:
        torch.testing.assert_close(model(**given).last_hidden_state, expected)
    assert counted(use) == (2, {}, {})


def test_eager_attention_with_a_softcap_stays_and_is_counted():
    torch.manual_seed(0)
    more = {"num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 2.0}
    model = transformers.Gemma2Model(transformers.Gemma2Config(**SMALL, **more)).eval()
    model.set_attn_implementation("eager")
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with attnbench.use({"B=2,H=4,G=2,L=12,D=8,mask=causal": "raises"}) as use:
            assert torch.equal(model(ids).last_hidden_state, expected)
    assert counted(use) == (0, {"transformers eager": 2}, {})

"""What programs call is seen, counted and told from its content; what they compute stays."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as imported

import attnbench
from attnbench.capturing.describing import refusals
from attnbench.capturing.masks import classify
from attnbench.planning.caselist import listed
from attnbench.schema.mask import parse_mask

F_LINE = "import sys, torch, torch.nn.functional as F\nq = torch.ones(1, 2, 8, 4)\n"
CALL = "F.scaled_dot_product_attention(q, q, q)\n"
SIZES = ("B", "H", "G", "L", "S", "D")


def random(*sizes, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator).requires_grad_(grad)


def counts(seen, *keys):
    """How often which values of these keys were called."""
    found: dict[Any, int] = {}
    for case in seen.cases:
        key = tuple(case[k] if k in case else case["call"].get(k) for k in keys)
        found[key] = found.get(key, 0) + case["count"]
    return found


def unchanged(program):
    """What a capture saw of a program, whose results before, meanwhile and after are the same."""
    torch.manual_seed(1)
    before = program()
    torch.manual_seed(1)
    with attnbench.capture() as seen:
        meanwhile = program()
    torch.manual_seed(1)
    after = program()
    assert len(before) == len(meanwhile) == len(after)
    for first, *others in zip(before, meanwhile, after, strict=True):
        assert all(torch.equal(first, other) for other in others)
    assert not seen.undescribed
    return seen


MASKS = [
    "full", "causal", "window:7", "prefix:9", "document:20+45+35", "document:20+80:causal=0",
    "padding:30+100", "padding:30+100:causal=1", "padding:60",
]  # fmt: skip


def dense(text, queries, keys):
    """The mask as a tensor of True and False, by its definition."""
    mask = parse_mask(text)
    ranges = [[mask.span(i, queries, keys, b) for i in range(queries)] for b in range(mask.items)]
    place = torch.arange(keys)
    rows = [[(place >= first) & (place < last) for first, last in item] for item in ranges]
    return torch.stack([torch.stack(item) for item in rows])[:, None]


@pytest.mark.parametrize("additive", [None, -torch.inf, torch.finfo(torch.float32).min, -1e4])
@pytest.mark.parametrize("text", MASKS)
def test_a_mask_is_known_by_its_content(text, additive):
    for queries in (100, 40, 300):
        if text.startswith("document") and queries != 100:
            continue
        mask = dense(text, queries, queries if queries == 300 else 100)
        if additive is not None:
            mask = torch.zeros(mask.shape).masked_fill(~mask, additive)
        found = classify(mask, *mask.shape[-2:])
        assert not found.problem
        assert torch.equal(dense(found.text, queries, found.keys),
                           dense(text, *mask.shape[-2:])[..., : found.keys])  # fmt: skip


def test_what_no_case_has_is_named():
    i, j = torch.arange(200)[:, None], torch.arange(200)
    left = (j >= torch.tensor([0, 30])[:, None, None]) & (j <= i)
    assert (
        classify(left[:, None], 200, 200).problem
        == "padding on the left (a case has it on the right)"
    )
    assert classify(random(200, 200), 200, 200).problem == "a bias"
    assert classify(((i * j) % 3 == 0)[:60, :60], 60, 60).problem == "a mask with 55.6% of pairs"
    hole = (j <= i).clone()
    hole[::2, 5] = False
    assert "% of pairs" in classify(hole, 200, 200).problem


def test_one_function_is_seen_under_each_of_its_names_and_put_back():
    class Module:
        inside: Any = F.scaled_dot_product_attention
        own: Any = None

    holder, table = Module(), {"sdpa": imported}
    holder.own = imported
    original, q = F.scaled_dot_product_attention, random(1, 2, 8, 4)
    names = (lambda: holder.inside, lambda: holder.own, lambda: table["sdpa"], lambda: imported,
             lambda: F.scaled_dot_product_attention,
             lambda: torch._C._nn.scaled_dot_product_attention)  # fmt: skip
    seen = unchanged(lambda: [name()(q, q, q) for name in names])
    assert counts(seen, *SIZES) == {(1, 2, 2, 8, 8, 4): len(names)}
    (case,) = seen.cases
    assert "test_capture.py" in case["call"]["places"][0][0]
    with contextlib.suppress(ZeroDivisionError), attnbench.capture() as seen:
        holder.inside(q, q, q, is_causal=bool(1 / holder.inside(q, q, q).numel()))
        holder.inside(q, q, q, is_causal=bool(1 / 0))
    assert counts(seen, "mask") == {("full",): 1, ("causal",): 1}
    assert all(name() is original for name in names)


def test_a_causal_bias_beside_threads_is_counted_and_computes_what_it_did():
    q, k = random(1, 2, 8, 4), random(1, 2, 12, 4, seed=1)

    def calls(_):
        biases = causal_lower_right(8, 12), causal_upper_left(8, 12)
        out = [F.scaled_dot_product_attention(q, k, k, bias) for bias in biases]
        return [*out, imported(q, k, k), imported(q, k, k, is_causal=True)]

    def program():
        with ThreadPoolExecutor(4) as pool:
            return [x for results in pool.map(calls, range(25)) for x in results]

    seen = unchanged(program)
    assert counts(seen, "S", "mask") == {(12, "full"): 25, (12, "causal"): 25, (8, "causal"): 50}


def test_a_subclass_that_asks_which_function_is_called_gets_the_answer_it_expects():
    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is F.scaled_dot_product_attention:
                return torch.full((1,), 7.0)
            return super().__torch_function__(func, types, args, kwargs or {})

    q = random(1, 2, 8, 4).as_subclass(Watching)
    torch.manual_seed(0)
    with attnbench.capture():
        assert F.scaled_dot_product_attention(q, q, q).tolist() == [7.0]


@pytest.mark.filterwarnings("ignore:.*jit.script.*")
def test_scripted_and_compiled_functions_work_during_a_capture_and_after_it():
    def attend(q):
        return F.scaled_dot_product_attention(q, q, q) + 1

    q, expected = random(1, 2, 8, 4), attend(random(1, 2, 8, 4))
    for seen in (attnbench.capture(), contextlib.nullcontext()):
        torch.compiler.reset()
        with seen:
            compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
            assert torch.equal(torch.jit.script(attend)(q), expected)
            assert torch.equal(compiled(q), expected)
            assert torch.equal(compiled(q), expected)


def test_compiled_graphs_count_when_they_run_at_the_lengths_of_that_run():
    def attend(q, mask=None):
        return F.scaled_dot_product_attention(q, q, q, mask, is_causal=mask is None)

    def ran():
        """Outputs and gradients, and the graphs that torch made."""
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        inputs = [random(1, 2, n, 4) for n in (8, 8, 16, 24)]
        found = [compiled(q) for q in inputs] + [compiled(inputs[0], drop)]
        trained = inputs[0].requires_grad_()
        compiled(trained).sum().backward()
        return [*found, trained.grad], dict(torch._dynamo.utils.counters["stats"])

    drop = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2)
    plain, graphs = ran()
    with attnbench.capture() as seen:
        watched, same = ran()
    assert all(map(torch.equal, plain, watched))
    assert graphs == same
    rows = {(c["L"], c["mask"], c["pass"]): c["count"] for c in seen.cases}
    assert rows == {(8, "causal", "forward"): 2, (16, "causal", "forward"): 1,
                    (24, "causal", "forward"): 1, (8, "window:3", "forward"): 1,
                    (8, "causal", "both"): 1}  # fmt: skip
    assert not seen.undescribed


@pytest.mark.parametrize("score", [None, lambda score, b, h, q, k: score + k])
def test_flex_is_told_by_the_function_of_its_block_mask(score):
    def near(b, h, q, k):
        return (q >= k) & (q - k < 16)

    blocks, q = create_block_mask(near, None, None, 64, 64, device="cpu"), random(1, 2, 64, 16)
    torch.compiler.reset()
    with attnbench.capture() as seen, torch.no_grad():
        compiled = torch.compile(flex_attention, backend="eager")
        compiled(q, q, q, score, blocks)
    (row,) = seen.report()["cases" if score is None else "left_out"]
    assert (row["mask"], row["call"]["op"], row["count"]) == ("window:16", "flex", 1)
    assert row.get("problems", ()) == (() if score is None else ("a score function",))


@pytest.mark.parametrize("grad", [False, True])
def test_multihead_attention_is_seen_on_each_of_its_ways(grad):
    module = nn.MultiheadAttention(32, 4, batch_first=True).train(grad)
    x = random(3, 10, 32)
    lengths = torch.tensor([10, 5, 7])
    padded = torch.arange(10) >= lengths[:, None]
    drop = torch.ones(10, 10, dtype=torch.bool).triu(1)

    def program():
        module.zero_grad()
        with torch.set_grad_enabled(grad):
            out = [
                module(x, x, x)[0], module(x, x, x, need_weights=False)[0],
                module(x, x, x, key_padding_mask=padded)[0],
                module(x, x, x, attn_mask=drop, need_weights=False)[0],
            ]  # fmt: skip
            if grad:
                sum(y.square().sum() for y in out).backward()
        return [y.detach() for y in out] + [p.grad for p in module.parameters() if grad]

    seen = unchanged(program)
    pass_ = "both" if grad else "forward"
    assert counts(seen, *SIZES, "mask", "pass") == {
        (3, 4, 4, 10, 10, 8, mask, pass_): count
        for mask, count in (("full", 2), ("padding:10+5+7", 1), ("causal", 1))
    }
    ops = {case["call"]["op"] for case in seen.cases}
    assert ops == ({"MultiheadAttention"} if grad else {"MultiheadAttention, fast path"})
    assert {(*case["call"]["modules"],) for case in seen.cases} == {("MultiheadAttention",)}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_the_fast_path_of_an_encoder_stays_and_is_seen():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3).eval()
    x = random(2, 10, 32)
    padded = torch.arange(10) >= torch.tensor([10, 6])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(10)

    def program():
        with torch.no_grad():
            return [encoder(x), encoder(x, src_key_padding_mask=padded), encoder(x, mask=causal)]

    seen = unchanged(program)
    assert counts(seen, *SIZES, "mask", "op") == {
        (2, 4, 4, 10, 10, 8, mask, "encoder layer, fast path"): 3
        for mask in ("full", "padding:10+6", "causal")
    }


def test_layouts_and_passes_and_checkpoints_are_told_apart():
    x = random(2, 8, 3 * 16, grad=True)
    q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in x.chunk(3, -1))
    with attnbench.capture() as seen:
        F.scaled_dot_product_attention(q, k, v).sum().backward(retain_graph=True)
        F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous())
        w = random(2, 8, 4, 4, grad=True).transpose(1, 2)
        out = torch.utils.checkpoint.checkpoint(
            lambda w: F.scaled_dot_product_attention(w, w, w), w, use_reentrant=False
        )
        out.sum().backward()
    assert counts(seen, "layout", "pass") == {
        ("packed", "both"): 1, ("BHLD", "forward"): 1, ("BLHD", "both"): 1, ("BLHD", "forward"): 1,
    }  # fmt: skip
    assert max(case["call"]["recomputed"] for case in seen.cases) == 1


def test_what_has_no_case_is_in_the_report_and_the_rest_in_a_list_that_is_read(tmp_path):
    q, k = random(2, 4, 8, 4), random(2, 2, 24, 4)
    with attnbench.capture() as seen:
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True, scale=0.3)
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        F.scaled_dot_product_attention(q, q, q, random(8, 8))
        for length in range(1, 25):
            cache = k[:, :, :length].contiguous()
            F.scaled_dot_product_attention(q[:, :, :1], cache, cache, enable_gqa=True)
    left = {(row["problems"][0], row["count"]) for row in seen.report()["left_out"]}
    assert left == {("dropout 0.1", 1), ("a bias", 1)}
    file = tmp_path / "seen.json"
    seen.save(file)
    sweeps = listed((), file, {})
    assert len(sweeps) == len(seen.cases) == 6
    assert sum(case["count"] for case in seen.cases) == 25
    lengths = {case["S"]: case["count"] for case in seen.cases if case["L"] == 1}
    assert sum(n * count for n, count in lengths.items()) / 24 == pytest.approx(12.5, abs=0.5)


def test_many_calls_make_a_short_list():
    q = random(1, 1, 2, 2)
    with attnbench.capture() as seen, torch.no_grad():
        for length in range(6000):
            F.scaled_dot_product_attention(q, q.expand(1, 1, 2, 2), q, scale=1.0 + length % 7)
    assert counts(seen, "scale") == {(1.0 + i,): 857 + (i == 0) for i in range(7)}
    assert len(json.dumps(seen.report())) < 10_000


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = random(1, 2, 8, 4)

    def forward(self, q):
        return F.scaled_dot_product_attention(q, self.cache, self.cache)


def test_counts_are_per_marked_step_and_say_which_modules_took_how_many_caches():
    model = nn.Sequential(nn.Sequential(Layer(), Layer()), Layer())
    shared, q = Layer(), random(1, 2, 8, 4)
    with attnbench.capture() as seen, torch.no_grad():
        for _ in range(4):
            model(q)
            shared(q[..., :3, :])
            shared(q[..., :3, :])
            seen.step()
    assert counts(seen, "L", "calls", "caches") == {(8, 12, 3): 3, (3, 8, 1): 2}
    assert seen.report()["steps"] == 4
    names = {case["L"]: case["call"]["modules"] for case in seen.cases}
    expected = {f"Sequential.{path}": 4 for path in ("0.0", "0.1", "1")}
    assert names == {8: expected, 3: {"Layer": 8}}


def test_a_call_on_a_gpu_says_why_a_fast_kernel_did_not_run(monkeypatch):
    q, asked = random(1, 2, 8, 4), []

    def refuses(params, debug):
        asked.append((params, debug))
        warnings.warn(
            "Expected q to be half. (Triggered internally at sdp_utils.cpp:9.)", stacklevel=1
        )
        return False

    cuda = torch.backends.cuda
    monkeypatch.setattr(cuda, "SDPAParams", lambda *given: given[:1] + given[4:])
    monkeypatch.setattr(cuda, "can_use_flash_attention", refuses)
    monkeypatch.setattr(cuda, "can_use_cudnn_attention", lambda params, debug: False)
    monkeypatch.setattr(cuda, "can_use_efficient_attention", lambda params, debug: True)
    given = (q, q, q, None, 0.0, True, False)
    why = {"flash": "Expected q to be half.", "cudnn": "torch gives no reason"}
    assert dict(refusals(*given)) == why
    assert asked == [((q, 0.0, True, False), True)]


def run(*program, options=(), **more):
    command = [sys.executable, "-m", "attnbench", "capture", *options, "--", *program]
    wide = os.environ | {"COLUMNS": "500"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=wide, **more)


def test_a_program_runs_as_it_would_and_its_calls_are_written(tmp_path):
    script = tmp_path / "my_model.py"
    script.write_text(
        f"{F_LINE}for _ in range(3):\n    {CALL}"
        "print(sys.argv, sys.stdin.read(), __name__, sys.path[0])\n"
        "1 / 0\n"
    )
    arguments = ("--output", "x")
    program = (sys.executable, str(script), *arguments)
    seen = run(*program, options=("--output", "calls.json"), input="in", cwd=tmp_path)
    assert seen.stdout == f"{[str(script), *arguments]} in __main__ {tmp_path}\n"
    assert seen.returncode == 1
    assert "ZeroDivisionError: division by zero\n" in seen.stderr
    assert "(exit code 1)" in seen.stderr
    assert "attnbench advise --cases calls.json" in seen.stderr
    (case,) = json.loads((tmp_path / "calls.json").read_text())["cases"]
    assert (case["count"], case["L"]) == (3, 8)
    assert case["call"]["places"] == [[f"{script}:4 <module>", 3]]


CHILDREN = """
import multiprocessing, os, signal, subprocess, sys, time, torch
def work(n, killed=False):
    q = torch.randn(1, 2, n, 8)
    for _ in range(5):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    if killed:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    work(8)
    for method, *arguments in (("fork", 16), ("spawn", 16), ("fork", 64, True)):
        child = multiprocessing.get_context(method).Process(target=work, args=arguments)
        child.start()
        child.join()
    subprocess.run([sys.executable, "-c", "from children import work; work(32)"])
    if os.fork() == 0:
        work(32)
        sys.exit()
    os.wait()
"""


def test_children_add_their_calls_also_one_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # its threads do not survive a fork
    (tmp_path / "children.py").write_text(CHILDREN)
    seen = run(sys.executable, "children.py", cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    assert "some were made by child processes: 5" in seen.stderr
    cases = json.loads((tmp_path / "captured.json").read_text())["cases"]
    assert {case["L"]: case["count"] for case in cases} == {8: 5, 16: 10, 32: 10, 64: 5}


def test_what_was_seen_stays_when_a_program_is_interrupted(tmp_path):
    waiting = f"{F_LINE}{CALL}print('here', flush=True)\nimport time\ntime.sleep(60)"
    command = [sys.executable, "-m", "attnbench", "capture", "--", sys.executable, "-c", waiting]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "here\n"
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "KeyboardInterrupt" in errors
    assert "1 call" in errors


def test_a_program_ends_after_so_many_calls_and_a_second_run_counts_what_no_hook_saw(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        f"{F_LINE}def attend(q):\n    return {CALL}"
        "scripted = torch.jit.script(attend)\n"
        "scripted(q.requires_grad_()).sum().backward()\n"
        "torch.nn.MultiheadAttention(4, 2)(q[0], q[0], q[0])\n"
        f"while True:\n    {CALL}"
        "    torch.ops.aten.scaled_dot_product_attention(q, q, q)\n"
        "    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)\n"
    )
    asked = ("--verify", "--calls", "3")
    seen = run(sys.executable, str(script), options=asked, cwd=tmp_path)
    assert (seen.returncode, "stopped after 3 calls" in seen.stderr) == (0, True)
    ops = {"scaled_dot_product_attention": 3, "_scaled_dot_product_flash_attention_for_cpu": 2}
    verified = json.loads((tmp_path / "captured.json").read_text())["verified"]
    assert verified == {"calls": 3, "unseen": {f"aten::{op}": n for op, n in ops.items()}}
    assert "3 calls seen, 5 more ran that capture cannot describe: 3 × aten::" in seen.stderr


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (("-c", "import torch"), "the program made no call, looked for"),
        (("-c", "import nothing_of_that_name"), "imported no torch"),
        (("missing.py",), "imported no torch"),
        (("-I", "-c", "pass"), "-I"),
    ],
)
def test_a_program_without_attention_is_one_line(tmp_path, program, said):
    done = run(sys.executable, *program, cwd=tmp_path)
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("Error: ")]
    assert done.returncode == 2
    assert said in line
    assert "exited with" in line
    assert not (tmp_path / "captured.json").exists()


def test_a_program_that_is_stopped_before_its_first_call_is_said_to_be(tmp_path):
    late = f"{F_LINE}import time\ntime.sleep(0.1)\n{CALL}"
    done = run(sys.executable, "-c", late, options=("--seconds", "0.1"), cwd=tmp_path)
    assert done.returncode == 2
    assert "was stopped after 0.1 s, before its first call" in done.stderr


def test_what_cannot_be_run_or_written_is_refused_before(tmp_path):
    (tmp_path / "mine.json").write_text("[1]")
    for program, options, said in (
        (("no-such-program",), (), "no program no-such-program"),
        (("model.py",), (), "-- python model.py"),
        (("true",), ("--output", "mine.json"), "mine.json exists and is not of a capture"),
        (("true",), ("--output", "none/x.json"), "a folder that exists"),
    ):
        done = run(*program, options=options, cwd=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_what_was_captured_is_checked_and_listed_in_place_of_battery_and_models(cli, tmp_path):
    q, file = random(2, 4, 8, 4), tmp_path / "seen.json"
    with attnbench.capture() as seen:
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
    seen.save(file)
    asked = ("--cases", file, "--case", "B=1,n=16", "--dtypes", "float64", "--impls", "sdpa")
    done = cli("check", *asked, "--verbose")
    assert done.exit_code == 0, done.output
    checked = {line.partition("attention ")[2] for line in done.stdout.splitlines()[:3]}
    assert checked == {
        "both n=16 B=1 H=4 D=64 float64", "forward n=16 B=1 H=4 D=64 float64",
        "forward n=8 B=2 H=4 D=4 float64 causal",
    }  # fmt: skip
    found = json.loads(cli("list", file, "--json").stdout)
    (row,) = found["sections"][0]["parts"][0]["table"]
    assert (row["count"], row["seq_len"], row["mask"]) == (3, 8, "causal")
    assert str(file) in found["commands"][0]["command"]
    for text, said in (
        ('{"capture": 9}', "a capture of version 9"),
        ('{"x": 1}', "an object, not a"),
    ):
        file.write_text(text)
        done = cli("check", "--cases", file)
        assert (done.exit_code, said in done.output) == (2, True)

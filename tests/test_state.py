"""What one implementation leaves changed is put back before the next, and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, exported, run_attnbench, run_script

# What a call may leave behind, and how the row names it. Each would break or change other rows.
LEFT = {
    "default device": ("torch.set_default_device('meta')", "the default device"),
    "device context": ("torch.device('meta').__enter__()", "the default device"),
    "default dtype": ("torch.set_default_dtype(torch.float64)", "the default dtype"),
    "threads": ("torch.set_num_threads(3)", "the number of threads"),
    "TF32": ("torch.set_float32_matmul_precision('high')", "the matmul precision"),
    "autocast": ("torch.set_autocast_enabled('cpu', True)", "autocast"),
    "anomaly": ("torch.autograd.set_detect_anomaly(True)", "autograd's anomaly mode"),
    "denormals": ("torch.set_flush_denormal(True)", "the flushing of denormals"),
    "SDPA": ("torch.backends.cuda.enable_flash_sdp(False)", "SDPA's backends"),
    "cuDNN": ("torch.backends.cudnn.benchmark = True", "cuDNN's flags"),
    "patched SDPA": (
        "F.scaled_dot_product_attention = lambda *a, **k: a[0]", "functions of torch.nn.functional",
    ),
    "patched matmul": ("torch.matmul = None", "functions of torch"),
    "new method": ("torch.Tensor.abs = lambda x: x * 0", "methods of torch.Tensor"),
    "patched method": ("torch.Tensor.norm = None", "methods of torch.Tensor"),
    "sleep": ("__import__('time').sleep = lambda s: None", "time.sleep"),
    "environment": ("os.environ['MINE'] = '1'; os.environ.pop('PATH', None)", "the environment"),
    "directory": ("os.chdir('/')", "the working directory"),
    "signals": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal handlers"),
    "alarm": ("signal.setitimer(signal.ITIMER_REAL, 3600)", "an alarm"),
    "affinity": ("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])", "its CPUs"),
    "tracing": ("sys.settrace(lambda *_: None)", "the trace function"),
    "streams": ("sys.stderr = open(os.devnull, 'w')", "the standard streams"),
    "collector": ("gc.set_threshold(1)", "the collector's thresholds"),
    "limits": (
        "resource.setrlimit(resource.RLIMIT_NOFILE,"
        " (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
        "the limits of the process",
    ),
}  # fmt: skip
# Each in a process of its own, forked from one that has torch; writes the names as JSON.
SCRIPT = """
import gc, json, os, random, resource, signal, sys
import torch
import torch.nn.functional as F
from attnbench.machine.state import beyond_repair, remember, restore_clocks, settle

for name, left in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    if os.fork():
        os.wait()
        continue
    remember(1)
    start = random.random(), torch.rand(1).item()
    settle()
    named = []
    for _ in range(2):
        exec(left)
        named.append(restore_clocks() + settle())
    clean = restore_clocks() + settle()
    same = (random.random(), torch.rand(1).item()) == start
    print(json.dumps([name, named, clean, beyond_repair(), same]))
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    lefts = {name: left for name, (left, _) in LEFT.items()}
    ran = run_script(SCRIPT, json.dumps(lefts))
    assert ran.returncode == 0, ran.stderr
    return {row[0]: row[1:] for row in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.parametrize("left", LEFT)
def test_what_a_call_leaves_behind_is_put_back_and_named_each_time(
    told: dict[str, Any], left: str
) -> None:
    named, clean, lasting, same = told[left]
    assert [LEFT[left][1] in names for names in named] == [True, True], named
    assert (clean, lasting, same) == ([], None, True)


def test_the_flags_of_a_compiler_are_put_back_though_it_was_loaded_late() -> None:
    ran = run_script("""
from attnbench.machine.state import remember, settle
remember(1)
import torch._inductor.config as config
default = config.max_autotune
for _ in range(2):
    config.max_autotune = not default
    print(settle(), config.max_autotune == default, settle())
""")
    assert ran.stdout.splitlines() == ['["inductor\'s flags"] True []'] * 2, ran.stderr


# In a sweep.

HOSTILE = """
import os, time
import torch
from attnbench.api import attention

real = time.perf_counter_ns

def hostile(name, deed):
    @attention(name)
    def core(q, k, v, *, causal, scale):
        o = ((q @ k.mT) * scale).softmax(-1) @ v
        deed()
        return o

def sprays():
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"garbage")
        except OSError:
            pass

def closes():
    os.closerange(3, 64)
    time.sleep(3600)

def slows_clock():
    time.perf_counter_ns = lambda: real() // 2

hostile("sprays", sprays)
hostile("closes", closes)
hostile("slows-clock", slows_clock)
hostile("device", lambda: torch.set_default_device("meta"))
kept = torch.inference_mode()
hostile("inference", lambda: kept.__enter__())

@attention("half")
def half(q, k, v, *, causal, scale):
    raise RuntimeError("one half: \\ud800")

torch.set_default_dtype(torch.float64)
os.environ["MINE"] = "1"  # may stay: what is imported when something is built may need it
"""


def test_hostile_implementations_cost_their_own_cells_alone(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    names = "naive,sprays,closes,slows-clock,device,inference,half,sdpa"
    ran = run_attnbench(
        "sweep", "--impl", "hostile.py", "--impls", names, "--seq-lens", "8", *TINY,
        "--threads", "1", "--name", "r", cwd=tmp_path,
    )  # fmt: skip
    rows = {row["impl"]: row for row in exported(tmp_path / "results" / "r")}
    status = {impl: row["status"] for impl, row in rows.items()}
    assert status == {
        "naive": "ok", "sdpa": "ok", "device": "ok", "half": "error", "sprays": "error",
        "closes": "crashed", "slows-clock": "incorrect", "inference": "error",
    }  # fmt: skip
    assert rows["slows-clock"]["time_us_median"] is None
    assert "time.perf_counter_ns" in rows["slows-clock"]["reason"]
    assert "the default device" in rows["device"]["notes"]
    assert "inference mode" in rows["inference"]["reason"]
    assert "\ufffd" in rows["half"]["reason"]
    assert ran.returncode == 1  # slows-clock
    assert "hostile.py changed the default dtype; restored" in ran.stderr
    assert "Traceback" not in ran.stderr

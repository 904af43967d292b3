"""What one implementation leaves changed is put back before the next, and named."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.conftest import run_script

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
    "environment": ("os.environ['MINE'] = '1'; os.environ.pop('PATH', None)", "the environment"),
    "directory": ("os.chdir('/')", "the working directory"),
    "alarm": ("signal.setitimer(signal.ITIMER_REAL, 3600)", "an alarm"),
    "affinity": ("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])", "its CPUs"),
    "tracing": ("sys.settrace(lambda *_: None)", "the trace function"),
    "collector": ("gc.set_threshold(1)", "the collector's thresholds"),
    "compiler": (
        "import torch._inductor.config as c; c.max_autotune = not c.max_autotune",
        "inductor's flags",
    ),
}  # fmt: skip
if os.geteuid() == 0:  # nobody else may go back
    LEFT["priority"] = ("os.nice(1)", "its priority")
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


PINNED = """
import os, threading
from attnbench.machine.state import pin, remember, settle

remember(1)
cpu, stop = max(os.sched_getaffinity(0)), threading.Event()
other = threading.Thread(target=stop.wait)
other.start()
pin(cpu)
changed = settle()
remember()
places = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
stop.set()
assert changed == [] and set.union(*places) == {cpu} and len(places) > 1, (changed, places)
"""


def test_a_pinned_process_stays_where_it_is_with_all_its_threads():
    ran = run_script(PINNED)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    lefts = {name: left for name, (left, _) in LEFT.items()}
    ran = run_script(SCRIPT, json.dumps(lefts))
    assert ran.returncode == 0, ran.stderr
    return {row[0]: row[1:] for row in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.parametrize("left", LEFT)
def test_what_a_call_leaves_behind_is_put_back_and_named_each_time(told, left):
    named, clean, lasting, same = told[left]
    changes = left != "affinity" or len(os.sched_getaffinity(0)) > 1  # one CPU cannot become fewer
    assert [LEFT[left][1] in names for names in named] == [changes] * 2, named
    assert (clean, lasting, same) == ([], None, True)

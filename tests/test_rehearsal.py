"""The simulated GPU that `make gpu-rehearsal` uses: its times are the truth."""

import pytest

from tests.rehearsal.__main__ import Rehearsal


@pytest.mark.slow
def test_a_sweep_on_the_simulated_gpu_has_the_true_times(tmp_path):
    rehearsal = Rehearsal(tmp_path)
    sizes = ("--seq-lens", "72", "--dtypes", "bfloat16", "--impls", "naive,sdpa")
    found = rehearsal.sweep("cold", *sizes, "--max-time", "0.01")
    assert (rehearsal.failed, found) == ([], "2 cells\n")

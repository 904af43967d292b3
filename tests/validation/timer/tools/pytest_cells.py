"""The cells as tests for pytest-benchmark, which finds them in a file that imports from here.

The job comes as JSON in the environment; what pytest-benchmark found is in its own JSON file.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from tests.validation.timer.tools.job import Call, Job, as_its_users_do

_JOB = Job.from_text(os.environ["ATTNBENCH_TIMER_JOB"])
as_its_users_do(_JOB)
_CALLS = _JOB.prepare()


def pytest_generate_tests(metafunc: Any) -> None:
    """One test a cell."""
    metafunc.parametrize("name", list(_CALLS))


def test_cell(benchmark: Any, name: str) -> None:
    """Time one cell as a test would; when it began and ended goes into the JSON file."""
    call = _waited_for(_CALLS[name]) if _JOB.device == "cuda" else _CALLS[name]
    begin_s = time.monotonic()
    # The number of rounds is derived from one call: a cold one would leave most of the time unused.
    call()
    benchmark(call)
    benchmark.extra_info.update(cell=name, begin_s=begin_s, end_s=time.monotonic())


def _waited_for(call: Call) -> Call:
    def waited() -> None:
        call()
        torch.cuda.synchronize()

    return waited

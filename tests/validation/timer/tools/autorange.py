"""torch.utils.benchmark's Timer.blocked_autorange: one cell after the other.

Usage: python -m tests.validation.timer.tools.autorange JOB, where JOB is JSON; see `job.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.benchmark import Timer

from tests.validation.timer.tools.job import Call, Job, as_its_users_do, found


def measure(job: Job) -> None:
    """Time every cell; its samples are means over blocks of calls that it chose."""
    as_its_users_do(job)

    def tool(call: Call, share_s: float) -> dict[str, Any]:
        timer = Timer(stmt="call()", globals={"call": call}, num_threads=job.threads)
        measurement = timer.blocked_autorange(min_run_time=share_s)
        return found(measurement.times, measurement.number_per_run, measurement.median)

    job.time_each(job.prepare(), tool)


def main() -> None:
    """Serve one job."""
    job = Job.from_text(sys.argv[1])
    measure(job)
    job.write(version=torch.__version__)


if __name__ == "__main__":
    main()

"""triton.testing.do_bench, on a GPU alone: one cell after the other.

Usage: python -m tests.validation.timer.tools.dobench JOB, where JOB is JSON; see `job.py`.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from tests.validation.timer.tools.job import Call, Job, as_its_users_do, found

WARM_UP_MS = 25.0  # its default


def measure(job: Job, do_bench: Any) -> None:
    """Time every cell. `return_mode="all"` gives the times that "median" is the median of."""
    as_its_users_do(job)

    def tool(call: Call, share_s: float) -> dict[str, Any]:
        sampling_ms = max(1.0, share_s * 1000 - WARM_UP_MS)
        times_ms = do_bench(call, warmup=WARM_UP_MS, rep=sampling_ms, return_mode="all")
        median_s = statistics.median(times_ms) / 1000
        warm = {"warm_s": WARM_UP_MS / 1000}
        return found([time_ms / 1000 for time_ms in times_ms], 1, median_s) | warm

    job.time_each(job.prepare(), tool)


def main() -> None:
    """Serve one job."""
    import triton  # type: ignore[import-not-found]  # where there is no GPU, there is none
    from triton.testing import do_bench  # type: ignore[import-not-found]

    job = Job.from_text(sys.argv[1])
    measure(job, do_bench)
    job.write(version=triton.__version__)


if __name__ == "__main__":
    main()

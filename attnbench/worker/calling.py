"""Some calls of the cell of a profile, for profilers that start a process of their own (nsys, ncu).

Usage: python -m attnbench.worker.calling PROFILE [FILE…], with the files of the user.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from attnbench.api.loader import load_built_in, load_file
from attnbench.errors import AttnbenchError
from attnbench.machine.state import remember
from attnbench.measure.probes import CALL
from attnbench.schema.profile import read_profile
from attnbench.worker.tracing import built

CALLS_ALONE = 5


def run_alone(profile: Path, files: tuple[str, ...]) -> int:
    """Build the cell of a profile and call it, each phase in an NVTX range; 1 if it fails.

    On CUDA only the calls at the end lie between `cudaProfilerStart` and `cudaProfilerStop`.
    """
    cell = read_profile(profile).cell
    case, gpu = cell.case, cell.case.device == "cuda"

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        if gpu:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        yield
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    load_built_in()
    remember(case.threads)
    for file in files:
        load_file(file, replace=True)
    with phase("attnbench-build"):
        trial = built(case, cell.impl, 0)
    bound = trial.bound
    if bound is not None:
        with trial.stage("calls"):
            with phase("attnbench-warm-up"):
                bound.call()
            if gpu:
                torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            for _ in range(CALLS_ALONE):
                with phase(CALL):
                    bound.call()
            if gpu:
                torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    if trial.status is not None:
        print(f"{trial.status}: {trial.reason}", file=sys.stderr)
        return 1
    print(f"{CALLS_ALONE} calls of {cell.impl}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(run_alone(Path(sys.argv[1]), tuple(sys.argv[2:])))
    except AttnbenchError as err:
        print(f"Error: {err}", file=sys.stderr)
        sys.exit(int(err.exit_code))

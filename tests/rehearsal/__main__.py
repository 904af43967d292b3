"""`make gpu-rehearsal`: the parts of `make gpu` on a simulated H100.

The Makefile's own targets run, with their own worker processes; `tests.rehearsal.cuda` stands in
for torch.cuda. Exits with 1 where a part fails or a time is not the true one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "ATTNBENCH_REHEARSAL": "1",
    "PYTHONPATH": f"{ROOT / 'tests/rehearsal/site'}{os.pathsep}{ROOT}",
}
SLOW = {"ATTNBENCH_REHEARSAL_SLOWER": str(512 / 9)}  # for sweeps: lengths that no other size has
# Not simulated: autograd's stream, a kernel's own memory, the profiler, the gate's sleeps.
DESELECTED = (
    "test_a_backward_pass_is_captured", "test_what_a_call_allocates", "test_a_forced_backend",
    "test_a_sweep_with_grouped_heads", "test_each_of_many_sessions", "test_a_call_that_waits",
    "test_all_variants", "test_a_call_of_some_microseconds",
)  # fmt: skip
CHECKED = "bfloat16 linformer"  # the rest of `gpu-check` takes half an hour
SIZES = ("--seq-lens", "9,72", "--heads", "16", "--head-dims", "128", "--dtypes", "bfloat16")
CLOCKS = {"warm": ("--l2", "warm"), "graph": ("--timer", "graph")}


class Rehearsal:
    """What has been run in a folder, and what of it failed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.failed = folder, list[str]()

    def run(self, what: str, *command: object, **variables: str) -> str:
        """Run a command whose processes find the simulated GPU; return what it printed."""
        begin = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {what} …", end=" ", flush=True)
        ended = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=os.environ | ENVIRONMENT | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        print(f"exit {ended.returncode} after {time.monotonic() - begin:.0f} s", flush=True)
        if ended.returncode:
            self.failed.append(what)
            print(ended.stdout[-3000:])
        return ended.stdout

    def part(self, name: str) -> None:
        """A part of `make gpu`."""
        variables = {"PYTEST_ADDOPTS": f"-k 'not ({' or '.join(DESELECTED)})'"}
        make = ("make", name, f"OUT={self.folder}", f"PYTHON={sys.executable}", "LIMIT=600")
        self.run(name, *make, **variables, **(SLOW if name == "gpu-sweep" else {}))

    def check(self) -> None:
        """The part `gpu-check`, called again where all is done but `CHECKED`."""
        listed = self.run("catalogue", sys.executable, "-m", "attnbench", "list", "--json")
        tables = (
            part.get("table", ()) for section in json.loads(listed)["sections"]
            for part in section["parts"]
        )  # fmt: skip
        names = (row["name"] for table in tables for row in table if "family" in row)
        every = map(" ".join, product(("bfloat16", "float16", "float32"), list(names)))
        done = [f"{what}: exit 0" for what in every if what != CHECKED]
        (self.folder / "check.txt").write_text("\n".join(done) + "\n")
        self.part("gpu-check")

    def sweep(self, name: str, *options: str) -> str:
        """A sweep of its own; return how it compares with the truth."""
        sweep = (sys.executable, "-m", "attnbench", "sweep", "--device", "cuda", *options)
        self.run(name, *sweep, "--output", self.folder, "--name", name, **SLOW)
        return self.compare(name)

    def compare(self, name: str) -> str:
        """Hold the times of a run against the truth."""
        truth = (sys.executable, "-m", "tests.rehearsal.truth", self.folder / name)
        found = self.run(f"true times of {name}", *truth, **SLOW)
        print(f"  {found.partition(chr(10))[0]}")
        return found


def main() -> int:
    """Rehearse all parts in a folder that goes when they are done."""
    with tempfile.TemporaryDirectory() as folder:
        rehearsal = Rehearsal(Path(folder))
        rehearsal.part("gpu-doctor")
        rehearsal.part("gpu-sweep")
        rehearsal.compare("gpu")
        rehearsal.part("gpu-report")
        for name, options in CLOCKS.items():
            impls = ("--impls", "naive,sdpa,chunked", "--passes", "forward,both")
            rehearsal.sweep(name, *SIZES, *impls, "--max-time", "0.01", *options)
        rehearsal.part("gpu-test")
        rehearsal.check()
    print(f"failed: {', '.join(rehearsal.failed)}" if rehearsal.failed else "all parts passed")
    return 1 if rehearsal.failed else 0


if __name__ == "__main__":
    sys.exit(main())

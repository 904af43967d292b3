"""Break the package on purpose, one variant of `mutants.toml` at a time: does a test notice each?

Every variant is applied to a copy of the tree, and the tests named with it are run. One that they
pass is a hole in the tests. What no longer matches the code is `stale`: see `--list`.
"""

from __future__ import annotations

import argparse
import functools
import queue
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.isolated import FAILED, PASSED, run_tests

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One variant: `find` is replaced in `file`, and one of `tests` has to fail.

    Tests are function names, wherever they stand, which may end in `[parameters]`.
    """

    file: str
    name: str
    what: str
    find: str
    replace: str
    tests: list[str]

    @property
    def package(self) -> str:
        """The package, or `impls`."""
        return self.file.removeprefix("attnbench/").partition("/")[0]

    @property
    def node_ids(self) -> list[str]:
        """Its tests as pytest names them."""
        split = [test.partition("[") for test in self.tests]
        return [f"{node}{a}{b}" for name, a, b in split for node in all_tests().get(name, [])]

    @property
    def stale(self) -> str | None:
        """Why it cannot be applied or judged as it is written, or None."""
        file = ROOT / self.file
        count = file.read_text().count(self.find) if file.is_file() else 0
        if count != 1:
            return f"stale: {self.find!r} is found {count} times in {self.file}"
        lost = [test for test in self.tests if test.partition("[")[0] not in all_tests()]
        return f"stale: no test is called {', '.join(lost)}" if lost else None


@functools.cache
def all_tests() -> dict[str, list[str]]:
    """Where the tests of each name stand: `file::[class::]name`."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        group = ""
        for match in re.finditer(r"^class (\w+)|^( *)def (test_\w+)", file.read_text(), re.M):
            group = match[1] + "::" if match[1] else group
            node = f"{file.relative_to(ROOT)}::{group if match[2] else ''}{match[3]}"
            found.setdefault(match[3], []).append(node)
    return found


def all_mutants() -> list[Mutant]:
    """Every variant of `mutants.toml`."""
    files = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())
    rows = [(file, name, row) for file, rows in files.items() for name, row in rows.items()]
    return [Mutant(file=file, name=name, **row) for file, name, row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("names", nargs="*", metavar="NAME", help="variants or packages [all]")
    parser.add_argument("--jobs", type=int, default=1, help="variants that run side by side")
    parser.add_argument("--list", action="store_true", help="name all, say what is stale, run none")
    options = parser.parse_args()
    mutants = all_mutants()
    wanted = set(options.names or [m.name for m in mutants])
    if not (mutants := [m for m in mutants if {m.name, m.package} & wanted]):
        parser.error(f"no variant is called {' or '.join(wanted)}; see --list")
    if options.list:
        for m in mutants:
            print(f"{m.package:10} {m.name:30} {m.stale or m.what}")
        sys.exit(any(m.stale for m in mutants))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        sys.exit(run(mutants, options.jobs, Path(folder)))


def run(mutants: list[Mutant], jobs: int, folder: Path) -> int:
    """Run the tests without a variant, then with each. 0 if every variant is caught, else 1."""
    begin = time.monotonic()
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results")
    copies: queue.Queue[Path] = queue.Queue()  # those that nobody uses now
    for number in range(jobs):
        copy = Path(shutil.copytree(ROOT, folder / str(number), ignore=ignored))
        (copy / "results").symlink_to(ROOT / "results")
        (copy / "attnbench_impls").symlink_to("impls")  # as pyproject's package-dir
        copies.put(copy)
    tests = sorted({node for m in mutants if not m.stale for node in m.node_ids})
    with ThreadPoolExecutor(jobs) as pool:
        parts = [(c, part) for i, c in enumerate(copies.queue) if (part := tests[i::jobs])]
        for code, output in pool.map(lambda part: run_tests(*part, mutated=False), parts):
            if code != PASSED:
                print(output, "these tests fail without any variant: nothing is proven", sep="\n")
                return 1
        print(f"{len(tests)} tests pass without a variant", flush=True)
        caught = list(pool.map(lambda mutant: is_caught(mutant, copies), mutants))
    of = Counter(m.package for m in mutants)
    print(", ".join(f"{package} {count}" for package, count in of.items()))
    print(f"{sum(caught)} of {len(mutants)} caught ({time.monotonic() - begin:.0f} s)")
    return 0 if all(caught) else 1


def is_caught(mutant: Mutant, copies: queue.Queue[Path]) -> bool:
    """Apply a variant to a copy, run its tests, and take it back."""
    begin, outcome, copy = time.monotonic(), mutant.stale, copies.get()
    if outcome is None:
        text = (copy / mutant.file).read_text()
        (copy / mutant.file).write_text(text.replace(mutant.find, mutant.replace))
        code, output = run_tests(copy, mutant.node_ids, mutated=True)
        (copy / mutant.file).write_text(text)
        outcome = f"the tests could not run (pytest ended with {code}): {output[-300:]}"
        if code == PASSED:
            outcome = f"SURVIVED: {mutant.what}"
        if code == FAILED:
            by = re.search(r"^(?:FAILED|ERROR) \S*?::([^\s\[]+)", output, re.MULTILINE)
            outcome = f"caught by {by[1]}" if by else "caught (timeout)"
    copies.put(copy)
    spent = f"{time.monotonic() - begin:5.1f} s"
    print(f"{mutant.package:10} {mutant.name:30} {spent}  {outcome}", flush=True)
    return outcome.startswith("caught")


if __name__ == "__main__":
    main()

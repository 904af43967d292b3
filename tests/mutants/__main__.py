"""Break the package on purpose, one variant at a time, and see that a test notices each.

`python -m tests.mutants` (or `make mutants`) applies every variant of `mutants.toml` to a copy of
the tree and runs the tests named with it. A variant that they pass is a hole in the tests. The text
to replace is looked for in its `file`, then in the whole package, and a test by its name in all of
`tests/`, so that entries survive when code moves. What is not found is `stale`: see `--list`.
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0
PASSED, FAILED = 0, 1  # exit codes of pytest; any other says that it could not run the tests


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One variant: `find` is replaced in `file`, and one of `tests` has to fail.

    Tests are function names, which may end in `[parameters]`.
    """

    name: str
    package: str
    what: str
    file: str
    find: str
    replace: str
    tests: list[str]

    @functools.cached_property
    def places(self) -> list[Path]:
        """The file that holds the text to replace, once for each time that it does."""
        file = ROOT / self.file
        if file.is_file() and self.find in (text := file.read_text()):
            return [file] * text.count(self.find)
        sources = [f for top in ("attnbench", "impls") for f in (ROOT / top).rglob("*.*")]
        kept = [f for f in sources if f.is_file() and f.suffix != ".pyc"]
        return [f for f in kept for _ in range(f.read_text().count(self.find))]

    @property
    def node_ids(self) -> list[str]:
        """Its tests as pytest names them."""
        split = [test.partition("[") for test in self.tests]
        return [f"{file}{a}{b}" for name, a, b in split for file in all_tests().get(name, [])]

    @property
    def stale(self) -> str | None:
        """Why it cannot be applied or judged as it is written, or None."""
        if len(self.places) != 1:
            return f"stale: {self.find!r} is found {len(self.places)} times ({self.file})"
        lost = [test for test in self.tests if test.partition("[")[0] not in all_tests()]
        return f"stale: no test is called {', '.join(lost)}" if lost else None


@functools.cache
def all_tests() -> dict[str, list[str]]:
    """Where the tests of each name stand: `file::[class::]name`."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        group = ""
        for line in file.read_text().splitlines():
            if match := re.match(r"class (\w+)", line):
                group = f"{match[1]}::"
            elif match := re.match(r"(    )?def (test_\w+)", line):
                place = f"{file.relative_to(ROOT)}::{group if match[1] else ''}{match[2]}"
                found.setdefault(match[2], []).append(place)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("names", nargs="*", metavar="NAME", help="variants or packages [all]")
    parser.add_argument("--jobs", type=int, default=1, help="variants that run side by side")
    parser.add_argument("--list", action="store_true", help="name all, say what is stale, run none")
    options = parser.parse_args()
    rows = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]
    mutants = [Mutant(**row) for row in rows]
    if unknown := set(options.names) - {text for m in mutants for text in (m.name, m.package)}:
        parser.error(f"no variant is called {', '.join(sorted(unknown))}; see --list")
    wanted = set(options.names) or {m.name for m in mutants}
    mutants = [m for m in mutants if {m.name, m.package} & wanted]
    if options.list:
        for m in mutants:
            print(f"{m.package:10} {m.name:34} {m.stale or m.what}")
        sys.exit(any(m.stale for m in mutants))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        sys.exit(run(mutants, max(1, options.jobs), Path(folder)))


def run(mutants: list[Mutant], jobs: int, folder: Path) -> int:
    """Run the tests without a variant, then with each. 0 if every variant is caught, else 1."""
    begin = time.monotonic()
    copies = [copy_tree(folder / str(number)) for number in range(jobs)]
    tests = sorted({place for m in mutants if not m.stale for place in m.node_ids})
    share = -(-len(tests) // jobs)
    parts = [(copy, tests[i * share : (i + 1) * share]) for i, copy in enumerate(copies)]
    with ThreadPoolExecutor(jobs) as pool:
        for code, output in pool.map(lambda p: run_tests(*p, mutated=False), parts):
            if code != PASSED:
                print(output, "these tests fail without any variant: nothing is proven", sep="\n")
                return 1
        seconds = time.monotonic() - begin
        print(f"{len(tests)} tests pass without a variant ({seconds:.0f} s)", flush=True)
        free: queue.Queue[Path] = queue.Queue()
        for copy in copies:
            free.put(copy)
        caught = list(pool.map(lambda m: is_caught(m, free), mutants))
    of = Counter(m.package for m in mutants)
    print(", ".join(f"{package} {count}" for package, count in of.items()))
    print(f"{sum(caught)} of {len(mutants)} caught ({time.monotonic() - begin:.0f} s)")
    return 0 if all(caught) else 1


def is_caught(mutant: Mutant, copies: queue.Queue[Path]) -> bool:
    """Try one variant in a copy that nobody else uses, and print what became of it."""
    begin, outcome = time.monotonic(), mutant.stale
    if outcome is None:
        copy = copies.get()
        outcome = attempt(mutant, copy)
        copies.put(copy)
    seconds = time.monotonic() - begin
    print(f"{mutant.package:10} {mutant.name:34} {seconds:5.1f} s  {outcome}", flush=True)
    return outcome.startswith("caught")


def attempt(mutant: Mutant, copy: Path) -> str:
    """Apply a variant, run its tests, and take it back."""
    file = copy / mutant.places[0].relative_to(ROOT)
    text, times = file.read_text(), file.stat()
    file.write_text(text.replace(mutant.find, mutant.replace))
    # Another time than that of the bytecode beside it, which would be run instead.
    os.utime(file, (times.st_atime, times.st_mtime + 1000))
    code, output = run_tests(copy, mutant.node_ids, mutated=True)
    file.write_text(text)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    if code is None:
        return "caught (timeout)"
    if code == FAILED:
        by = re.search(r"^(?:FAILED|ERROR) \S*?::([^\s\[]+)", output, re.MULTILINE)
        return f"caught by {by[1]}" if by else "caught"
    if code == PASSED:
        return f"SURVIVED: {mutant.what}"
    return f"the tests could not run (pytest ended with {code}): {output[-300:]}"


def run_tests(copy: Path, tests: list[str], *, mutated: bool) -> tuple[int | None, str]:
    """The exit code of pytest and what it printed; None where it took too long."""
    if not tests:
        return PASSED, ""
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "-rfE", *["-x"] * mutated]
    # Workers import the copy, too. A variant leaves no bytecode behind.
    environment = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{copy / '.site'}"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"} if mutated else {}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S if mutated else None)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    return process.returncode, output


def copy_tree(copy: Path) -> Path:
    """Copy what git knows or would add, as it is now; results as a link."""
    listed = ["git", "ls-files", "-coz", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in names.split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith("results/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / "results").symlink_to(ROOT / "results")
    (copy / ".site").mkdir()
    (copy / ".site" / "attnbench_impls").symlink_to("../impls")  # as pyproject's package-dir
    return copy


if __name__ == "__main__":
    main()

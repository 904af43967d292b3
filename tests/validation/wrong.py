"""`attnbench check` over kernels of `wrong_kernels.py`: which are found, and what is said of each.

What is judged is what a user reads: the output of the command. Only the sentences count, not the
name of the check that is shown, which has many an option in it by chance.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from attnbench.base.units import digits
from attnbench.report.tables import table
from tests.validation.wrong_kernels import RIGHT, SAYS

FILE = Path(__file__).with_name("wrong_kernels.py")
_TOGETHER = 12  # kernels a command: they share references
# Nothing is wrong with what these return, until the next call: it is enough that `check` says so.
_TOLD = ("same-buffer",)
_COLUMNS = {
    "implementation", "verdict", "passed", "failed", "unsupported", "worst error/allowed", "why"
}  # fmt: skip
_KIND = re.compile(r"\d+\. ")
_SHOWN = re.compile(r".*: (attention|layer|decode) (forward|backward|both) ")


@dataclass(frozen=True, kw_only=True)
class Said:
    """What `check` says of one kernel: the word in its table, how many failed, and sentences."""

    name: str
    verdict: str
    passed: int
    failed: int
    sentences: tuple[str, ...]

    @property
    def explained(self) -> bool:
        """Whether the expected words are in a sentence."""
        return any(re.search(SAYS[self.name], sentence) for sentence in self.sentences)

    @property
    def well(self) -> bool:
        """Whether a wrong kernel was found, and a right one left alone."""
        if self.name in RIGHT:
            return self.verdict.startswith("right") and not self.failed
        return self.verdict == "FAILED" or (self.name in _TOLD and self.explained)


def read(output: str, names: Iterable[str]) -> Iterator[Said]:
    """What the command printed, kernel by kernel.

    A kind of failure is a numbered line, what explains it, and the simplest check that shows it
    with its figures, which are left out. What stands under the table belongs to the kernel that is
    named in it.
    """
    names, blocks, rows = set(names), dict[str, list[str]](), dict[str, dict[str, str]]()
    current, listening, header = "", False, list[str]()
    for line in output.splitlines():
        text, row = line.strip(), re.split(r"\s{2,}", line)
        if row[0] in names and len(row) > 3:
            rows[row[0]] = dict(zip(header, row, strict=False))
        elif row[0] == "implementation":
            current, header = "", row
        elif text in names:
            current = text
        elif _KIND.match(line) and current:
            blocks.setdefault(current, []).append(text.split(" ", 1)[1])
            listening = True
        elif current and text:
            listening = listening and not _SHOWN.match(text)
            if listening or re.match(r"query \d+ (sees|misses)", text):
                blocks[current].append(text)
        elif rows:
            for name in names & set(re.findall(r"[\w-]+", text)):
                blocks.setdefault(name, []).append(text)
    for name, cells in rows.items():
        more = [f"{column}: {cell}" for column, cell in cells.items() if column not in _COLUMNS]
        yield Said(
            name=name,
            verdict=cells["verdict"],
            passed=int(cells["passed"]),
            failed=int(cells["failed"]),
            sentences=(*blocks.get(name, ()), *more),
        )


def examine(
    names: Iterable[str] | None, dtypes: str | None, tell: Callable[[str], None]
) -> list[Said]:
    """Check them, and say how each command ended."""
    wanted = list(names or [*SAYS, *RIGHT])
    if unknown := [name for name in wanted if name not in SAYS and name not in RIGHT]:
        raise ValueError(f"no such kernels: {', '.join(unknown)}")
    # A column that says how a result is kept is there for all or for none.
    alone = [[name] for name in wanted if name in _TOLD]
    rest = [name for name in wanted if name not in _TOLD]
    groups = alone + [rest[at : at + _TOGETHER] for at in range(0, len(rest), _TOGETHER)]
    found: dict[str, Said] = {}
    for group in groups:
        begin = time.perf_counter()
        options = ["--impl", str(FILE), "--impls", ",".join(group)]
        options += ["--dtypes", dtypes] if dtypes else []
        ended = subprocess.run(
            [sys.executable, "-m", "attnbench", "check", *options],
            capture_output=True,
            text=True,
            check=False,
        )
        took = time.perf_counter() - begin
        tell(f"{', '.join(group)}: exit {ended.returncode}, {took:.0f} s")
        found |= {said.name: said for said in read(ended.stdout, group)}
        if lacking := [name for name in group if name not in found]:
            tell(f"nothing of {', '.join(lacking)}: {ended.stderr[-500:]}")
            for name in lacking:
                found[name] = Said(
                    name=name, verdict=f"exit {ended.returncode}", passed=0, failed=0, sentences=()
                )
    return [found[name] for name in wanted]


def tables(found: list[Said]) -> Iterator[str]:
    """What to print: wrong ones, right ones, and the sums."""
    header = ["kernel", "verdict", "failed", "of", "words", "what it says"]
    wrong, right = ([x for x in found if (x.name in RIGHT) == kind] for kind in (False, True))
    for some in filter(None, (wrong, right)):
        rows = []
        for said in some:
            lines = said.sentences or ("",)
            words = "" if said.name in RIGHT else "yes" if said.explained else "NO"
            figures = [said.verdict, str(said.failed), str(said.passed + said.failed), words]
            if not said.well:
                figures[0] += " (WRONG)" if said.name in RIGHT else " (MISSED)"
            rows.append((said.name, *figures, lines[0]))
            rows += [("", "", "", "", "", line) for line in lines[1:]]
        yield table(header, rows, right=["failed", "of"])
    explained = sum(said.explained for said in wrong)
    caught, called = sum(said.well for said in wrong), sum(not said.well for said in right)
    share = digits(100 * explained / max(1, len(wrong)), 2)
    yield (
        f"{caught} of {len(wrong)} wrong kernels found, {explained} ({share} %) explained in the"
        f" expected words; {called} of {len(right)} right ones called wrong"
    )

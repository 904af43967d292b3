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

from attnbench.errors import UsageError
from attnbench.report.render.tables import table
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
    passed: int = 0
    failed: int = 0
    sentences: tuple[str, ...] = ()

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

    Of a kind of failure these are a numbered line and what explains it, without the check that
    shows it; and what stands under the table and names the kernel.
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
        passed, failed = int(cells["passed"]), int(cells["failed"])
        yield Said(
            name=name, verdict=cells["verdict"], passed=passed, failed=failed,
            sentences=(*blocks.get(name, ()), *more),
        )  # fmt: skip


def examine(
    names: Iterable[str] | None, dtypes: str | None, tell: Callable[[str], None]
) -> list[Said]:
    """Check them, and say how each command ended."""
    wanted = list(names or [*SAYS, *RIGHT])
    if unknown := set(wanted) - {*SAYS, *RIGHT}:
        raise UsageError(f"no such kernels: {', '.join(sorted(unknown))}")
    # A column that says how a result is kept is there for all or for none.
    rest = [name for name in wanted if name not in _TOLD]
    groups = [[name] for name in wanted if name in _TOLD]
    groups += [rest[at : at + _TOGETHER] for at in range(0, len(rest), _TOGETHER)]
    found: dict[str, Said] = {}
    for group in groups:
        begin = time.perf_counter()
        options = ["--impl", str(FILE), "--impls", ",".join(group)]
        options += ["--dtypes", dtypes] if dtypes else []
        command = [sys.executable, "-m", "attnbench", "check", *options]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        exit_code = f"exit {ended.returncode}"
        tell(f"{', '.join(group)}: {exit_code}, {time.perf_counter() - begin:.0f} s")
        found |= {name: Said(name=name, verdict=exit_code) for name in group}
        found |= {said.name: said for said in read(ended.stdout, group)}
        if any(found[name].verdict == exit_code for name in group):
            tell(ended.stderr[-500:])
    return [found[name] for name in wanted]


def tables(found: list[Said]) -> Iterator[str]:
    """What to print: wrong ones, right ones, and the sums."""
    header = ["kernel", "verdict", "failed", "of", "words", "what it says"]
    wrong, right = ([x for x in found if (x.name in RIGHT) == kind] for kind in (False, True))
    for some in filter(None, (wrong, right)):
        rows = []
        for said in some:
            first, *more = said.sentences or ("",)
            mark = "" if said.well else " (WRONG)" if some is right else " (MISSED)"
            words = "" if some is right else "yes" if said.explained else "NO"
            of = said.passed + said.failed
            rows.append((said.name, said.verdict + mark, str(said.failed), str(of), words, first))
            rows += [("", "", "", "", "", line) for line in more]
        yield table(header, rows, right=["failed", "of"])
    explained = sum(said.explained for said in wrong)
    yield (
        f"{sum(said.well for said in wrong)} of {len(wrong)} wrong kernels found, {explained}"
        " explained in the expected words;"
        f" {sum(not said.well for said in right)} of {len(right)} right ones called wrong"
    )

"""`attnbench check` over wrong kernels: which are found, and what is said of each.

What is judged are the sentences that a user reads, not the name of the check that is shown, which
has many an option in it by chance.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.errors import UsageError
from attnbench.report.render.tables import grid, shown
from tests.validation import reported_kernels
from tests.validation.wrong_kernels import RIGHT, SAYS

FILE = Path(reported_kernels.__file__)  # which registers those of wrong_kernels, too
_TOGETHER = 12  # kernels a command: they share references
# Nothing is wrong with what these return, until the next call: it is enough that `check` says so.
_TOLD = ("same-buffer",)
_SHOWN = re.compile(r".*: (attention|layer|decode) (forward|backward|both) |.*expected .*, got ")


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


def read(found: dict[str, Any], names: Iterable[str]) -> Iterator[Said]:
    """What the command's JSON says, kernel by kernel.

    Of a kind of failure these are its headline and what explains it, without the check that shows
    it; and what stands under the table and names the kernel.
    """
    parts = {section["section"]: section["parts"] for section in found["sections"]}
    (summary, *below), said = parts["Implementations"], dict[str, list[str]]()
    for name in names:
        lines = [x for p in parts.get(name, ()) for x in (p.get("reason"), *p.get("text", ())) if x]
        said[name] = [line for line in lines if not _SHOWN.match(line)]
        said[name] += [x for p in below for x in p["text"] if name in re.findall(r"[\w-]+", x)]
    for row in summary["table"]:
        if row["impl"] in said:
            yield Said(
                name=row["impl"], verdict=row["verdict"]["verdict"],
                passed=row["passed"]["value"], failed=row["failed"]["value"],
                sentences=tuple(said[row["impl"]]),
            )  # fmt: skip


def examine(
    names: Iterable[str] | None, dtypes: str | None, tell: Callable[[str], None]
) -> list[Said]:
    """Check them, and say how each command ended."""
    wanted = list(names or [*SAYS, *RIGHT])
    if unknown := set(wanted) - {*SAYS, *RIGHT}:
        raise UsageError(f"no such kernels: {', '.join(sorted(unknown))}")
    groups = [wanted[at : at + _TOGETHER] for at in range(0, len(wanted), _TOGETHER)]
    found: dict[str, Said] = {}
    for group in groups:
        begin = time.perf_counter()
        options = ["--impl", str(FILE), "--impls", ",".join(group), "--json"]
        options += ["--dtypes", dtypes] if dtypes else []
        command = [sys.executable, "-m", "attnbench", "check", *options]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        exit_code = f"exit {ended.returncode}"
        tell(f"{', '.join(group)}: {exit_code}, {time.perf_counter() - begin:.0f} s")
        found |= {name: Said(name=name, verdict=exit_code) for name in group}
        if ended.stdout:
            found |= {said.name: said for said in read(json.loads(ended.stdout), group)}
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
        yield shown(grid(header, rows, right=["failed", "of"]))
    explained = sum(said.explained for said in wrong)
    yield (
        f"{sum(said.well for said in wrong)} of {len(wrong)} wrong kernels found, {explained}"
        " explained in the expected words;"
        f" {sum(not said.well for said in right)} of {len(right)} right ones called wrong"
    )

"""How often two profiles of the same code differ, and whether a planted copy is the first line.

`make validate PART=profiles` profiles plain attention, and the same with one `.contiguous()` more,
in turns, each time in a fresh process, and compares every pair: of plain with plain, what is called
changed is a false alarm; of plain with planted, `aten::clone` has to be the first line. Pairs share
processes, so that the counts are of fewer independent ones than pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

from attnbench.analysis.profiles import Difference, difference
from attnbench.base import units
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.report.profile.texts import LEAST
from attnbench.schema.case import Case
from attnbench.schema.messages import Trace
from attnbench.schema.profile import TRACE, Profile

PLANTED = """from attnbench.api import attention


def softmax_attention(q, k, v, scale):
    return ((q * scale) @ k.mT).softmax(-1) @ v


@attention("plain", gqa=False)
def plain(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
    return softmax_attention(q_BHLD, k_BGSD, v_BGSV, scale)


@attention("planted", gqa=False)
def planted(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
    return softmax_attention(q_BHLD, k_BGSD, v_BGSV.mT.contiguous().mT, scale)
"""


def profiled(name: str, case: Case, file: Path, folder: Path) -> Profile:
    """One fresh process's profile of the implementation `name` in `file`."""
    with LocalRunner(Settings(device="cpu", files=(str(file),))) as runner:
        runner.catalogue()
        trace = str(folder / TRACE)
        asked = Trace(case=case, impl=name, seed=0, file=trace, label=name)
        found = runner.trace(asked).profile
    assert found is not None
    return found


def false_alarms(found: Difference) -> list[str]:
    """The ops that are called changed, by a share of the time that a table shows."""
    least_us = LEAST * found.a.time.median_us
    return [of.name for of in found.ops if abs(of.delta_us) >= least_us]


def write(folder: Path, count: int, seq_lens: tuple[int, ...], tell: Callable[[str], None]) -> None:
    """Profile `count` processes of each, compare all pairs, write profiles.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (file := folder / "planted.py").write_text(PLANTED)
    rows = []
    for n in seq_lens:
        found: dict[str, list[Profile]] = {"plain": [], "planted": []}
        for number, name in product(range(count), found):
            tell(f"n={n}: {name} {number + 1} of {count}")
            found[name].append(profiled(name, Case(seq_len=n), file, folder))
        (folder / TRACE).unlink()
        same = [difference(*pair) for pair in combinations(found["plain"], 2)]
        planted = [difference(*pair) for pair in product(found["plain"], found["planted"])]
        times = [of.time.median_us for of in found["plain"]]
        alarms = [names for each in same if (names := false_alarms(each))]
        firsts = [each.ops[0].name for each in planted]
        first = firsts.count("aten::clone")
        copies = [
            op.self_us for of in found["planted"] for op in of.ops if op.name == "aten::clone"
        ]
        rows.append((
            f"{n}", f"{count} + {count}", units.time_interval(min(times), max(times)),
            units.time_interval(min(copies), max(copies)),
            f"{len(alarms)} of {len(same)}", f"{first} of {len(planted)}",
        ))  # fmt: skip
        for names in alarms:
            tell(f"n={n}: false: {', '.join(names)}")
        tell(f"n={n}: first lines: {dict(Counter(firsts))}")
    header = ("n", "processes", "time of plain", "time of the copy", "pairs of plain with a change",
              "copy is the first line")  # fmt: skip
    (folder / "profiles.md").write_text(units.table(header, rows) + "\n")

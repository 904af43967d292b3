"""gate.html: what a gate run found, with a dot for every round. Needs nothing but itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnbench.base import units
from attnbench.base.files import write_whole
from attnbench.errors import StoreError
from attnbench.gate.decide.data import Checked, GateRun, Outcome, Verdict
from attnbench.gate.decide.stored import NAME, load_gate
from attnbench.gate.decide.verdict import decide
from attnbench.report import pages
from attnbench.report.gate import figure, texts

PAGE = "gate.html"
PLOTS = "plots"
MOST_METRICS, MOST_DISTURBED = 400, 200  # rows of tables
# How a verdict looks, as `page.css` calls it.
_CLASSES: dict[Verdict, str] = {
    "incorrect": "refuted",
    "regressed": "refuted",
    "inconclusive": "inconclusive",
    "not comparable": "inconclusive",
    "improved": "holds",
    "ok": "holds",
}


def redraw(folder: Path) -> Path:
    """Decide again from the raw data in a gate run's folder, and draw its page.

    Raises:
        StoreError: there is no gate run, it is damaged, or the folder cannot be written.
    """
    run = load_gate(folder)
    return write_page(folder, run, decide(run))


def write_page(folder: Path, run: GateRun, outcome: Outcome) -> Path:
    """Write gate.html and its figures (plots/gate-rounds-*) into a gate run's folder.

    Raises:
        StoreError: the folder cannot be written.
    """
    try:
        plots = figure.draw_all(run, outcome, folder / PLOTS)
        groups = pages.plot_groups(plots)
    except OSError as err:
        raise StoreError(f"cannot write a report into {folder} ({err.strerror})") from err
    page = pages.template("gate.html.jinja").render(
        plots=groups, replay=texts.replay(folder / NAME), **_values(run, outcome)
    )
    write_whole(folder / PAGE, page)
    return folder / PAGE


def _values(run: GateRun, outcome: Outcome) -> dict[str, Any]:
    """What the page says, as texts."""
    common, names = texts.labels(run.cells)
    metrics = _metrics(run, names)
    disturbed = texts.vetoes(run)
    bad = (outcome.controls.found is False, bool(outcome.controls.untrusted))
    return {
        "title": texts.title(outcome),
        "exit_code": int(outcome.exit_code),
        "counts": texts.counts(outcome),
        "sides": [*texts.sides(run), *texts.code(run)],
        "files": [(side.name, texts.flat(file)) for side in (run.base, run.candidate)
                  for file in side.files],
        "facts": texts.environment(run),
        "common": common,
        "header": texts.HEADER[1:],
        "reading": texts.READING,
        "rows": _rows(run, outcome, names),
        "controls": list(zip(texts.controls(run, outcome), bad, strict=True)),
        "promise": texts.promise(run.rules),
        "metrics": [row for row in metrics if row["differs"]],
        "same_metrics": [row for row in metrics if not row["differs"]][:MOST_METRICS],
        "rounds": texts.rounds(run),
        "disturbed": disturbed[:MOST_DISTURBED],
        "failures": texts.failures(run)[:MOST_DISTURBED],
        "spent": texts.spent(run),
        "environment": _facts(run.environment),
        "options": _facts(run.options),
    }  # fmt: skip


def _rows(run: GateRun, outcome: Outcome, names: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "texts": texts.texts(row, f"{texts.SIGNS[row.verdict]} {names[number]}")[1:-1],
            "mark": texts.mark(row.verdict),
            "look": _CLASSES[row.verdict],
            "reason": texts.flat(row.reason),
            "notes": [texts.flat(note) for note in row.notes],
        }
        for number, row in texts.worst_first(outcome.rows)
    ]


def _metrics(run: GateRun, names: list[str]) -> list[dict[str, Any]]:
    """What repeats exactly, on both sides, cell by cell."""
    found = []
    for number, both in run.checks.items():
        sides = [_known(both.get(side)) for side in ("base", "candidate")]
        right = all(side["status"] == "ok" for side in sides)
        for name in dict.fromkeys([*sides[0], *sides[1]]) if right else ("status",):
            base, candidate = (_metric(name, side.get(name)) for side in sides)
            found.append(
                {"cell": names[number], "metric": name, "base": base, "candidate": candidate,
                 "differs": base != candidate}
            )  # fmt: skip
    return found


def _known(checked: Checked | None) -> dict[str, Any]:
    if checked is None:
        return {"status": "absent"}
    status = checked.status + (f": {checked.reason}" if checked.reason else "")
    return {"status": status, **checked.metrics}


def _metric(name: str, value: Any) -> str:
    if type(value) is float and not name.endswith("_bytes"):
        return units.digits(value)
    if type(value) is int and not name.endswith("_bytes"):
        return units.count(value)
    exact = f" ({units.count(value)})" if type(value) is int and value >= 1024 else ""
    return texts.flat(pages.text(name, value)) + exact


def _facts(known: Any) -> dict[str, str]:
    return {
        texts.flat(str(name)): texts.flat(pages.text(str(name), value))
        for name, value in known.items()
        if name not in pages.LIMITS
    }

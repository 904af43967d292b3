"""attnbench: benchmark and profile attention implementations.

`attnbench.get(name)` calls an implementation on tensors, `attnbench.advise(...)` says which is best
for your calls, `with attnbench.capture() as seen:` which calls your program makes, `with
attnbench.use(advice):` calls what was advised for them,
`attnbench.sweep(...)` measures and gives a DataFrame, `attnbench.load(run)` that of
a stored run, `attnbench.report(run)` says what it shows. Each loads what it needs when called.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.errors import UsageError, in_keywords
from attnbench.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from attnbench.api.direct import get
    from attnbench.capturing import capture
    from attnbench.dispatch import use
    from attnbench.report.shown import Shown

__all__ = ["__version__", "advise", "capture", "get", "load", "report", "sweep", "use"]
_NO_SETTINGS = ("files", "replace", "root", "other_root", "python", "lent", "model")
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "report":  # a package that can be called
            return import_module("attnbench.report")
        if name == "get":  # with torch
            return import_module("attnbench.api.direct").get
        if name == "capture":  # with torch
            return import_module("attnbench.capturing").capture
        if name == "use":  # with torch
            return import_module("attnbench.dispatch").use
        raise AttributeError(f"attnbench has no {name!r}; it has: {', '.join(__all__)}", name=name)


def __dir__() -> list[str]:
    return __all__


def _words() -> dict[str, str]:
    """The keyword or the setting of each flag."""
    from attnbench.execution.process import Settings
    from attnbench.schema.axes import KEYWORDS

    names = [*Settings.__dataclass_fields__, *KEYWORDS, *signature(advise).parameters]
    names += ["workload", "baseline"]
    return {name.removesuffix("_s"): name for name in names} | {"impl": "files"}


@in_keywords(_words)
def load(
    run: str | Path = "latest", *, output: str | Path = "results", baseline: str | None = None
) -> pd.DataFrame:
    """A run (folder, name in `output`, `latest`, `previous`) as one row a cell; unknown is null.

    `speedup` is against `baseline` [that of the sweep, else naive, else sdpa, else the first].

    Raises:
        StoreError: there is no such run, or its records are damaged.
        UnknownNameError: the run has no implementation called `baseline`.
    """
    from attnbench.analysis.table import load as load_table
    from attnbench.store.folder import SWEEP, RunFolder

    return load_table(RunFolder.find(str(run), Path(output), SWEEP).path, baseline)


@in_keywords(_words)
def sweep(
    *, impls: str | Sequence[str] | None = None, files: str | Path | Sequence[str | Path] = (),
    output: str | Path = "results", name: str | None = None, baseline: str | None = None,
    settings: dict[str, Any] | None = None, model: str | Path | None = None,
    step: str | None = None, tokens: str | int | Sequence[int] | None = None,
    case: str | Sequence[str] = (), cases: str | Path | None = None, **axes: Any,
) -> pd.DataFrame:  # fmt: skip
    """Measure and return the run's table; the run is stored in `output` as on the command line.

    `model`, `step`, `tokens`, `case` and `cases` are as on the command line, `axes` are called as
    their flags (`seq_lens="1k..8k"` or `(128, 256)`, `masks="causal,window:64"`, …), `settings`
    are fields of `attnbench.execution.process.Settings` (`device`, `precision`, `max_time_s`, …).

    Raises:
        UsageError: an axis or a value that makes no sense; nothing was written.
    """
    from attnbench.base.registry import require
    from attnbench.execution import process, session
    from attnbench.execution.events import follow
    from attnbench.execution.request import SweepRequest
    from attnbench.planning.models import asked_sweeps, model_sizes
    from attnbench.planning.plan import Axes

    given, calls = _asked(axes, impls, model, step, tokens, case, cases)
    sweeps, left_out = asked_sweeps((Axes(),), given, **calls)
    settings = settings or {}
    known = [name for name in process.Settings.__dataclass_fields__ if name not in _NO_SETTINGS]
    require("setting", settings, known, "settings={…}")
    own = tuple(str(Path(file).resolve()) for file in _several(files))
    around = model_sizes(calls["model"], given["workload"])
    chosen = process.Settings(files=own, model=around, **settings)
    if chosen.threads:
        raise UsageError("the number of threads is an axis: sweep(threads=(1, 2))")
    options = {**settings, "files": own, "baseline": baseline, **calls, **given}
    options |= {"prune": None, "no_prune": not chosen.prune}  # as the command line has it
    request = SweepRequest(
        sweeps=sweeps, left_out=left_out, settings=chosen, output=Path(output), name=name,
        baseline=baseline, options={n.removesuffix("_s"): x for n, x in options.items() if x},
    )  # fmt: skip
    path = follow(session.sweep(request))
    assert path is not None
    return load(path)


@in_keywords(_words)
def advise(
    *, run: str | Path | None = None, impls: str | Sequence[str] | None = None,
    files: str | Path | Sequence[str | Path] = (), budget: str | float | None = None,
    output: str | Path = "results", name: str | None = None,
    settings: dict[str, Any] | None = None, model: str | Path | None = None,
    step: str | None = None, tokens: str | int | Sequence[int] | None = None,
    case: str | Sequence[str] = (), cases: str | Path | None = None, **axes: Any,
) -> Shown:  # fmt: skip
    """The best attention for your calls, as `attnbench advise` says it; notebooks show its page.

    `budget` is wall time: `"60s"`, `"2m"`, or seconds [3m, or a stored run that tried all that is
    asked]. `settings` are `device` and `seed`, the rest is as for `sweep`. With `run`, a folder, a
    name or `latest`, nothing is measured. `.table` is what `attnbench.load` has of the run.

    Raises:
        UsageError: a value that makes no sense, a budget too short, or nothing to compare.
        StoreError: there is no such run, or its records are damaged.
    """
    from attnbench.base.registry import require
    from attnbench.base.units import parse_duration
    from attnbench.execution import advising, session
    from attnbench.execution.events import follow
    from attnbench.machine.host import is_here
    from attnbench.planning.plan import steps_of
    from attnbench.report.documents.advise import document
    from attnbench.report.shown import Shown
    from attnbench.store import folder, runs

    given, calls = _asked(axes, impls, model, step, tokens, case, cases)
    if run is None:
        require("setting", settings or {}, ("device", "seed"), "settings={…}")
        budget_s = parse_duration("3m" if budget is None else str(budget), "--budget")
        request = advising.request(
            given, calls, _several(files), budget_s, settings or {},
            output=Path(output), name=name, stored=budget is None,
        )  # fmt: skip
        path = follow(session.sweep(request))
    else:
        given |= calls | {"files": files, "budget": budget, "name": name, "settings": settings}
        if asked := [f"{key}=…" for key, value in given.items() if value]:
            raise UsageError(f"run=… is advice from what was measured; remove {', '.join(asked)}")
        request, path = None, folder.RunFolder.find(str(run), Path(output), folder.SWEEP).path
    assert path is not None
    stored = runs.load_run(path)
    facts = stored.shared(stored.environments)
    steps = steps_of(request.sweeps, facts["device"], facts["threads"]) if request else None
    found = document(stored, steps, here=request is not None or is_here(facts))
    return Shown.of(found, table=load(path))


def _asked(
    axes: dict[str, Any], impls: Any, model: Any, step: Any, tokens: Any, case: Any, cases: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of axes, and the calls of a model or a list, as the command line reads them."""
    from attnbench.planning.plan import Axes

    asked = Axes(impls=impls, **axes)
    calls = {"model": model and str(model), "step": step, "tokens": tokens}
    calls |= {"case": _several(case) or None, "cases": cases and Path(cases)}
    return {"workload": axes.get("workload"), "impls": asked.impls, **asked.values}, calls


def _several(value: Any) -> tuple[Any, ...]:
    """One file or case, which may have commas in it, or several."""
    if isinstance(value, int | float):
        raise UsageError(f"a file or a case is a text, such as B=2,L=64, not {value!r}")
    return (value,) if isinstance(value, str | Path) else tuple(value)

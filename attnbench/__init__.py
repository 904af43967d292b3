"""attnbench: benchmark and profile attention implementations.

`attnbench.get(name)` calls an implementation on tensors, `attnbench.load(run)` gives a run as a
DataFrame, `attnbench.sweep(...)` makes one, `attnbench.report(run)` says what it shows. Each loads
what it needs when it is called.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd

__all__ = ["__version__", "get", "load", "report", "sweep"]
_NO_SETTINGS = ("files", "replace", "root", "other_root", "python", "lent")  # those of the gate
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "report":  # a package that can be called
            return import_module("attnbench.report")
        raise AttributeError(f"attnbench has no {name!r}; it has: {', '.join(__all__)}", name=name)


def get(name: str, *, file: str | None = None) -> Callable[..., Any]:
    """An implementation as `f(q, k, v, *, causal=False, scale=None) -> o`; loads torch.

    See `attnbench.api.direct.get` for shapes and errors.
    """
    from attnbench.api.direct import get as direct_get

    return direct_get(name, file=file)


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


def sweep(
    *,
    files: tuple[str, ...] = (),
    output: str | Path = "results",
    name: str | None = None,
    settings: dict[str, Any] | None = None,
    baseline: str | None = None,
    model: str | Path | None = None,
    step: str | None = None,
    tokens: int | Sequence[int] | None = None,
    case: Sequence[str] = (),
    cases: str | Path | None = None,
    **axes: Any,
) -> pd.DataFrame:
    """Measure and return the run's table; the run is stored in `output` as on the command line.

    `model`, `step`, `tokens`, `case` and `cases` are as on the command line, `axes` are called as
    their flags (`seq_lens=(128, 256)`, `impls=("naive",)`, `workload="decode"`, …), `settings` are
    fields of `attnbench.execution.process.Settings` (`device`, `precision`, `max_time_s`, …).

    Raises:
        UsageError: an axis or a value that makes no sense; nothing was written.
    """
    from attnbench.base.registry import require
    from attnbench.errors import UsageError
    from attnbench.execution.events import follow
    from attnbench.execution.process import Settings
    from attnbench.execution.session import SweepRequest
    from attnbench.execution.session import sweep as start
    from attnbench.planning.models import asked_sweeps
    from attnbench.planning.plan import Axes

    asked = Axes(**axes)
    given = {"workload": axes.get("workload"), "impls": asked.impls, **asked.values}
    own: dict[str, Any] = {"model": model and str(model), "step": step, "tokens": tokens}
    own |= {"case": tuple(case) or None, "cases": cases and Path(cases)}
    sweeps, left_out = asked_sweeps((Axes(),), given, **own)
    known = [name for name in Settings.__dataclass_fields__ if name not in _NO_SETTINGS]
    require("setting", settings or {}, known, "settings={…}")
    files = (files,) if isinstance(files, str) else files
    chosen = Settings(files=tuple(str(Path(file).resolve()) for file in files), **(settings or {}))
    if chosen.threads:
        raise UsageError("the number of threads is an axis: sweep(threads=(1, 2))")
    request = SweepRequest(
        sweeps=sweeps,
        left_out=left_out,
        settings=chosen,
        output=Path(output),
        name=name,
        baseline=baseline,
        options=_typed(
            {
                **(settings or {}),
                "files": chosen.files or None,
                "baseline": baseline,
                **own,
                **given,
            }
        ),
    )
    path = follow(start(request))
    assert path is not None
    return load(path)


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    """Settings and axes as the options of `attnbench sweep` would be stored."""
    found = {n.removesuffix("_s"): v for n, v in given.items() if v is not None and v is not False}
    return found | ({"no_prune": True} if given.get("prune") is False else {})

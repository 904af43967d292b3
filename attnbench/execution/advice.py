"""What advice asks of a sweep: the calls, the default beside each, and the layers around them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attnbench.errors import UsageError
from attnbench.execution.process import Settings
from attnbench.execution.session import SweepRequest
from attnbench.planning.advice import beside, kernels_alone
from attnbench.planning.models import asked_sweeps
from attnbench.planning.plan import Axes
from attnbench.theory.choices import DEFAULT, WORDS


def advice_request(
    axes: Mapping[str, Any], calls: Mapping[str, Any], files: Iterable[str | Path],
    budget_s: float, settings: Mapping[str, Any], **more: Any,
) -> SweepRequest:  # fmt: skip
    """The sweep that advice is made from, within a budget.

    `axes` are values by keyword, `calls` what is given of `model`, `step`, `tokens`, `case` and
    `cases`; `more` are fields of the request.

    Raises:
        UsageError: as `asked_sweeps`, or a setting that makes no sense.
    """
    asked, left_out = asked_sweeps((Axes(),), axes, **calls)
    sweeps = kernels_alone(asked)
    main = [
        each.having(
            impls=dict.fromkeys((*(each.impls or WORDS), DEFAULT)), step=each.step or "call"
        )
        for each in sweeps
    ]
    layers: tuple[Axes, ...] = ()
    if calls["model"] and not axes["workload"]:
        workload = "decode" if calls["step"] == "decode" else "layer"
        with contextlib.suppress(UsageError):  # a layer that has no case, as of latents
            layers, _ = asked_sweeps((), {**axes, "workload": workload, "impls": None}, **calls)
    extra = [*beside(sweeps), *(a.having(impls=(DEFAULT,), count=0, step="") for a in layers)]
    given = {n: str(x) if isinstance(x, Path) else x for n, x in {**calls, **axes}.items() if x}
    return SweepRequest(
        sweeps=(*main, *extra),
        left_out=left_out,
        settings=Settings(
            ceilings="none", precision=1e-9, max_time_s=budget_s, race_s=budget_s, kept=(DEFAULT,),
            files=tuple(str(Path(file).resolve()) for file in files), reference_s=budget_s / 10,
            **settings,
        ),
        baseline=DEFAULT, max_total_time_s=budget_s,
        options={"command": "advise", "budget_s": budget_s, **given}, **more,
    )  # fmt: skip

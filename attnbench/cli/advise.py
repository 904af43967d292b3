"""`attnbench advise`: which attention for a model's calls, from a run or within a budget."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnbench.base.signals import EndedError
from attnbench.cli.options import (
    AXIS_FIELDS,
    RUN,
    axes_options,
    command_options,
    found_run,
    given,
    impl_files,
    say,
    show,
    threads_option,
)
from attnbench.errors import UsageError

if TYPE_CHECKING:
    from attnbench.execution.session import SweepRequest

_OF_A_RUN = ("run", "output", "format_", "as_json", "quiet")


@click.command()
@click.argument("run", type=RUN, required=False)
@command_options(
    "advise",
    axes=axes_options(),
    impl=impl_files("A Python file with your implementations, tried beside the others."),
    threads=threads_option("1"),
)
def advise(**options: Any) -> None:
    """Say which attention is best for your calls.

    The calls are those of --model, of --case, or of the axes. sdpa is called first, then all others
    that support the call: what takes more than 3 times as long is dropped, the rest is checked and
    timed within --budget. The calls that a step spends most in come first. With RUN, a folder, a
    name, `latest` or `previous`, nothing is measured. If a stored run of this machine tried all
    that is asked, it is used; --budget measures again.

    For each call: the best implementation, what the default (sdpa) costs beside it, with an
    interval, the memory of both, and the line of torch or transformers to change. Exits 1 if sdpa
    or an implementation of yours is wrong, 2 if there is nothing to compare, 3 if no call is
    decided.
    """
    from attnbench.cli.progress import AdviceDisplay
    from attnbench.execution import session
    from attnbench.execution.events import follow
    from attnbench.machine.host import is_here
    from attnbench.planning.plan import steps_of
    from attnbench.report.documents.advise import document
    from attnbench.store.runs import load_run

    if options["run"] is not None:
        if flags := [flag for name, flag in given().items() if name not in _OF_A_RUN]:
            raise UsageError(f"RUN is advice from what was measured; remove {', '.join(flags)}")
        run = found_run(options["run"], options["output"])
        here = is_here(run.shared(run.environments))
        raise SystemExit(show(document(run, here=here), options))
    request = _request(options)
    with AdviceDisplay(quiet=options["quiet"]) as display:
        try:
            path = follow(session.sweep(request), display.show)
        except (KeyboardInterrupt, EndedError):
            if display.path is not None:  # what is known so far
                display.close()
                show(document(load_run(display.path), interrupted=True), options)
            raise
    assert path is not None, "no dry run was asked for"
    run = load_run(path)
    if display.path is None:
        say(f"from {path}, measured on this machine; --budget 3m measures again", err=True)
    environment = run.shared(run.environments)
    asked = steps_of(request.sweeps, environment["device"], environment["threads"])
    raise SystemExit(show(document(run, asked), options))


def _request(options: dict[str, Any]) -> SweepRequest:
    from attnbench.execution.process import Settings
    from attnbench.execution.session import SweepRequest
    from attnbench.planning.advice import beside, kernels_alone
    from attnbench.planning.models import asked_sweeps
    from attnbench.planning.plan import Axes
    from attnbench.theory.choices import DEFAULT, WORDS

    axes = {name: options[name] for name in AXIS_FIELDS}
    own = {name: options[name] for name in ("model", "step", "tokens", "case", "cases")}
    axes["threads"] = options["threads"] and (options["threads"],)
    asked, left_out = asked_sweeps((Axes(),), axes, **own)
    sweeps, budget_s = kernels_alone(asked), options["budget_s"]
    main = [
        each.having(
            impls=dict.fromkeys((*(each.impls or WORDS), DEFAULT)), step=each.step or "call"
        )
        for each in sweeps
    ]
    layers: tuple[Axes, ...] = ()
    if own["model"] and not options["workload"]:
        workload = "decode" if own["step"] == "decode" else "layer"
        with contextlib.suppress(UsageError):  # a layer that has no case, as of latents
            layers, _ = asked_sweeps((), {**axes, "workload": workload, "impls": None}, **own)
    extra = [*beside(sweeps), *(a.having(impls=(DEFAULT,), count=0, step="") for a in layers)]
    return SweepRequest(
        sweeps=(*main, *extra),
        left_out=left_out,
        settings=Settings(
            device=options["device"], seed=options["seed"], ceilings="none", precision=1e-9,
            files=tuple(str(Path(file).resolve()) for file in options["files"]),
            max_time_s=budget_s, race_s=budget_s, kept=(DEFAULT,),
            reference_s=budget_s / 10,
        ),
        output=options["output"], name=options["name"], baseline=DEFAULT,
        max_total_time_s=budget_s, stored="budget_s" not in given(),
        options={
            "command": "advise", "budget_s": budget_s,
            **{name: str(v) if isinstance(v, Path) else v for name, v in {**own, **axes}.items()
               if v},
        },
    )  # fmt: skip

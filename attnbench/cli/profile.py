"""`attnbench profile`: where the time and the memory of a cell go; of two, what differs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnbench.cli.options import (
    AXIS_FIELDS,
    axes_options,
    command_options,
    device_option,
    found_run,
    given,
    impl_files,
    say,
    show,
    written,
)
from attnbench.errors import UsageError
from attnbench.schema.axes import KEYWORDS

if TYPE_CHECKING:
    from attnbench.execution.profiling import CaseOf, Subject
    from attnbench.schema.profile import Profile


_AXES = tuple(name for name in (*AXIS_FIELDS, "threads") if name != "impls")


@click.command()
@click.argument("impls", nargs=-1, required=True, metavar="IMPL [IMPL]")
@axes_options(without=("--impls",))
@impl_files("A Python file with implementations of yours.")
@device_option
@command_options("profile")
def profile(impls: tuple[str, ...], **options: Any) -> None:
    """Show where time and memory of a cell go.

    The cell is checked and timed, then traced in the same process. Shown are the ops or kernels
    with their self times, FLOPs, bytes, share of the machine's peak and allocations, and the time
    outside of them. The trace opens in Perfetto. Two implementations, or one in two environments,
    commits or files, are both profiled, then compared. Takes the flags of a sweep, one value each.
    Exits 1 if a result is incorrect.
    """
    from attnbench.execution.profiling import profile_subject
    from attnbench.store.folder import PROFILE, RunFolder

    if len(impls) > 2:
        raise UsageError(f"{len(impls)} implementations given; one is profiled, two are compared")
    case, settings, line = _case(impls[0], options)
    with (
        _subjects(impls, options, settings) as subjects,
        RunFolder.create(PROFILE, options["output"], options["name"]) as folder,
    ):
        made: list[tuple[Profile, Path]] = []
        for subject, letter in zip(subjects, "ab", strict=False):
            place = folder.path
            if len(subjects) > 1:
                (place := place / letter).mkdir()
            if sys.stderr.isatty():
                say(f"profiling {subject.label} …", err=True)
            made.append((profile_subject(subject, case, place), place))
    if line:  # the folder is complete by now, and stays even if nobody reads on
        say(line, err=options["as_json"] or options["format_"] != "text")
    _show(folder.path, made, options)


def _show(folder: Path, made: list[tuple[Profile, Path]], options: dict[str, Any]) -> None:
    """Print one profile, or the difference of two; write its page into their folder."""
    from attnbench.analysis.profiles import difference
    from attnbench.report.documents.profile import document

    found = difference(made[0][0], made[1][0]) if len(made) == 2 else None
    # Written first, also if nobody reads on.
    show(written(folder, document(made, found, options["top"])), options)


def _case(impl: str, options: dict[str, Any]) -> tuple[CaseOf, dict[str, Any], str]:
    """What makes the case, fields of the settings, and a line on where the case is from."""
    from attnbench.execution.profiling import case_of
    from attnbench.planning.plan import Axes

    flags = given()
    for name in _AXES:
        if name in flags and name != "workload" and len(options[name]) > 1:
            values = ",".join(map(str, options[name]))
            raise UsageError(f"{flags[name]} {values}: a profile is of one case; give one value")
    fields = {
        "device": options["device"],
        "files": tuple(str(Path(file).resolve()) for file in options["files"]),
        "seed": options["seed"],
    }
    if options["run"] is not None:
        return _stored(impl, options, fields)
    asked = {name: options[name] for name in _AXES if name in flags}
    return case_of(Axes(**asked), impl), fields, ""


def _stored(
    impl: str, options: dict[str, Any], fields: dict[str, Any]
) -> tuple[CaseOf, dict[str, Any], str]:
    """The case of a record of a run, and the files of that run unless some are given."""
    from attnbench.base.parameters import base_name
    from attnbench.theory.flags import case_flags

    run = found_run(options["run"], options["output"], warn=False)
    flags = given()
    wanted = {KEYWORDS[n].field: options[n][0] for n in flags if n in KEYWORDS}
    wanted |= {n: options[n] for n in ("workload", "device") if options[n] not in (None, "auto")}
    own = [r for r in run.records if impl in (r.cell.impl, base_name(r.cell.impl))]
    fitting = [
        record.cell.case
        for record in own
        if record.status == "ok"
        and all(record.cell.case.to_json()[field] == value for field, value in wanted.items())
    ]
    if not fitting:
        names = ", ".join(dict.fromkeys(record.cell.impl for record in run.records)) or "none"
        what = f"no ok record of {impl} that fits the flags" if own else f"no record of {impl}"
        raise UsageError(f"{run.path} (--from) has {what}; implementations in it: {names}")
    case = max(fitting, key=lambda case: case.seq_len)
    files = fields["files"] or run.files
    line = f"from {run.path}: {' '.join(case_flags(case))}"
    if len(fitting) > 1:
        line += f" (the largest n of {len(fitting)} that fit; flags choose among them)"
    return (lambda _: case), fields | {"files": files, "device": case.device}, line


@contextlib.contextmanager
def _subjects(
    impls: tuple[str, ...], options: dict[str, Any], fields: dict[str, Any]
) -> Iterator[list[Subject]]:
    """What to profile: each implementation, or one in each of two environments or commits."""
    from attnbench.execution.process import Settings
    from attnbench.execution.profiling import Subject
    from attnbench.versions.environments import find_environment, interpreter_of

    pythons, base = options["pythons"], options["base"]
    against = options["against"]
    pairs = (len(impls) == 2, len(pythons) == 2, base is not None, against is not None)
    if sum(pairs) > 1 or len(pythons) > 2:
        raise UsageError(
            "two profiles are compared: give two implementations, or one with two --python, with"
            " --base or with --against"
        )
    settings = Settings(**fields)
    with contextlib.ExitStack() as opened:
        subjects = [Subject(impl=impl, label=impl, settings=settings) for impl in impls]
        if base is not None:
            subjects = [_at_base(opened, subjects[0], base), subjects[0]]
        if against is not None:
            if not settings.files:
                raise UsageError(f"--against needs the new version of {against}: --impl FILE")
            old = replace(settings, files=(str(Path(against).resolve()),), replace=True)
            label = f"{impls[0]} of {against}"
            subjects = [Subject(impl=impls[0], label=label, settings=old), subjects[0]]
        environments = [find_environment(text) for text in pythons]
        lent = [opened.enter_context(interpreter_of(each)) for each in environments]
        if len(lent) == 1:
            subjects = [
                replace(each, settings=replace(each.settings, **lent[0]))  # type: ignore[arg-type]
                for each in subjects
            ]
        elif lent:
            subjects = [
                replace(
                    subjects[0],
                    label=f"{impls[0]}, {each.label}",
                    settings=replace(settings, **own),  # type: ignore[arg-type]
                )
                for each, own in zip(environments, lent, strict=True)
            ]
        yield subjects


def _at_base(opened: contextlib.ExitStack, subject: Subject, ref: str) -> Subject:
    """The subject with its files as they are at a commit, checked out in a temporary folder."""
    from attnbench.versions import git
    from attnbench.versions.git import checked_out

    if not subject.settings.files:
        raise UsageError("--base needs the file of the repository that is compared: --impl FILE")
    root = git.repository(Path.cwd())
    files = [Path(file) for file in subject.settings.files]
    for file in files:
        if not file.is_relative_to(root):
            raise UsageError(f"{file} (--impl) lies outside the repository {root} (--base)")
    tree = opened.enter_context(checked_out(root, commit := git.resolve(root, ref)))
    there = tuple(str(tree / file.relative_to(root)) for file in files)
    for missing in (Path(text) for text in there if not Path(text).is_file()):
        raise UsageError(f"{ref} (--base) has no {missing.relative_to(tree)} (--impl)")
    own = replace(subject.settings, files=there, replace=True, root=str(tree), other_root=str(root))
    return replace(subject, label=f"{subject.impl} at {ref} ({commit[:10]})", settings=own)

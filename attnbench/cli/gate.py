"""`attnbench gate`: is the working tree slower than another commit? Verdicts, and an exit code."""

from __future__ import annotations

import sys
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnbench.base.registry import require
from attnbench.base.units import counted
from attnbench.cli.options import (
    AXIS_FIELDS,
    NAMES,
    axes_options,
    command_options,
    given,
    impl_files,
    say,
    show,
    threads_option,
)
from attnbench.errors import AttnbenchError, ExitCode, StoreError, UsageError

if TYPE_CHECKING:
    from attnbench.cli.progress import GateDisplay
    from attnbench.gate.decide.data import Environment, GateRun
    from attnbench.gate.run.watched import Comparison
    from attnbench.store.folder import RunFolder

# The options that mean something beside --replay, which measures nothing.
_WITH_REPLAY = ("replay", "output", "name", "advisory", "quiet", "format_", "as_json")
# What the table of pyproject.toml may hold beside the axes.
_SETTINGS = ("files", "base", "threshold", "budget_s", "growth", "threads", "device")


@click.command()
@command_options(
    "gate",
    axes=axes_options(seq_lens="128..1024"),
    impl=impl_files("A file of the repository whose implementations are watched."),
    threads=threads_option("1, the steadiest; on a GPU torch's default"),
)
def gate(**options: Any) -> None:
    """Compare your code with a commit, two environments, or two files.

    Correctness, FLOPs and memory are compared first, then time. The base is checked out in a
    temporary folder (TMPDIR), the candidate is the working tree as it is. Both versions are
    measured by this installation, interleaved, in rounds of fresh processes. What to watch stands
    in pyproject.toml, [tool.attnbench.gate], under the names of the options, or in the options
    themselves.

    Two environments (--python twice) run the same code, unless --base is given, too: naive and
    sdpa, the implementations in --impls, or those of your files.

    Slowdowns at or above --threshold are detected; identical code is called slower in at most 1 %
    of runs. Exits 1 if a cell is incorrect, larger or slower, 3 if a verdict is inconclusive, 4 if
    the machine was too noisy to be trusted, 2 if nothing could be compared, else 0.
    """
    typed = given()
    others = [flag for name, flag in typed.items() if name not in _WITH_REPLAY]
    if "replay" in typed and others:
        raise UsageError(f"--replay decides again from what is stored; remove {', '.join(others)}")
    if "against" in typed and (others := [typed[n] for n in ("base", "pythons") if n in typed]):
        raise UsageError(f"--against compares two files; remove {' and '.join(others)}")
    try:
        code = (replay if "replay" in typed else compare)(options)
    except AttnbenchError as err:
        if not options["advisory"] or isinstance(err, UsageError):
            raise
        say(f"Error: {err}", err=True)
        code = err.exit_code
    if options["advisory"] and code:
        say(f"advisory: exit code {int(code)} was changed to 0 (--advisory)", err=True)
    elif code:
        raise SystemExit(int(code))


def compare(options: dict[str, Any]) -> ExitCode:
    """Two versions, environments or files; the exit code that says what was found.

    Raises:
        UsageError: not two environments, or what they are compared by cannot be right.
    """
    from attnbench.cli.progress import GateDisplay
    from attnbench.store.folder import GATE, RunFolder
    from attnbench.versions.environments import find_environment

    pythons, environments = options["pythons"], None
    if len(pythons) not in (0, 2):
        raise UsageError(
            f"{counted(len(pythons), 'environment')} given (--python): two are compared, the"
            f" base's first; this one is {sys.executable}"
        )
    if pythons:
        if sys.stderr.isatty() and not options["quiet"]:
            say(f"asking {' and '.join(pythons)} for their torch", err=True)
        environments = find_environment(pythons[0]), find_environment(pythons[1])
    asked = _asked(options, environments)
    with GateDisplay(quiet=options["quiet"]) as display:
        for words in _introduced(asked):
            display.say(words)
        warn = partial(say, err=True)
        with RunFolder.create(GATE, options["output"], options["name"], warn) as folder:
            run = _measured(asked, options, display, folder)
            display.close()
            return _finish(run, folder.path, options)


def _asked(
    options: dict[str, Any], environments: tuple[Environment, Environment] | None
) -> Comparison:
    """What is compared: two versions, two environments, both, or two files."""
    from attnbench.gate.run.watched import comparison, of_built_in, of_files, surveyed, watched
    from attnbench.versions import git

    flags = {
        name: options[name]
        for name in (*AXIS_FIELDS, *_SETTINGS)
        if options[name] not in (None, ())
    }
    here = Path.cwd()
    if options["against"] is not None:
        return of_files(here, options["against"], flags)
    # Between environments no repository is needed: the code is the same.
    root = here if environments and not git.is_committed(here) else git.repository(here)
    table = read_table(root)
    if environments and not {"files"} & (flags.keys() | table.keys()):
        flags = {**table, **flags}
        flags["device"], known = surveyed(flags.get("device", "auto"), environments[1])
        root, flags = of_built_in(known, flags)
        table = {}
    found = watched(root, here, table, flags)
    return comparison(root, found, options["output"].resolve(), environments)


def _introduced(asked: Comparison) -> list[str]:
    """What is compared with what, before anything is measured."""
    both = asked.versions or [each.label for each in asked.environments or ()]
    base, candidate = list(both[:1]), list(both[1:])
    if asked.base:
        base.append(f"{asked.base.ref} at {asked.base.commit[:10]}, {asked.base.words}")
        on_top = asked.changes or "nothing changed"
        candidate.append(f"the working tree at {(asked.head or '')[:10]}, {on_top}")
    return [f"base: {'; '.join(base)}", f"candidate: {'; '.join(candidate)}"]


def read_table(root: Path) -> dict[str, Any]:
    """The table of pyproject.toml by field, its values read as those of the options.

    Raises:
        UsageError: the file or the table is damaged; a key or value that cannot be right.
    """
    file = root / "pyproject.toml"
    try:
        table: Any = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for name in ("tool", "attnbench", "gate"):
            table = dict(table.get(name, {}))
        rows = [_read(dict(row), AXIS_FIELDS) for row in table.pop("sweeps", ())]
        return _read(table, (*_SETTINGS, *AXIS_FIELDS)) | {"sweeps": rows}
    except click.ClickException as err:
        raise UsageError(f"{file} [tool.attnbench.gate]: {err.format_message()}") from err
    except (OSError, ValueError, TypeError, AttributeError) as err:
        raise UsageError(f"[tool.attnbench.gate] cannot be read from {file} ({err})") from err


def _read(table: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Lists as if joined by commas."""
    options = {o.opts[0].removeprefix("--"): o for o in gate.params if o.name in names}
    if "impl" in options:
        options["files"] = options["impl"]  # a list of them reads better so
    found: dict[str, Any] = {}
    for key, value in table.items():
        require("key", [key], options, "pyproject.toml [tool.attnbench.gate]")
        option = options[key]
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        kind = NAMES if option.name == "files" else option.type
        found[str(option.name)] = kind.convert(text, option, None)
    return found


def _measured(
    asked: Comparison, options: dict[str, Any], display: GateDisplay, folder: RunFolder
) -> GateRun:
    from attnbench.execution.events import follow
    from attnbench.execution.process import Settings
    from attnbench.gate.decide.stored import keep_round
    from attnbench.gate.run.measuring import run_gate
    from attnbench.gate.run.watched import surveyed
    from attnbench.versions.git import checked_out

    device = asked.watched.device
    if device == "auto":
        device, _ = surveyed(device, asked.environments and asked.environments[1])
    settings = Settings(device=device, seed=options["seed"], timeout_s=options["timeout"])
    typed = {flag: options[name] for name, flag in given().items()}
    typed |= {flag: str(value) for flag, value in typed.items() if isinstance(value, Path)}
    commit = asked.base and asked.base.commit
    with checked_out(asked.root, commit) if commit else nullcontext(asked.root) as tree:
        for file in asked.missing(tree):
            display.warned(f"the base has no {file}: what is in it cannot be compared")
        request = asked.request(tree, settings, typed)
        keep = partial(keep_round, folder)
        # What another torch computes does not end a run that asks how fast it is.
        keep_going = options["keep_going"] or asked.environments is not None
        request = replace(request, keep=keep, keep_going=keep_going)
        return follow(run_gate(request), display.show)


def replay(options: dict[str, Any]) -> ExitCode:
    """A stored run, decided again; files are written where a name or folder was given for them."""
    from attnbench.gate.decide.stored import load_gate
    from attnbench.store.folder import GATE, RunFolder

    run = load_gate(Path(options["replay"]), options["output"])
    name = options["name"]
    made = RunFolder.create(GATE, options["output"], name) if name else nullcontext()
    with made as folder:
        return _finish(run, folder.path if folder else None, options)


def _finish(run: GateRun, folder: Path | None, options: dict[str, Any]) -> ExitCode:
    """Decide, write all files, and print; what cannot be written hides no verdict."""
    from attnbench.gate.decide.verdict import decide
    from attnbench.report.documents.gate import document
    from attnbench.report.files import write_gate_files

    outcome = decide(run)
    found, failure = document(run, outcome), None
    if folder is not None:
        try:
            found, warnings = write_gate_files(folder, run, outcome)
            for warning in warnings:
                say(f"Warning: {warning}", err=True)
        except StoreError as err:
            failure = err
    if not options["quiet"] or options["as_json"] or options["format_"] != "text":
        show(found, options)
    elif folder is not None:
        click.echo(folder)
    if failure is not None:
        raise failure
    return ExitCode(found.exit_code)

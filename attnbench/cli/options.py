"""Options that several commands share: each is declared once, with the types that read lists."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from attnbench.base import units
from attnbench.base.jsontext import plain
from attnbench.errors import AttnbenchError, ExitCode, UsageError
from attnbench.schema.axes import AXES, KEYWORDS, READ

Command = Callable[..., Any]
Option = Callable[[Command], Command]

if TYPE_CHECKING:
    from attnbench.report.document import Document
    from attnbench.store.runs import Run

    ParamType = click.ParamType[Any]
else:  # generic in click's stubs and latest releases, but not in the 8.1 we still accept
    ParamType = click.ParamType


def wrapped(text: str, *, err: bool = False, hang: int = 2) -> str:
    """A line for people, broken between words where it is shown and the place is too narrow.

    What goes on in another line hangs by so many blanks.
    """
    stream = sys.stderr if err else sys.stdout
    if stream is None or not (stream.isatty() or "COLUMNS" in os.environ):  # None: it is closed
        return text
    return units.filled(text, shutil.get_terminal_size().columns, hang)


def say(text: str, *, err: bool = False, fg: str | None = None, hang: int = 2) -> None:
    """Print a line for people; what is to be copied, such as a command, is printed by click."""
    try:
        click.secho(wrapped(plain(text), err=err, hang=hang), err=err, fg=fg)
    except OSError:
        if not err:
            raise
        silence(sys.stderr)


def found_run(text: str, output: Path, *, warn: bool = True) -> Run:
    """Find and load a run; one that is unfinished is said to be that on standard error."""
    from attnbench.store.folder import SWEEP, RunFolder
    from attnbench.store.runs import load_run

    run = load_run(RunFolder.find(text, output, SWEEP).path)
    if warn and run.unfinished:
        say(run.unfinished, err=True)
    return run


def show(document: Document, options: Mapping[str, Any] = {}) -> int:
    """Print a document in the format of the options; return its exit code.

    Raises:
        UsageError: it is not to be had in that, or two formats are asked for.
    """
    from attnbench.report.render import rendered

    format_ = options.get("format_", "text")
    if options.get("as_json"):
        if format_ not in ("text", "json"):
            raise UsageError(f"--json is short for --format json; drop it, or --format {format_}")
        format_ = "json"
    click.echo(rendered(document, format_), nl=False)
    return int(document.exit_code)


def written(
    folder: Path, document: Document, formats: Sequence[str] = ("markdown", "html")
) -> Document:
    """Write a document into a folder; return it with the path of its page first."""
    from attnbench.report.files import write_files

    document, warnings = write_files(folder, document, formats)
    for warning in warnings:
        say(f"Warning: {warning}", err=True)
    return document


def silence(stream: Any) -> None:
    """Let what is still written to a stream go nowhere: nobody reads it, or its disk is full.

    What is left in its buffer would otherwise raise at exit, and change the exit code.
    """
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class OneLineError(click.ClickException):
    """A problem the user can act on, as one line: the fact, the flag, the valid values."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = int(exit_code)  # type: ignore[misc]  # click has one for the class

    def show(self, file: Any = None) -> None:
        """Print it, broken between words on a narrow terminal."""
        say(f"Error: {self.format_message()}", err=True)


class _Parsed(ParamType):
    """A value read by `parse`; errors name the flag and end with exit code 2."""

    def __init__(self, name: str, parse: Callable[[str, str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            found = self._parse(value, param.opts[0] if param else "")
        except AttnbenchError as err:
            raise OneLineError(str(err)) from err
        return tuple(found) if isinstance(found, list) else found


class _Path(click.Path):
    """A path; one that no file can have, with a NUL or too long, is wrong and no defect of ours."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            os.lstat(value)
        except (OSError, ValueError) as err:
            if getattr(err, "errno", None) in (None, errno.ENAMETOOLONG):
                self.fail(f"{str(value)!r:.60}: {getattr(err, 'strerror', err)}.", param, ctx)
        return super().convert(value, param, ctx)


class _Run(click.types.StringParamType):
    """A run, for --replay a gate's, by folder or name: a shell completes what --output has."""

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        from attnbench.store.folder import GATE, NAME, RECENT, SWEEP

        names, file = list(RECENT), (GATE if param.name == "replay" else SWEEP).file
        with contextlib.suppress(OSError, ValueError):
            found = (ctx.params.get("output") or Path("results")).glob(f"*/{file}")
            names += sorted(path.parent.name for path in found)
        fitting = [name for name in names if name.startswith(incomplete) and NAME.fullmatch(name)]
        return [CompletionItem(incomplete, type="file"), *map(CompletionItem, fitting)]


def _parse_device(text: str, flag: str) -> str:
    known = ("auto", "cpu", "cuda")
    if text not in known:
        hint = "; CUDA_VISIBLE_DEVICES chooses among several" if text.startswith("cuda:") else ""
        raise UsageError(f"{flag} {text}: one of {', '.join(known)}{hint}")
    return text


PATH = _Path(path_type=Path)
POSITIVE = _Parsed("number", units.parse_positive)
DEVICE = _Parsed("[auto|cpu|cuda]", _parse_device)
SHARE = _Parsed("share", units.parse_share)
DURATION = _Parsed("time", units.parse_duration)
SHARD = _Parsed("i/n", units.parse_shard)
RUN = _Run()


def given() -> dict[str, str]:
    """The options that stand on the command line: parameter names to flags."""
    context = click.get_current_context()
    return {
        str(option.name): option.opts[0]
        for option in context.command.params
        if context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    }


_TABLE: dict[str, dict[str, list[Any]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)
_KINDS = {kind: _Parsed(kind, read) for kind, read in READ.items()} | {
    "path": PATH, "positive": POSITIVE, "device": DEVICE, "share": SHARE, "duration": DURATION,
    "growth": _Parsed("share", units.parse_growth),
    "shard": SHARD, "run": RUN, "inches": click.FloatRange(1.5, 20.0),
}  # fmt: skip
SIZES, NAMES = _KINDS["sizes"], _KINDS["names"]


def _option(name: str, kind: str, text: str, more: dict[str, Any] | None = None) -> Option:
    """A row of `options.toml` as click has it."""
    options: dict[str, Any] = {"show_default": True} if more and "default" in more else {}
    if kind in _KINDS:
        options["type"] = _KINDS[kind]
    elif kind == "flag":
        options["is_flag"] = True
    elif "|" in kind:
        options["type"] = click.Choice(kind.split("|"))
    elif ".." in kind:
        least, most = map(int, kind.split(".."))
        options["type"] = click.IntRange(least, most)
    elif kind:
        options["metavar"] = kind
    return click.option(*name.split(), help=text, **options | (more or {}))


def command_options(command: str, **shared: Option) -> Option:
    """The options of a command in their order; `shared` are those that its rows only name."""
    return _together(
        (_SHARED | shared)[name] if not row else _option(name, *row)
        for name, row in _TABLE[command].items()
    )


def _together(options: Iterable[Option]) -> Option:
    listed = list(options)[::-1]

    def add(command: Command) -> Command:
        for option in listed:
            command = option(command)
        return command

    return add


def impl_files(
    text: str = "A Python file with your implementations: all, unless --impls names some of them.",
) -> Option:
    """`--impl FILE`, as often as wanted; one named twice counts once."""
    return click.option(
        "--impl", "files", multiple=True, metavar="FILE",
        help=f"{text} Repeatable: a name that a.py and b.py both have becomes a:NAME and b:NAME.",
        callback=lambda _context, _option, files: tuple(dict.fromkeys(files)),
    )  # fmt: skip


def threads_option(default: str = "torch's default", before: str = "") -> Option:
    """`--threads`; `default` is shown in help."""
    return click.option(
        "--threads", type=click.IntRange(min=1, max=1024), help=f"{before}CPU threads [{default}]."
    )


_SHARED = {name.split()[0][2:]: _option(name, *row) for name, row in _TABLE["shared"].items()}
device_option, seed_option, output_option, baseline_option, *_ = _SHARED.values()


def run_argument(command: Command) -> Command:
    """RUN: a folder, a name, `latest` or `previous`."""
    return output_option(click.argument("run", type=RUN, default="latest")(command))


_AXES = [axis for axis in KEYWORDS.values() if axis.help]  # commands have --threads of their own
AXIS_FIELDS = ("workload", *(axis.keyword for axis in _AXES), "impls")


def axes_options(seq_lens: str = "512", without: tuple[str, ...] = ()) -> Option:
    """`--workload`, and an option for each axis; `seq_lens` is their default as shown in help.

    The flags of `without` are left out.
    """
    workload, impls = _TABLE["axes"].items()
    rows = {axis.flag: [axis.kind, axis.shown()] for axis in _AXES}
    rows["--seq-lens"] = ["sizes", AXES["seq_len"].shown(seq_lens)]
    every = dict([workload, *rows.items(), impls])
    return _together(_option(flag, *row) for flag, row in every.items() if flag not in without)

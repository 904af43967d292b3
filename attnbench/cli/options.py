"""Options that several commands share, and the parsing of lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from attnbench.base.lists import parse_names, parse_numbers, parse_sizes
from attnbench.errors import AttnbenchError, ExitCode

Command = Callable[..., Any]

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:  # generic in click's stubs and latest releases, but not in the 8.1 we still accept
    ParamType = click.ParamType


class _List(ParamType):
    """A comma list read by `parse`; errors name the flag and end with exit code 2."""

    def __init__(self, name: str, parse: Callable[[str, str], list[Any]]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        flag = param.opts[0] if param else ""
        try:
            return tuple(self._parse(value, flag))
        except AttnbenchError as err:
            raise OneLineError(str(err)) from err


class OneLineError(click.ClickException):
    """A problem the user can act on, as one line: the fact, the flag, the valid values."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = int(exit_code)  # type: ignore[misc]  # click has one for the class


class _Positive(ParamType):
    """A number above 0; `nan` and `inf` parse as floats, but bound nothing and are no JSON."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            self.fail(f"{value!r} is not a number above 0.", param, ctx)
        return number


def given() -> dict[str, str]:
    """The options that stand on the command line: parameter names to flags."""
    context = click.get_current_context()
    return {
        str(option.name): option.opts[0]
        for option in context.command.params
        if context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    }


POSITIVE = _Positive()
SIZES = _List("sizes", parse_sizes)
NAMES = _List("names", parse_names)
PERCENTS = _List("percents", parse_numbers)


def impl_files(command: Command) -> Command:
    """`--impl FILE`, as often as wanted."""
    return click.option(
        "--impl",
        "files",
        multiple=True,
        metavar="FILE",
        help="A Python file with implementations of yours; they join the others. Repeatable.",
    )(command)


def device_option(command: Command) -> Command:
    """`--device`."""
    return click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="Where to run; auto takes a GPU where there is one.",
    )(command)


def seed_option(command: Command) -> Command:
    """`--seed`: what torch's generators take, on every device."""
    return click.option(
        "--seed",
        type=click.IntRange(min=0, max=2**32 - 1),
        default=0,
        show_default=True,
        help="Of inputs.",
    )(command)


def output_option(command: Command) -> Command:
    """`--output DIR`: where runs live."""
    return click.option(
        "--output",
        type=click.Path(path_type=Path, file_okay=True),
        default=Path("results"),
        show_default=True,
        metavar="DIR",
        help="The folder that holds the runs.",
    )(command)


def run_argument(command: Command) -> Command:
    """RUN: a folder, a name, or `latest`."""
    return output_option(click.argument("run", default="latest")(command))

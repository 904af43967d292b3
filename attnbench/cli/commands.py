"""The group of commands, and how errors end: one line, the right exit code, no traceback."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

import click

from attnbench.base.signals import ENDING, end, handled
from attnbench.cli.advise import advise
from attnbench.cli.capture import capture
from attnbench.cli.check import check
from attnbench.cli.doctor import doctor
from attnbench.cli.gate import gate
from attnbench.cli.options import OneLineError, silence
from attnbench.cli.profile import profile
from attnbench.cli.runs import compare, docs, export, history, list_, merge, report
from attnbench.cli.sweep import sweep
from attnbench.cli.use import use
from attnbench.cli.verdicts import claims, verify
from attnbench.errors import AttnbenchError, ExitCode, UnknownNameError
from attnbench.planning.lookup import explained
from attnbench.version import __version__

_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())  # since click 8.2
_DATA = ("docs", "export", "list", "report")  # what they print may be cut short


class Commands(click.Group):
    """Ends every error as one line with its exit code: our own, and click's usage errors."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments; a wrong one is one line."""
        for stream in (sys.stdout, sys.stderr):  # a file's name need not be UTF-8
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        with _one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; whatever it raises becomes one line and an exit code."""
        try:
            with _one_line(), handled(ENDING, end):
                result = super().invoke(ctx)
                if sys.stdout is not None:  # it may be closed
                    sys.stdout.flush()  # what cannot be written is noticed here, not at exit
                return result
        except BrokenPipeError:  # `attnbench export RUN | head`
            silence(sys.stdout)
            # Where the exit code is a verdict, none was given: as a shell reports SIGPIPE.
            ctx.exit(ExitCode.OK if ctx.invoked_subcommand in _DATA else ExitCode.NO_READER)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            ctx.exit(ExitCode.INTERRUPTED)
        except Exception as err:
            if isinstance(err, OSError) and err.errno == errno.ENOSPC:
                silence(sys.stdout)
                raise OneLineError(f"cannot write the output ({err.strerror})") from err
            raise _defect(err) from err


def _defect(err: Exception) -> click.ClickException:
    """One line on an unexpected error; its traceback goes to a file."""
    where = "no file for its traceback could be written"
    with contextlib.suppress(OSError):
        descriptor, file = tempfile.mkstemp(prefix="attnbench-traceback-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as out:
            out.write(f"attnbench {__version__}, arguments {sys.argv[1:]}\n")
            out.writelines(traceback.format_exception(err))
        where = f"please report it, and attach {file}"
    what = traceback.format_exception_only(err)[-1].strip()[:200]
    return OneLineError(f"internal error: {what}; {where}", ExitCode.DEFECT)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except AttnbenchError as err:
        text = explained(err) if isinstance(err, UnknownNameError) else str(err)
        raise OneLineError(text, err.exit_code) from err
    except click.UsageError as err:
        if isinstance(err, _NO_ARGUMENTS):
            raise  # `attnbench` alone: the help is the answer
        raise OneLineError(err.format_message()) from err


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="attnbench")
def main() -> None:
    """Benchmark and profile attention implementations.

    Every cell is checked against a float64 reference before it is timed. Failures are rows too,
    with the reason.
    """


_ALL = (
    list_, capture, advise, use, check, sweep, merge, report, export, verify, claims, compare, gate,
    profile, history, doctor, docs,
)  # fmt: skip
for command in _ALL:
    main.add_command(command)

"""Exceptions that become one line on the terminal, and the exit codes of every command."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process returns (README, "Commands")."""

    OK = 0
    FINDING = 1  # incorrect, refuted, regressed, larger
    USAGE = 2  # wrong usage, nothing measured, or not comparable
    INCONCLUSIVE = 3
    ENVIRONMENT = 4  # environment not to be trusted
    DEFECT = 70  # an unexpected error in attnbench itself; EX_SOFTWARE of sysexits.h
    NO_READER = 141  # as a shell reports a command that writes to a closed pipe
    INTERRUPTED = 130  # as a shell reports a command that Ctrl-C ended


class AttnbenchError(Exception):
    """A problem the user can act on: printed as one line, without a traceback.

    The message states the fact, names the flag, and gives the valid values or the next command.
    """

    exit_code = ExitCode.USAGE


class UsageError(AttnbenchError):
    """The command line, or a file it names, asks for something that makes no sense."""


class UnknownNameError(UsageError):
    """A name that no registry knows; the message suggests the nearest one."""

    asked: tuple[str, str, list[str], str] | None = None  # the arguments of `registry.unknown`


class StoreError(UsageError):
    """A run folder that cannot be written, is taken, does not exist or is not one of ours."""


class DispatchError(AttnbenchError):
    """An implementation that `attnbench.use` called for a case raised, or was wrong."""


class WorkerError(AttnbenchError):
    """A worker process could not do what the runner needs before any cell can be measured."""

    exit_code = ExitCode.ENVIRONMENT


# A flag, and the blank before its value: a number, in quotes or capitals, or the last word.
_FLAG = re.compile(r"""(?<![\w-])--([a-z][a-z\d-]*)( (?=[\dA-Z'"]|[^\s,;:)]+(?:[,;:)]|$)))?""")


@contextlib.contextmanager
def in_keywords(words: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Let errors name keywords, those of `words()`: `seq_lens=…`, where they name `--seq-lens`."""
    try:
        yield
    except AttnbenchError as err:
        known = words()

        def keyword(flag: re.Match[str]) -> str:
            word = known.get(flag[1].replace("-", "_"))
            return f"{word}={'' if flag[2] else '…'}" if word else flag[0]

        err.args = (_FLAG.sub(keyword, str(err)),)
        raise

"""The server of one round: imports torch once, then forks one process a variant from that state.

Usage: python -m attnbench.gate.server CONFIG, where CONFIG is a `RoundConfig` as JSON. All
processes of a round share the address layout of this one, which is drawn anew for each round; the
memory they compute in is their own. How each ended is reported, a line each. A single variant is
not forked.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc

gc.disable()  # imports leave no garbage: a fifth of the time of importing torch

import os
import sys

from attnbench.base.jsontext import decode, encode
from attnbench.gate.protocol import ProcessEnded, RoundConfig, VariantConfig
from attnbench.gate.server.variant import VariantProcess
from attnbench.machine.facts import limit_memory
from attnbench.machine.state import remember, settle
from attnbench.worker.forking import end_with_parent


def main() -> None:
    """Start the processes and wait until the last has ended."""
    config = decode(sys.argv[1], RoundConfig)
    sys.dont_write_bytecode = True  # the folders of both versions stay as they are
    end_with_parent()
    settle(config.threads)
    gc.freeze()  # what was imported stays: a collection would copy it into each process
    gc.enable()
    if len(config.variants) == 1:
        _serve(config, 0)
        return
    alive = {}
    for index, variant in enumerate(config.variants):
        process = os.fork()
        if process == 0:
            end_with_parent()
            os.close(config.report.write)
            _serve(config, index)
            os._exit(0)
        alive[process] = variant.variant
        _close(variant)
    while alive:
        process, status = os.wait()
        if process in alive:
            ended = ProcessEnded(alive.pop(process), os.waitstatus_to_exitcode(status))
            os.write(config.report.write, encode(ended) + b"\n")


def _serve(config: RoundConfig, index: int) -> None:
    for other in config.variants[index + 1 :]:
        _close(other)
    mine = config.variants[index]
    for stream in (1, 2):  # whatever implementations print
        os.dup2(mine.ends.stderr, stream)
    if config.device == "cpu":
        limit_memory()
    remember(config.threads)
    try:
        VariantProcess(config, mine).serve()
    except BrokenPipeError:
        pass  # the run was given up
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def _close(variant: VariantConfig) -> None:
    os.close(variant.ends.read)
    os.close(variant.ends.write)


if __name__ == "__main__":
    main()

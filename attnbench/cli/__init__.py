"""The command line: parse, call, print. Heavy imports happen inside the commands."""

from attnbench.cli.main import main

__all__ = ["main"]

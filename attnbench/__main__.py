"""`python -m attnbench`: the command line, also from a source tree that is not installed."""

from attnbench.cli import main

if __name__ == "__main__":
    main(prog_name="attnbench")

"""`python -m attnbench`: the command line, also from a source tree that is not installed."""

import importlib.util
import sys

# As the dependencies in pyproject.toml are imported. Of what is not here the rest can do without:
# sensors of a GPU (pynvml), Parquet (pyarrow), and change points (ruptures).
NEEDED = (
    "click", "jinja2", "matplotlib", "msgspec", "numpy", "pandas", "psutil", "rich", "scipy",
    "torch",
)  # fmt: skip


def main() -> None:
    """Say in one line what this system or this Python lacks, or run the command line."""
    if lacking := _missing("fcntl", "resource"):
        why = f"attnbench needs Linux (WSL 2 on Windows): this Python has no {', '.join(lacking)}"
    elif lacking := _missing(*NEEDED):
        why = (
            f"{sys.executable} lacks {', '.join(lacking)}; install what is missing with"
            f" `{sys.executable} -m pip install {' '.join(lacking)}`, or use another Python"
        )
    else:
        from attnbench.cli.commands import main

        main(prog_name="attnbench")
        return
    print(f"Error: {why}", file=sys.stderr)
    sys.exit(2)


def _missing(*names: str) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


if __name__ == "__main__":
    main()

"""Finds implementations: the built-in ones, installed entry points, and a user's own files."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from attnbench.api import IMPLEMENTATIONS
from attnbench.errors import AttnbenchError, UsageError

# The top-level folder impls/ is installed under this name (pyproject: package-dir), so that a
# user's own package called `impls` never collides with it.
BUILT_IN = "attnbench_impls"
ENTRY_POINTS = "attnbench.impls"


def load_built_in() -> None:
    """Import every built-in implementation file, once."""
    package = _built_in_package()
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        importlib.import_module(f"{BUILT_IN}.{module.name}")


def _built_in_package() -> ModuleType:
    """The installed package, or the folder impls/ of a source tree that is not installed."""
    if BUILT_IN in sys.modules or importlib.util.find_spec(BUILT_IN) is not None:
        return importlib.import_module(BUILT_IN)
    folder = Path(__file__).resolve().parent.parent / "impls"
    spec = importlib.util.spec_from_file_location(
        BUILT_IN, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not folder.is_dir():
        raise UsageError("the built-in implementations are missing; install attnbench again")
    package = importlib.util.module_from_spec(spec)
    sys.modules[BUILT_IN] = package
    spec.loader.exec_module(package)
    return package


def load_entry_points() -> list[str]:
    """Import what installed packages offer; return one line for each that failed.

    Someone else's broken package must not stop a sweep that does not ask for it.
    """
    failures = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
        try:
            point.load()
        except (Exception, SystemExit) as err:
            failures.append(f"entry point {point.name} ({point.value}): {_line(err)}")
    return failures


def load_file(path: str) -> list[str]:
    """Import a user's file and return the names it registered.

    Raises:
        UsageError: the file is missing, does not import, registers nothing or a taken name.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"no file {path} (--impl)")
    before = set(IMPLEMENTATIONS.names())
    # As `python file.py` does, so that the file can import its neighbours.
    sys.path.insert(0, str(file.parent))
    name = f"attnbench_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file (--impl)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as err:
        for half_made in set(IMPLEMENTATIONS.names()) - before:
            IMPLEMENTATIONS.remove(half_made)
        if isinstance(err, AttnbenchError):
            raise UsageError(f"{path} (--impl): {err}") from err
        raise UsageError(f"{path} does not import (--impl): {_line(err)}") from err
    registered = [found for found in IMPLEMENTATIONS.names() if found not in before]
    if not registered:
        raise UsageError(
            f"{path} registers no implementation (--impl); decorate a function with"
            ' @attention("name") from attnbench.api'
        )
    return registered


def _line(err: BaseException) -> str:
    text = " ".join(str(err).split())
    return f"{type(err).__name__}: {text}"[:300]

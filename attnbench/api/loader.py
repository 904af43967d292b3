"""Finds implementations: the built-in ones, installed entry points, and a user's own files."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from attnbench.api import IMPLEMENTATIONS, Implementation
from attnbench.errors import AttnbenchError, UsageError

# The top-level folder impls/ is installed under this name (pyproject: package-dir), so that a
# user's own package called `impls` never collides with it.
BUILT_IN = "attnbench_impls"
ENTRY_POINTS = "attnbench.impls"
# What measures belongs to neither version, even where it is installed from one of them.
_HARNESS = ("attnbench", BUILT_IN, "__main__", "__mp_main__")
_INSTALLED = {"site-packages", "dist-packages"}  # the folders of packages in an environment
# What users' files have registered, and which file: all else is installed, and can be replaced.
_OF_FILES: dict[str, tuple[Path, Implementation]] = {}


def load_built_in() -> None:
    """Import every built-in implementation file, once."""
    if BUILT_IN not in sys.modules and importlib.util.find_spec(BUILT_IN) is None:
        # Not installed: the folder impls/ of a source tree stands for the package.
        folder = Path(__file__).resolve().parents[2] / "impls"
        if not folder.is_dir():
            raise UsageError("the built-in implementations are missing; install attnbench again")
        _import(BUILT_IN, folder / "__init__.py", [str(folder)])
    package = importlib.import_module(BUILT_IN)
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        importlib.import_module(f"{BUILT_IN}.{module.name}")


def _import(name: str, file: Path, folders: list[str] | None = None) -> None:
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise UsageError("it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


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


def load_file(path: str, *, replace: bool = False) -> list[str]:
    """Import a user's file, once, and return its implementations as they are called now.

    A name that several files register gets that of its file in front: `a:mine` and `b:mine`. With
    `replace` they may be those of installed ones, built-in or not, whose place they take.

    Raises:
        UsageError: the file is missing, does not import, registers nothing or a taken name.
    """
    file = Path(path).resolve()
    if not file.is_file():
        what = "is a folder: name its files" if file.is_dir() else "does not exist"
        raise UsageError(f"{path} {what} (--impl)")
    before = dict(IMPLEMENTATIONS.items())
    own = {name: of for name, (of, item) in _OF_FILES.items() if before.get(name) is item}
    if file in own.values():
        return [name for name, of in own.items() if of == file]
    whole = {name: f"{of}:{name.rpartition(':')[2]}" for name, of in own.items()}
    installed = before.keys() - own.keys() if replace else ()
    try:
        with IMPLEMENTATIONS.changed_as_one(replaceable=installed):
            IMPLEMENTATIONS.rename(whole)
            there = dict(IMPLEMENTATIONS.items())
            # As `python file.py` does, so that the file can import its neighbours.
            sys.path.insert(0, str(file.parent))
            module = f"attnbench_user_{file.stem}"
            # Another file of that name, in another folder, may be there already.
            _import(module if module not in sys.modules else f"{module}_{len(sys.modules)}", file)
            found = [n for n, item in IMPLEMENTATIONS.items() if there.get(n) is not item]
            full = {f"{file}:{name}": name for name in found}
            short = _shortened([*whole.values(), *full])
            IMPLEMENTATIONS.rename({full.get(old, old): new for old, new in short.items()})
    except AttnbenchError as err:
        raise UsageError(f"{path} (--impl): {err}") from err
    except (Exception, SystemExit) as err:
        raise UsageError(f"{path} does not import (--impl): {_line(err)}") from err
    if not found:
        raise UsageError(
            f"{path} registers no implementation (--impl); decorate a function with"
            ' @attention("name") from attnbench.api'
        )
    for old, new in short.items():
        _OF_FILES[new] = Path(old.rpartition(":")[0]), IMPLEMENTATIONS.get(new)
    return load_file(path)


def _shortened(names: list[str]) -> dict[str, str]:
    """For each `path:name` the name, or where several files have it the shortest unique end."""
    paths = {n: n.rpartition(":")[0].removesuffix(".py") for n in names}
    short = {}
    for name, path in paths.items():
        plain, parts = name.rpartition(":")[2], path.split("/")
        others = [paths[n] for n in names if n != name and n.rpartition(":")[2] == plain]
        tails = ("/".join(parts[-count:]) for count in range(1, len(parts) + 1))
        tail = next(t for t in tails if not any(path.endswith(f"/{t}") for path in others))
        short[name] = f"{tail}:{plain}" if others else plain
    return short


def load_side(files: Sequence[str], root: str, other_root: str | None = None) -> list[str]:
    """Import the files of one of two versions of a repository; return the names they register.

    For a process that serves this version alone: it works in `root`, leaves no bytecode there, and
    imports from there and from its `src` what would otherwise come from `other_root`, too. The
    names replace those of installed implementations.

    Raises:
        UsageError: as `load_file`; a file outside `root`, or that imports from `other_root`.
    """
    sys.dont_write_bytecode = True
    here = Path(root).resolve()
    other = Path(other_root).resolve() if other_root is not None else None
    os.chdir(here)
    # In place of the other version's folders: a package that is installed in editable mode, from
    # the working tree, is then the base's own where the base is loaded.
    entries = [str(folder) for folder in (here, here / "src") if folder.is_dir()]
    for entry in sys.path:
        if other is not None and _belongs(entry, other, here):
            entry = str(here / Path(entry).resolve().relative_to(other))
        entries.append(entry)
    sys.path[:] = list(dict.fromkeys(entries))
    importlib.invalidate_caches()
    for file in files:
        if not Path(file).resolve().is_relative_to(here):
            raise UsageError(f"{file} (--impl) is not in {root}, the version to be loaded")
        load_file(file, replace=True)
        if other is not None:
            refuse_other_version(file, here, other)
    return [name for file in files for name in load_file(file)]


def refuse_other_version(file: str, root: Path, other: Path) -> None:
    """See that no module of this process comes from the other version; `file` is named if one does.

    The harness and installed packages may lie there, as in a virtual environment in the repository.

    Raises:
        UsageError: one does: both versions would run the same code.
    """
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if not isinstance(source, str) or name.partition(".")[0] in _HARNESS:
            continue
        if _belongs(os.path.dirname(source), other, root):
            raise UsageError(
                f"{file} imports {name} from the other side ({source}), so that both would run"
                f" the same code; let it be found beside the file, in {root} or in {root / 'src'}"
            )


@cache  # thousands of modules lie in a few hundred folders
def _belongs(where: str, other: Path, root: Path) -> bool:
    """Whether a folder holds code of the other version, and is not of this one or installed."""
    folder = Path(where).resolve()
    if not folder.is_relative_to(other) or folder.is_relative_to(root):
        return False
    return not _is_library(folder.relative_to(other), folder)


def _is_library(inside: Path, folder: Path) -> bool:
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    return bool(set(inside.parts) & _INSTALLED) or folder.is_relative_to(standard)


def is_installed(file: Path) -> bool:
    """Whether a module's file is of the harness, an environment or the standard library."""
    own = Path(__file__).resolve().parents[1]
    return file.is_relative_to(own) or _is_library(file.parent, file.parent)


def _line(err: BaseException) -> str:
    return f"{type(err).__name__}: {' '.join(str(err).split())}"[:300]

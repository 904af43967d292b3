"""Environments to compare: interpreters with a torch of their own.

One needs CPython ≥ 3.11 and torch ≥ 2.4, and nothing of ours: attnbench, and the packages that it
speaks JSON and reads counters with, are lent to it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnbench.errors import UsageError, WorkerError
from attnbench.gate.decide.data import Environment
from attnbench.versions.git import temporary_folder

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 4)
_MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
_COMPILED = "msgspec"  # loads in the minor version of Python alone that it was built for
_LENT = ("attnbench", "attnbench_impls", "psutil", "pynvml", _COMPILED)
_PROBE_TIMEOUT_S = 180.0  # a torch that is imported for the first time reads gigabytes
_PROBE = f"""
import importlib.metadata, importlib.util, json, platform, sys
packages = {{}}
for found in importlib.metadata.distributions():
    packages.setdefault(found.metadata["Name"] or "?", found.version)
facts = {{
    "minor": sys.version_info[:2],
    "python": platform.python_version(),
    "implementation": platform.python_implementation(),
    "packages": packages,
    "has_compiled": importlib.util.find_spec("{_COMPILED}") is not None,
    "has_torch": importlib.util.find_spec("torch") is not None,
}}
try:
    import torch
    facts["torch"] = str(torch.__version__)
except BaseException as err:
    facts["failure"] = f"{{type(err).__name__}}: {{err}}"
print(json.dumps(facts))
"""


def find_environment(text: str) -> Environment:
    """The environment of an interpreter, or of a folder that has one as `bin/python`.

    Raises:
        UsageError: there is none, it does not run here, or lacks what measuring needs.
        WorkerError: it does not answer.
    """
    python = Path(text).expanduser()
    # Not resolved: a link to an interpreter is what makes a virtual environment.
    python = Path(os.path.abspath(python / "bin" / "python" if python.is_dir() else python))
    asked = f"--python {text}"
    facts = _probed(python, asked)
    least, least_torch = (".".join(map(str, each)) for each in (LEAST_PYTHON, LEAST_TORCH))
    if facts["implementation"] != "CPython" or tuple(facts["minor"]) < LEAST_PYTHON:
        why = f"{facts['implementation']} {facts['python']}, where CPython ≥ {least} is needed"
        raise UsageError(f"{asked}: {why}")
    if not facts["has_torch"]:
        raise UsageError(f"{asked}: it has no torch; install one: {python} -m pip install torch")
    if "torch" not in facts:
        why = " ".join(facts["failure"].split())[:300]
        raise UsageError(f"{asked}: its torch cannot be imported ({why})")
    release = re.match(r"(\d+)\.(\d+)", facts["torch"])
    if release is None or tuple(map(int, release.groups())) < LEAST_TORCH:
        raise UsageError(f"{asked}: torch {facts['torch']}, where torch ≥ {least_torch} is needed")
    if tuple(facts["minor"]) != sys.version_info[:2] and not facts["has_compiled"]:
        raise UsageError(
            f"{asked}: Python {facts['python']} cannot load the {_COMPILED} of this Python"
            f" {_MINOR}; give it its own: {python} -m pip install {_COMPILED}"
        )
    return Environment(
        name=text, python=str(python), python_version=facts["python"], torch=facts["torch"],
        packages=facts["packages"],
    )  # fmt: skip


def _probed(python: Path, asked: str) -> dict[str, Any]:
    # Not those that point a Python at this one's packages.
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    try:
        process = subprocess.run(
            [python, "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True,
            timeout=_PROBE_TIMEOUT_S, env=variables, start_new_session=True,
        )  # fmt: skip
        *_, last = process.stdout.decode(errors="replace").split("\n{")
        facts: dict[str, Any] = json.loads(last if last.startswith("{") else "{" + last)
    except subprocess.TimeoutExpired as err:
        words = f"{asked}: importing torch took over {_PROBE_TIMEOUT_S:g} s; is the machine busy?"
        raise WorkerError(words) from err
    except OSError as err:  # not there, not to be executed, of another architecture
        raise UsageError(f"{asked}: {python} cannot be run here ({err.strerror})") from err
    except ValueError as err:
        words = process.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        why = words or f"exit code {process.returncode}"
        raise UsageError(f"{asked}: {python} is not a Python that works here ({why})") from err
    return facts


def built_in_folder() -> Path:
    """Where the files of the built-in implementations lie."""
    spec = importlib.util.find_spec("attnbench_impls")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).resolve().parent
    return Path(__file__).resolve().parents[2] / "impls"  # a source tree that is not installed


@contextlib.contextmanager
def interpreter_of(environment: Environment | None) -> Iterator[dict[str, Any]]:
    """The fields of `Settings` by which processes run in an environment; none for our own.

    What is lent to it are links in a temporary folder, found before its own packages.

    Raises:
        UsageError: no temporary folder can be made.
    """
    if environment is None:
        yield {}
        return
    with temporary_folder() as folder:
        for name in _LENT:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                continue  # built-in implementations lie beside attnbench in a source tree
            if name == _COMPILED and not environment.python_version.startswith(f"{_MINOR}."):
                continue  # it has its own
            origin = Path(spec.origin)
            source = origin.parent if origin.name == "__init__.py" else origin
            (folder / (name if source.is_dir() else source.name)).symlink_to(source)
        yield {"python": environment.python, "lent": str(folder)}

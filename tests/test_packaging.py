"""The wheel: what is in it, and that it works without the source tree it was built from."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import synthetic

ROOT = Path(__file__).resolve().parent.parent
Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built offline from a copy of the sources, as `build/` in the tree would keep old files."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("attnbench", "impls", "docs"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-q", "-w", folder, source], check=True, timeout=120)
    (built,) = folder.glob("attnbench-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it; returns its site-packages.

    The dependencies come from the present environment, by one line in a .pth file: a folder so
    added has no .pth files read in turn, and an editable installation lives in one.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(home), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "-q", wheel], check=True, timeout=120)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return site


@pytest.fixture(scope="module")
def python(installed: Path) -> Python:
    """Run the environment's own Python, where nothing points to the source tree."""
    executable = installed.parents[2] / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(executable), *map(str, args)], cwd=cwd, env=clean, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    return run


def test_the_wheel_holds_every_source_file_and_no_compiled_one(wheel_files):
    def sources(folder: str, installed_as: str) -> set[str]:
        files = [file for file in (ROOT / folder).rglob("*") if file.is_file()]
        names = {file.relative_to(ROOT / folder).as_posix() for file in files}
        return {f"{installed_as}/{name}" for name in names if "__pycache__" not in name}

    wanted = sources("attnbench", "attnbench") | sources("impls", "attnbench_impls")
    wanted |= sources("docs", "attnbench/docs")
    assert {name for name in wheel_files if ".dist-info/" not in name} == wanted


def test_the_installed_package_is_the_one_in_the_wheel(python, installed, tmp_path):
    script = "import attnbench as a, attnbench_impls as i; print(a.__file__); print(i.__file__)"
    for file in python("-c", script, cwd=tmp_path).stdout.splitlines():
        assert Path(file).is_relative_to(installed)


def listed(python: Python, cwd: Path) -> tuple[list[dict[str, Any]], str]:
    """The implementations that `attnbench list` shows, and the warnings beside it."""
    ended = python("-m", "attnbench", "list", "--json", cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    tables = [part for of in json.loads(ended.stdout)["sections"] for part in of["parts"]]
    rows = [row for part in tables for row in part.get("table", ()) if "family" in row]
    return rows, ended.stderr


def test_every_implementation_is_found_also_beside_a_package_impls_of_the_users(
    python, installed, tmp_path, recorded_catalogue
):
    (tmp_path / "impls").mkdir()
    (tmp_path / "impls" / "__init__.py").write_text("raise RuntimeError('not for attnbench')")
    rows, _ = listed(python, tmp_path)
    names = {info.name for info in recorded_catalogue.implementations}
    assert {row["name"] for row in rows} == names
    for row in rows:
        assert row["file"].startswith("impls/")  # as in the repository, wherever it is installed


def test_the_script_runs(installed, tmp_path):
    script = installed.parents[2] / "bin" / "attnbench"
    shown = subprocess.run(
        [script, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("attnbench, version ")


def test_the_docs_are_printed_from_the_wheel_as_they_are(python, tmp_path):
    listed = python("-m", "attnbench", "docs", cwd=tmp_path).stdout.splitlines()
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert [line.split()[0] for line in listed] == [page.stem for page in pages]
    shown = python("-m", "attnbench", "docs", "gate", cwd=tmp_path).stdout
    assert shown == (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    ended = python("-m", "attnbench", "docs", "own-kernl", cwd=tmp_path)
    assert ended.returncode == 2
    assert "'own-kernl', did you mean 'own-kernel'?; known: advise, " in ended.stderr


def test_a_report_is_drawn_with_the_templates_in_the_wheel(python, tmp_path):
    run = synthetic.write_named(tmp_path, "one")
    ended = python("-m", "attnbench", "report", run, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "<style>" in (run / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def plugins(installed: Path) -> Any:
    """An installed package with one entry point that works and two that do not."""
    package = installed / "plugin.py"
    package.write_text(
        "from attnbench.api import attention\n"
        "@attention('plugged')\n"
        "def plugged(q, k, v, *, causal, scale): ...\n"
    )
    info = installed / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[attnbench.impls]\ngood = plugin\ngone = no_such_module\nexits = plugin_exits\n"
    )
    (installed / "plugin_exits.py").write_text("raise SystemExit('bye')")
    yield
    for file in (package, info / "METADATA", info / "entry_points.txt"):
        file.unlink()
    (installed / "plugin_exits.py").unlink()
    info.rmdir()


@pytest.mark.usefixtures("plugins")
def test_an_installed_entry_point_is_found_and_a_broken_one_only_warns(python, tmp_path):
    rows, warnings = listed(python, tmp_path)
    assert "plugged" in [row["name"] for row in rows]
    assert [line.partition(" (")[0] for line in warnings.splitlines()] == [
        "Warning: entry point exits",
        "Warning: entry point gone",
    ]


# What the pages print and this test leaves out, by what it needs beside the wheel.
LEFT_OUT = {
    "the source tree": """
        make bench
        make test
        make validate
        make validate PART=advise
        make validate PART=twins
        make validate PART=shares
        attnbench advise --budget 60s -- python docs/examples/llama_step.py
        make gpu OUT=dir
        . .venv/bin/activate
        pip install -e .
        pip install -c constraints.txt .
        pip install .
        make clean
        attnbench advise results/gpu-h200
        attnbench history results/history""",
    "a file of the reader's": """
        attnbench check --impl my_kernel.py --watch
        attnbench sweep --impl my_kernel.py --impls mine,sdpa
        attnbench gate --impl new.py --against old.py
        attnbench capture -- python my_model.py
        attnbench advise -- python my_model.py --batch 8
        attnbench use latest -- python my_model.py
        attnbench advise --seq-lens 512,2048 --masks causal --impl mine.py""",
    "a commit, or another environment": """
        attnbench gate
        attnbench gate --base main --impl path/in/repo.py
        attnbench gate --python old-venv --python new-venv
        pytest --attnbench-gate main""",
    "nothing: it removes what the others need": """
        pip uninstall attnbench
        rm -r ~/.cache/attnbench""",
    "two runs": """
        attnbench compare monday tuesday""",
    "minutes: no option makes it shorter": """
        attnbench verify --sweep""",
    "an argument: the command's name alone": """
        attnbench capture
        attnbench use
        attnbench compare
        attnbench history
        attnbench merge
        attnbench profile""",
}
# What makes a command end soon; the sweep that is named is made, as lines after it show that run.
APPENDED = {
    "advise": "--budget 15s",
    "check": "--impls naive --seq-lens 8",
    "named sweep": "--max-time 0.05",
    "profile": "--seq-lens 256",
    "sweep": "--dry-run",
}


def printed_commands() -> list[str]:
    """The command lines in README and in pages of docs/, in their order, each once."""
    lines: list[str] = []
    pages = ("advise", "platforms", "project", "troubleshooting")
    for page in ("README.md", *(f"docs/{name}.md" for name in pages)):
        text = (ROOT / page).read_text(encoding="utf-8")
        for block, inline in re.findall(r"```sh\n(.*?)```|```.*?```|`([^`]+)`", text, re.S):
            lines += [line.split(" #")[0].strip() for line in block.splitlines()]
            if re.match(r"(attnbench|eval|make|pip|pytest) ", inline):
                lines.append(" ".join(inline.split()))
    return list(dict.fromkeys(lines))


@pytest.mark.slow
def test_every_command_that_the_pages_print_works_where_the_wheel_is_installed(installed, tmp_path):
    left = {line.strip() for lines in LEFT_OUT.values() for line in lines.split("\n")} - {""}
    commands = printed_commands()
    assert left - set(commands) == set(), "left out, and on no page"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clean["PATH"] = f"{installed.parents[2] / 'bin'}{os.pathsep}{clean['PATH']}"
    failed = {}
    for line in [line for line in commands if line not in left]:
        name = re.sub(r"sweep .*--name \w+", "named sweep", line.removeprefix("attnbench "))
        extra = [more for start, more in APPENDED.items() if name.startswith(start)]
        ended = subprocess.run(
            ["bash", "-c", " ".join([line, *extra])], cwd=tmp_path, env=clean, capture_output=True,
            text=True, timeout=120, check=False,
        )  # fmt: skip
        # A machine that is too slow for so short a budget says so, and is no fault.
        slow = ended.returncode == 2 and re.search("--budget .*give at least", ended.stderr)
        crashed = "Traceback" in ended.stdout + ended.stderr
        if crashed or (ended.returncode not in (0, 1, 3, 4) and not slow):
            failed[line] = f"exit code {ended.returncode}: {ended.stderr[-500:]}"
    assert failed == {}

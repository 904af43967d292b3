"""Each side runs its own code: its files replace installed namesakes and import nothing foreign."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attnbench.api import IMPLEMENTATIONS
from attnbench.api.loader import load_built_in, load_file, load_side
from attnbench.errors import UsageError
from tests.repositories import kernel, write

# An implementation whose description is what another file of its side says.
WORDED = """from attnbench.api import attention
from {module} import WORD


@attention("{module}", doc=WORD)
def kernel(q, k, v, *, causal, scale):
    return ((q @ k.mT) * scale).softmax(-1) @ v
"""


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path.resolve() / "base", tmp_path.resolve() / "working"


def write_both(sides: tuple[Path, Path], **files: str) -> None:
    """Write files on both sides; WORD in them becomes the side's name."""
    for root in sides:
        root.mkdir(exist_ok=True)
        write(root, **{name: text.replace("WORD?", root.name) for name, text in files.items()})


def _load(files: list[str], root: str, other: str, paths: list[str]) -> dict[str, Any]:
    sys.path[:0] = paths  # as an editable installation, or PYTHONPATH
    try:
        names = load_side(files, root, other)
    except UsageError as err:
        return {"refused": str(err)}
    docs = {name: IMPLEMENTATIONS.get(name).doc for name in names}
    return {"docs": docs, "folder": str(Path.cwd()), "bytecode": not sys.dont_write_bytecode}


def loaded(root: Path, other: Path, *files: str, path: str = "") -> dict[str, Any]:
    """What `load_side` comes to in a process of its own, forked from this one.

    `path` of the other side comes first wherever nothing else is said.
    """
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(max_workers=1, mp_context=fork) as pool:
        named = [str(root / file) for file in files]
        return pool.submit(_load, named, str(root), str(other), [str(other / path)]).result()


def test_a_file_replaces_an_installed_namesake_where_that_is_asked_for(tmp_path):
    load_built_in()
    before = dict(IMPLEMENTATIONS.items())
    write(tmp_path, own=kernel("naive"), two=kernel("naive"), three=kernel() + kernel())
    write(tmp_path, half=kernel("naive") + kernel("new") + "raise OSError('no')\n")
    try:
        with pytest.raises(UsageError, match="OSError: no"):  # it fails, and replaces nothing
            load_file(str(tmp_path / "half.py"), replace=True)
        with pytest.raises(UsageError, match="'naive' is already registered"):
            load_file(str(tmp_path / "own.py"))
        assert dict(IMPLEMENTATIONS.items()) == before
        assert load_file(str(tmp_path / "own.py"), replace=True) == ["naive"]
        assert IMPLEMENTATIONS.get("naive").file == str(tmp_path / "own.py")
        assert IMPLEMENTATIONS.names() == list(before)
        assert load_file(str(tmp_path / "two.py"), replace=True) == ["two:naive"]
        assert load_file(str(tmp_path / "own.py"), replace=True) == ["own:naive"]
        with pytest.raises(UsageError, match="'mine' is already registered"):
            load_file(str(tmp_path / "three.py"), replace=True)
        assert IMPLEMENTATIONS.names()[-1] == "two:naive"
    finally:
        IMPLEMENTATIONS._items = before


def test_a_side_imports_its_own_neighbours_package_and_what_is_on_its_path(sides):
    base, working = sides
    write_both(
        sides, deep__one=WORDED.format(module="neighbour"),
        deep__neighbour="WORD = 'neighbour of WORD?'", two=WORDED.format(module="package.inside"),
        package__inside="WORD = 'package of WORD?'", three=WORDED.format(module="sourced"),
        src__sourced="WORD = 'src of WORD?'", four=WORDED.format(module="odd"),
        python__odd="WORD = 'WORD?'",
    )  # fmt: skip
    found = loaded(base, working, "deep/one.py", "two.py", "three.py", path="src")
    docs = {
        "neighbour": "neighbour of base", "package.inside": "package of base",
        "sourced": "src of base",
    }  # fmt: skip
    assert found == {"docs": docs, "folder": str(base), "bytecode": False}
    assert list(base.rglob("__pycache__")) == []
    for root, other in (sides, sides[::-1]):
        assert loaded(root, other, "four.py", path="python")["docs"] == {"odd": root.name}


REACHING = """import importlib.util, sys
spec = importlib.util.spec_from_file_location("odd", "{path}")
module = sys.modules["odd"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""


def test_what_is_the_other_sides_is_refused_but_not_what_is_installed_in_it(sides):
    base, working = sides
    installed = ".venv/lib/site-packages"
    write_both(sides, elsewhere__odd="", two=WORDED.format(module="library"))
    # as the finder of an editable installation does
    write(base, one=REACHING.format(path=working / "elsewhere" / "odd.py") + kernel())
    says = loaded(base, working, "one.py")["refused"]
    assert f"{base / 'one.py'} imports odd from the other side" in says
    assert str(working / "elsewhere" / "odd.py") in says
    assert "\n" not in says
    assert "is not in" in loaded(base, working, "../working/one.py")["refused"]
    write(working, **{f"{installed}/library": "WORD = 'installed'"})
    assert loaded(base, working, "two.py", path=installed)["docs"] == {"library": "installed"}

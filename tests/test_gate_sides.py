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


@attention("{name}", doc=WORD)
def kernel(q, k, v, *, causal, scale):
    return ((q @ k.mT) * scale).softmax(-1) @ v
"""


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    """What is registered here is forgotten after each test."""
    load_built_in()
    before = dict(IMPLEMENTATIONS.items())
    yield
    IMPLEMENTATIONS._items = before


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "base"


@pytest.fixture
def working(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "working"


def write_both(base: Path, working: Path, **files: str) -> None:
    """Write files on both sides; WORD in them becomes the side's name."""
    for root in (base, working):
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


def loaded(root: Path, other: Path, *files: str, paths: tuple[Path, ...] = ()) -> dict[str, Any]:
    """What `load_side` comes to in a process of its own, forked from this one."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(max_workers=1, mp_context=fork) as pool:
        named = [str(root / file) for file in files]
        return pool.submit(_load, named, str(root), str(other), [str(p) for p in paths]).result()


# Installed namesakes.


def test_a_file_replaces_an_installed_namesake_where_that_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, own=kernel("naive"))
    with pytest.raises(UsageError, match="'naive' is already registered"):
        load_file(str(tmp_path / "own.py"))
    order = IMPLEMENTATIONS.names()
    assert load_file(str(tmp_path / "own.py"), replace=True) == ["naive"]
    assert IMPLEMENTATIONS.get("naive").file == str(tmp_path / "own.py")
    assert IMPLEMENTATIONS.names() == order


def test_a_name_that_two_of_the_users_files_register_is_refused(tmp_path: Path) -> None:
    write(tmp_path, one=kernel("naive"), two=kernel("naive"), three=kernel() + kernel())
    load_file(str(tmp_path / "one.py"), replace=True)
    for name in ("two", "three"):
        with pytest.raises(UsageError, match="already registered"):
            load_file(str(tmp_path / f"{name}.py"), replace=True)


def test_a_file_that_fails_half_way_replaces_nothing(tmp_path: Path) -> None:
    write(tmp_path, half=kernel("naive") + kernel("new") + "raise OSError('no')\n")
    before = dict(IMPLEMENTATIONS.items())
    with pytest.raises(UsageError, match="OSError: no"):
        load_file(str(tmp_path / "half.py"), replace=True)
    assert dict(IMPLEMENTATIONS.items()) == before


# The trap: what a side imports could be the other side's.


def test_a_side_imports_its_own_neighbours_package_and_src(base: Path, working: Path) -> None:
    write_both(
        base, working,
        deep__one=WORDED.format(module="neighbour", name="one"),
        deep__neighbour="WORD = 'neighbour of WORD?'",
        two=WORDED.format(module="package.inside", name="two"),
        package__inside="WORD = 'package of WORD?'",
        three=WORDED.format(module="sourced", name="three"),
        src__sourced="WORD = 'src of WORD?'",
    )  # fmt: skip
    # src of the working tree comes first wherever nothing else is said
    found = loaded(base, working, "deep/one.py", "two.py", "three.py", paths=(working / "src",))
    assert found == {
        "docs": {"one": "neighbour of base", "two": "package of base", "three": "src of base"},
        "folder": str(base),
        "bytecode": False,
    }
    assert list(base.rglob("__pycache__")) == []


def test_a_folder_on_the_path_is_that_of_the_side(base: Path, working: Path) -> None:
    write_both(
        base, working,
        one=WORDED.format(module="odd", name="one"),
        python__odd="WORD = 'WORD?'",
    )  # fmt: skip
    for root, other in ((base, working), (working, base)):
        found = loaded(root, other, "one.py", paths=(working / "python",))
        assert found["docs"] == {"one": root.name}


REACHING = """import importlib.util, sys
spec = importlib.util.spec_from_file_location("odd", "{path}")
module = sys.modules["odd"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""


def test_a_side_that_imports_from_the_other_is_refused_with_both_names(
    base: Path, working: Path
) -> None:
    write_both(base, working, elsewhere__odd="")
    # as the finder of an editable installation does
    write(base, one=REACHING.format(path=working / "elsewhere" / "odd.py") + kernel())
    says = loaded(base, working, "one.py")["refused"]
    assert f"{base / 'one.py'} imports odd from the other side" in says
    assert str(working / "elsewhere" / "odd.py") in says
    assert "\n" not in says


def test_what_is_installed_in_an_environment_in_the_repository_is_no_ones(
    base: Path, working: Path
) -> None:
    installed = ".venv/lib/site-packages"
    write_both(base, working, one=WORDED.format(module="library", name="one"))
    write(working, **{f"{installed}/library": "WORD = 'installed'"})
    found = loaded(base, working, "one.py", paths=(working / installed,))
    assert found["docs"] == {"one": "installed"}


def test_a_file_outside_its_side_is_refused(base: Path, working: Path) -> None:
    write_both(base, working, one=kernel())
    assert "is not in" in loaded(base, working, "../working/one.py")["refused"]

"""What the gate asks of git: the base by default, what is uncommitted, and what cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnbench.errors import UsageError
from attnbench.gate.run.git import Changes, changes, default_base, is_shallow, repository, resolve
from tests import repositories
from tests.repositories import commit, git, kernel, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with two commits on `main`."""
    made = repositories.new(tmp_path.resolve() / "repo")
    commit(made, a="1")
    commit(made, a="2")
    return made


def base_of(root: Path) -> tuple[str, str]:
    found = default_base(root, changes(root))
    return found.ref, found.commit


def test_the_root_is_found_from_a_folder_below_it(root: Path) -> None:
    (root / "deep" / "er").mkdir(parents=True)
    assert repository(root / "deep" / "er") == root


def test_what_is_no_repository_or_has_no_working_tree_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not in a git repository.*--base.*git init") as caught:
        repository(tmp_path)
    assert "\n" not in str(caught.value)
    git(tmp_path, "init", "--quiet", "--bare")
    with pytest.raises(UsageError, match="without a working tree"):
        repository(tmp_path)


def test_without_git_the_line_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(UsageError, match=r"git is not on PATH.*--base"):
        repository(root)


@pytest.mark.parametrize("ref", ["HEAD~1", "main~1", "v1"])
def test_a_ref_becomes_a_full_id(root: Path, ref: str) -> None:
    git(root, "tag", "--annotate", "--message", "m", "v1", "HEAD~1")
    assert resolve(root, ref) == git(root, "rev-parse", "HEAD~1")


@pytest.mark.parametrize("ref", ["gone", "HEAD~9", "", "--all", "HEAD:a.py", "0" * 40, "a b", "é"])
def test_a_ref_that_does_not_exist_is_one_line_that_names_the_flag(root: Path, ref: str) -> None:
    with pytest.raises(UsageError, match=r"no commit .*--base.*git branch -a") as caught:
        resolve(root, ref)
    assert "\n" not in str(caught.value)


def test_a_misspelt_branch_or_one_that_only_the_remote_has_is_answered_with_the_nearest(
    root: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="did you mean 'main'"):
        resolve(root, "mian")
    git(root, "branch", "topic")
    git(tmp_path, "clone", "--quiet", str(root), "clone")
    with pytest.raises(UsageError, match="did you mean 'origin/topic'"):
        resolve(tmp_path / "clone", "topic")


# The base by default.


def test_on_a_branch_the_base_is_where_it_left_the_default_branch(root: Path) -> None:
    left = git(root, "rev-parse", "HEAD")
    git(root, "checkout", "--quiet", "-b", "topic")
    commit(root, a="3")
    git(root, "checkout", "--quiet", "main")
    commit(root, b="4")
    git(root, "checkout", "--quiet", "topic")
    assert base_of(root) == ("main", left)


def test_on_the_default_branch_the_base_is_its_last_commit_or_where_clean_the_one_before(
    root: Path,
) -> None:
    write(root, b="untracked files change nothing that is committed")
    found = default_base(root, changes(root))
    assert (found.ref, found.commit) == ("HEAD~1", git(root, "rev-parse", "HEAD~1"))
    assert "parent of HEAD" in found.words
    write(root, a="3")
    assert base_of(root) == ("HEAD", git(root, "rev-parse", "HEAD"))


def test_the_first_commit_without_changes_has_no_base(tmp_path: Path) -> None:
    root = repositories.new(tmp_path / "repo")
    with pytest.raises(UsageError, match="no commit yet"):
        default_base(root, Changes())
    commit(root, a="1")
    with pytest.raises(UsageError, match=r"HEAD has no parent.*--base REF"):
        default_base(root, Changes())


def test_the_default_branch_is_what_origin_says(root: Path, tmp_path: Path) -> None:
    git(root, "branch", "--move", "main", "trunk")
    git(root, "branch", "main", "HEAD~1")
    git(tmp_path, "clone", "--quiet", str(root), "clone")
    clone = tmp_path / "clone"
    git(clone, "checkout", "--quiet", "-b", "topic")
    commit(clone, a="3")
    assert base_of(clone) == ("origin/trunk", git(root, "rev-parse", "trunk"))


def test_without_a_default_branch_or_a_common_commit_a_base_must_be_named(root: Path) -> None:
    git(root, "checkout", "--quiet", "--orphan", "other")
    commit(root, a="3")
    with pytest.raises(UsageError, match=r"no common commit of HEAD and main.*--base REF"):
        default_base(root, Changes())
    git(root, "branch", "--move", "main", "elsewhere")
    with pytest.raises(UsageError, match=r"no default branch \(origin/main.*--base REF"):
        default_base(root, Changes())


# A shallow clone, as CI makes it.


def test_a_shallow_clone_names_the_next_command_and_compares_what_it_has(
    root: Path, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{root}", "shallow")
    shallow = tmp_path / "shallow"
    assert is_shallow(shallow)
    for ask in (lambda: resolve(shallow, "HEAD~1"), lambda: default_base(shallow, Changes())):
        with pytest.raises(UsageError, match=r"shallow clone; .*--unshallow.*fetch-depth: 0"):
            ask()
    write(shallow, a="3")
    assert base_of(shallow) == ("HEAD", git(shallow, "rev-parse", "HEAD"))


# What is uncommitted.


def test_changed_staged_moved_and_untracked_files_are_counted(root: Path) -> None:
    commit(root, b="b", c="c")
    assert (changes(root), changes(root).words) == (Changes(), "")
    write(root, a="changed", new__one="1", new__two="2", staged="s")
    git(root, "add", "staged.py")
    git(root, "mv", "b.py", "moved.py")
    (root / "c.py").unlink()
    found = changes(root)
    # a moved file is one that is gone and one that is new
    assert (found.tracked, found.untracked) == (5, 2)
    assert found.words == "5 changed and 2 untracked files"


def test_names_of_any_kind_count_once(root: Path) -> None:
    (root / "two\nlines ü -> x.py").write_text("")
    (root / os.fsdecode(b"\xff.py")).write_text("")
    assert changes(root).words == "2 untracked files"


def test_ignored_files_and_results_are_no_changes(root: Path) -> None:
    (root / ".gitignore").write_text("*.log\n")
    commit(root)
    (root / "x.log").write_text("")
    (root / "results" / "r").mkdir(parents=True)
    (root / "results" / "r" / "gate.json").write_text("")
    assert changes(root, besides=root / "results") == Changes()
    assert changes(root) == Changes(untracked=1)


def test_the_variables_that_git_sets_for_hooks_are_not_followed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = repositories.new(tmp_path / "other")
    commit(other, a=kernel())
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.setenv(name, str(other / ".git"))
    assert repository(root) == root
    assert changes(root) == Changes()

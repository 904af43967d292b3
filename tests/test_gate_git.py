"""What the gate asks of git: the base by default, what is uncommitted, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.errors import UsageError
from attnbench.versions.git import changes, default_base, repository, resolve
from tests import repositories
from tests.repositories import commit, git, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with two commits on `main`."""
    made = repositories.new(tmp_path.resolve() / "repo")
    commit(made, a="1")
    commit(made, a="2")
    return made


def base_of(root: Path) -> tuple[str, str]:
    found = default_base(root, changes(root)[0])
    return found.ref, found.commit


def test_the_root_is_found_from_below_and_what_is_none_is_one_line(root, tmp_path, monkeypatch):
    (root / "deep" / "er").mkdir(parents=True)
    assert repository(root / "deep" / "er") == root
    with pytest.raises(UsageError, match=r"not a git repository.*git init") as caught:
        repository(tmp_path)
    assert "\n" not in str(caught.value)
    git(tmp_path, "init", "--quiet", "--bare")
    with pytest.raises(UsageError, match=r"must be run in a work tree\)$"):
        repository(tmp_path)
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(UsageError, match=r"git cannot be run.*--base.*install git"):
        repository(root)


def test_a_repository_of_another_user_has_gits_own_remedy(root, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(UsageError, match=r"; trust it: git config --global .*safe\.directory .*$"):
        repository(root)


def test_the_base_is_where_head_left_the_default_branch_or_what_came_before_on_it(root):
    left = git(root, "rev-parse", "HEAD")
    write(root, b="untracked files change nothing that is committed")
    found = default_base(root, changes(root)[0])
    assert (found.ref, found.commit) == ("HEAD~1", git(root, "rev-parse", "HEAD~1"))
    assert "parent of HEAD" in found.words
    write(root, a="3")
    assert base_of(root) == ("HEAD", left)
    git(root, "checkout", "--quiet", "-b", "topic")
    commit(root, a="3")
    git(root, "checkout", "--quiet", "main")
    commit(root, b="4")
    git(root, "checkout", "--quiet", "topic")
    assert base_of(root) == ("main", left)


def test_where_there_is_no_base_by_default_one_must_be_named(root, tmp_path):
    first = repositories.new(tmp_path / "first")
    with pytest.raises(UsageError, match="no commit yet"):
        base_of(first)
    commit(first, a="1")
    with pytest.raises(UsageError, match=r"HEAD has no parent.*--base REF"):
        base_of(first)
    git(root, "checkout", "--quiet", "--orphan", "other")
    commit(root, a="3")
    with pytest.raises(UsageError, match=r"no common commit of HEAD and main.*--base REF"):
        base_of(root)
    git(root, "branch", "--move", "main", "elsewhere")
    with pytest.raises(UsageError, match=r"no default branch \(origin/main.*--base REF"):
        base_of(root)


def test_a_shallow_clone_names_the_next_command_and_compares_what_it_has(root, tmp_path):
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{root}", "shallow")
    shallow = tmp_path / "shallow"
    for ask in (lambda: resolve(shallow, "HEAD~1"), lambda: default_base(shallow, False)):
        with pytest.raises(UsageError, match=r"shallow clone; .*--unshallow.*fetch-depth: 0"):
            ask()
    write(shallow, a="3")
    assert base_of(shallow) == ("HEAD", git(shallow, "rev-parse", "HEAD"))

"""What the README says is what the commands do, and what it shows is in the committed run."""

import re
import shlex
from pathlib import Path

import click
import pytest

from attnbench.api.loader import load_built_in
from attnbench.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FENCES = re.findall(r"```sh\n(.*?)```", README, re.S)
LINES = [line.split("#")[0].strip() for fence in FENCES for line in fence.splitlines()]
COMMANDS = [line.removeprefix(".venv/bin/") for line in LINES if "attnbench " in line]
QUOTED = re.findall(r"<!-- from (\S+) -->\n(.*?)<!-- end -->", README, re.S)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_line_in_the_readme_parses(line):
    _, name, *arguments = shlex.split(line)
    command = main.commands[name]
    command.make_context(name, [a for a in arguments if a != "--help"], resilient_parsing=False)


@pytest.mark.parametrize("name", list(main.commands))
def test_every_command_has_help_and_stands_in_the_readme(name):
    command = main.commands[name]
    assert command.help
    assert re.search(rf"`attnbench {name}[` ]", README)
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert all(option.help for option in options), "an option without help"


def test_every_implementation_stands_in_the_readme():
    from attnbench.api import IMPLEMENTATIONS

    load_built_in()
    built_in = [name for name, impl in IMPLEMENTATIONS.items() if "impls" in impl.file]
    assert [name for name in built_in if f"`{name}`" not in README] == []


def test_the_readme_shows_real_output():
    assert QUOTED, "the README quotes no run"
    for source, block in QUOTED:
        text = (ROOT / source).read_text()
        shown = [line for line in block.splitlines() if line.strip()]
        assert shown
        assert [line for line in shown if line not in text] == []


def test_every_picture_and_file_the_readme_points_at_is_there():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert [t for t in targets if not t.startswith("http") and not (ROOT / t).exists()] == []


def test_the_readmes_kernel_is_what_the_text_says_it_is(tmp_path):
    import attnbench
    from attnbench.execution.checks import run_checks

    code = next(c for c in re.findall(r"```python\n(.*?)```", README, re.S) if '"mine"' in c)
    file = tmp_path / "my_kernel.py"
    file.write_text(code)
    results = run_checks(names=None, files=(str(file),), device="cpu", dtypes=("float32",))
    failed = {result.item.name for result in results if result.failed}
    assert failed == {"causal, L > S: rows without keys"}
    assert attnbench.__version__ in (ROOT / "CHANGELOG.md").read_text()

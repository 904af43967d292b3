"""What README and docs say is what the commands do, and what they show is in a committed run."""

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

import attnbench
from attnbench.analysis import notes
from attnbench.analysis.failures import failures
from attnbench.cli.commands import main
from attnbench.errors import UsageError
from attnbench.schema.case import Case
from tests.conftest import parsed

ROOT = Path(__file__).parent.parent
PAGES = {p.name: p.read_text() for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
README = PAGES["README.md"]
EVERYTHING = "\n".join(PAGES.values())


def blocks(language: str, text: str = EVERYTHING) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


LINES = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
LINES += re.findall("`(attnbench [a-z]+ .+?)`", PAGES["notes.md"])
COMMANDS = sorted({re.sub(r"^.*?(?=attnbench )", "", x) for x in LINES if "attnbench " in x})


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_line_parses(line):
    parsed(line)


def in_messages() -> list[str]:
    """The commands in texts of the package, with `latest` for what is filled in."""
    found: set[str] = set()
    pattern = rf"attnbench (?:{'|'.join(main.commands)}) (?:-|[A-Z]|latest|previous)[^;:,)\n]*"
    for file in (ROOT / "attnbench").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        whole = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        parts = [part for node in whole for part in node.values]
        texts: list[list[ast.expr]] = [
            [node] for node in nodes if isinstance(node, ast.Constant) and node not in parts
        ]
        for text in [*(node.values for node in whole), *texts] * (file.name != "lookup.py"):
            values = (str(x.value) if isinstance(x, ast.Constant) else "latest" for x in text)
            found.update(re.findall(pattern, "".join(values)))
    return sorted(found)


@pytest.mark.parametrize("line", in_messages())
def test_every_command_in_a_message_parses(line):
    """Those of `attnbench list` are tried in test_lookup, those of documents in test_documents."""
    parsed(f"{line} latest" if re.search("--re(sume|play)$", line) else line)


@pytest.mark.parametrize("name", list(main.commands))
def test_every_command_has_help_and_stands_in_the_readme(name):
    command = main.commands[name]
    assert command.help
    assert re.search(rf"`attnbench {name}[` ]", README)
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert all(option.help for option in options), "an option without help"


def families() -> str:
    """README's table of families, as the registry has them."""
    from attnbench.api import FAMILIES, IMPLEMENTATIONS
    from attnbench.api.loader import load_built_in

    load_built_in()
    lines = ["| family | what it computes | implementations |", "|---|---|---|"]
    for family, doc in FAMILIES.items():
        found = [
            f"`{name}`"
            for name, impl in IMPLEMENTATIONS.items()
            if impl.family == family and "impls" in impl.file
        ]
        lines.append(f"| {family} | {doc} | {', '.join(found)} |")
    return "\n".join(lines)


def test_the_readme_stays_short_and_has_the_families_of_the_registry():
    (table,) = re.findall(r"<!-- families -->\n(.*?)\n?<!-- end -->", README, re.S)
    assert table == families()
    assert len(README.splitlines()) <= 180


def test_what_a_built_in_is_fits_into_a_line_of_the_list():
    from attnbench.api import IMPLEMENTATIONS

    families()
    docs = {n: i.doc.partition("\n")[0] for n, i in IMPLEMENTATIONS.items() if "impls" in i.file}
    assert {name: doc for name, doc in docs.items() if len(doc) > 51} == {}


def test_quoted_output_is_in_a_committed_run():
    quoted = re.findall(r"<!-- from (\S+) -->\n(.*?)<!-- end -->", EVERYTHING, re.S)
    assert len(quoted) >= 5
    for source, block in quoted:
        text = (ROOT / source).read_text()
        shown = [line for line in block.splitlines() if line.strip()]
        assert shown
        assert [line for line in shown if line not in text] == []


@pytest.mark.parametrize("page", list(PAGES))
def test_every_link_leads_somewhere(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", PAGES[page]) if not t.startswith("http")]
    assert [t for t in targets if not (folder / t).exists()] == []


def test_every_column_stands_in_the_docs_in_its_order_with_its_unit_and_meaning():
    from attnbench.analysis.columns import COLUMNS

    rows = [f"| `{c.name}` | {c.unit} | {c.meaning} |" for _, c in COLUMNS.items()]
    assert [line for line in PAGES["columns.md"].splitlines() if line in rows] == rows


def test_the_fields_of_a_case_stand_in_the_docs_with_their_types_and_values_they_can_have():
    rows = re.findall(r"\n\| `(\w+)` \| ([\w ]+) \| \S+ \| `(\S+)` \|", PAGES["own-kernel.md"])
    types = [(f.name, str(f.type).replace(" | ", " or ")) for f in fields(Case)]
    assert [(name, kind) for name, kind, _ in rows] == types
    for name, _, text in rows:
        value = ast.literal_eval(text)
        found = getattr(Case.from_json({name.rstrip("_"): value}), name)
        assert getattr(found, "text", found) == value


def between(page: str, mark: str) -> str:
    found: list[str] = re.findall(rf"<!-- {mark} -->\n(.*?)<!-- end -->", PAGES[page], re.S)
    (block,) = found
    return block


def test_the_keys_of_the_gates_table_and_no_others_stand_in_the_docs(tmp_path):
    from attnbench.cli.gate import read_table

    table = re.findall(r"^\| (`.*?) \|", between("gate.md", "keys"), re.M)
    keys = [key for row in table for key in re.findall("`(.+?)`", row)]
    (tmp_path / "pyproject.toml").write_text("[tool.attnbench.gate]\nnot-a-key = 1\n")
    with pytest.raises(UsageError, match="unknown key 'not-a-key'") as refused:
        read_table(tmp_path)
    known = re.split(", ", str(refused.value).rpartition("known: ")[2])
    assert sorted(keys) == sorted({*known, "sweeps"})


def test_the_formats_and_the_commands_of_the_exit_codes_are_those_of_the_program():
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", between("project.md", "exit codes"), re.M
    )
    assert {name for name, *_ in rows} == set(main.commands)
    for name, codes, formats in rows:
        options = [p for p in main.commands[name].params if "--format" in p.opts]
        choices = [list(getattr(p.type, "choices", ())) for p in options]
        assert choices == ([re.findall(r"\w+", formats.partition(" (")[0])] if options else []), (
            name
        )
        says = set(re.findall(r"\bExits? (?:\w+ )*?(\d)", main.commands[name].help or ""))
        assert says <= set(re.findall(r"\b\d\b", codes)), name


def test_the_reasons_of_unsteady_rows_stand_in_the_docs():
    source = (ROOT / "attnbench/analysis/notes.py").read_text()
    serious = source.partition("def _serious")[2].partition("def _asides")[0]
    codes = set(re.findall(r'yield \(?\s*"([a-z-]+)"', serious))
    codes |= {"not-compiled"} | {name for name, _ in notes._KEPT.values()}
    page = PAGES["method.md"].partition("| reason | what was seen |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page, re.M)) == codes


def test_the_caches_that_take_items_of_different_lengths_stand_in_the_docs():
    from attnbench.theory.caches import CACHES

    (names,) = re.findall(r"The caches (`.*?) take them", PAGES["decode.md"])
    assert re.findall("`(.+?)`", names) == [name for name, x in CACHES.items() if x.ragged]


def test_the_environment_variables_of_the_docs_are_read_by_the_program():
    rows = re.findall(r"^\| `([A-Z_]+)` \|", PAGES["platforms.md"], re.M)
    code = "\n".join(f.read_text("utf-8") for f in (ROOT / "attnbench").rglob("*.py"))
    read = {*re.findall(r"environ[.\[](?:get\()?\"?([A-Z_]{2,})", code), "COLUMNS", "TMPDIR"}
    assert rows
    assert set(rows) - {"GITHUB_STEP_SUMMARY"} <= read


def test_the_python_examples_parse_and_use_keywords_that_exist():
    from attnbench.execution.process import Settings
    from attnbench.schema.axes import KEYWORDS

    calls = [
        node
        for block in blocks("python", PAGES["python.md"])
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call)
    ]
    words = {
        "sweep": {*KEYWORDS, *inspect.signature(attnbench.sweep).parameters},
        "advise": set(inspect.signature(attnbench.advise).parameters),
        "load": set(inspect.signature(attnbench.load).parameters),
    }
    called = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in words]
    assert len(called) > 8
    for call in called:
        given = {k.arg for k in call.keywords}
        assert given <= words[call.func.attr], ast.unparse(call)  # type: ignore[attr-defined]
        for k in call.keywords:
            if k.arg == "settings":
                assert set(ast.literal_eval(k.value)) <= set(Settings.__dataclass_fields__)


def test_the_claims_in_the_docs_are_read(tmp_path):
    from attnbench.analysis.claims.statement import read

    (example,) = [block for block in blocks("toml") if "[[claim]]" in block]
    file = tmp_path / "my.toml"
    file.write_text(example)
    assert read(file).names() == ["sdpa-speed"]


def test_every_claim_about_the_notes_stands_in_their_page_where_it_belongs():
    from attnbench.analysis.claims.statement import read

    shown_by = "".join(row.split("|")[-2] for row in PAGES["notes.md"].splitlines() if "|" in row)
    assert set(re.findall("`([a-z0-9]+-[a-z0-9-]+)`", shown_by)) == set(read().names())


@pytest.mark.slow
def test_the_kernels_of_the_docs_are_right_but_for_what_the_text_says(tmp_path):
    from attnbench.execution.checks import run_checks
    from attnbench.execution.events import follow

    names, files = ("mine", "masked"), []
    for name in names:
        (code,) = [
            x for x in blocks("python") if re.search(rf'@\w+\([^)]*?"{name}"', x) and "import" in x
        ]
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(code)
    given = tuple(map(str, files))
    asked: Any = {"names": None, "files": given, "device": "cpu", "dtypes": ("float32",)}
    results = follow(run_checks(failures=failures, **asked))
    assert {result.impl for result in results} == set(names)
    blind = {
        x.item.case
        for x in results
        if x.impl == "mine" and x.status != "unsupported" and not x.item.case.unmasked
        and x.item.case.seq_len > x.item.case.kv_len
    }  # fmt: skip
    assert {(x.impl, x.item.case) for x in results if x.failed} == {("mine", x) for x in blind}


def test_the_changelog_knows_this_version():
    assert attnbench.__version__ in (ROOT / "CHANGELOG.md").read_text()


WORDS = re.compile(
    r"(?<!there )\b(is|are) no\b|\bwhom\b|of those\b|\bmoods?\b|what is known|\bamiss\b|\banew\b",
    re.IGNORECASE,
)


def test_words_that_readers_stumble_over_stand_in_no_page_help_or_message():
    texts = dict(PAGES)
    for file in (ROOT / "attnbench").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Expr) and "cli" not in file.parts:
                continue  # a docstring
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    texts[f"{file}:{part.lineno}"] = part.value
    texts |= {str(f): f.read_text("utf-8") for f in (ROOT / "attnbench").rglob("*.toml")}
    assert {where: found[0] for where, text in texts.items() if (found := WORDS.search(text))} == {}


def test_the_tables_of_a_page_fit_the_terminal_and_a_pipe_gets_them_as_they_are(cli, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert cli("docs", "notes").stdout == PAGES["notes.md"]
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli("docs", "notes").stdout.splitlines()
    assert not [line for line in shown if line.startswith("|")]
    raw = PAGES["notes.md"].splitlines()
    assert max(len(line) for line in shown if line not in raw) <= 80
    assert "wrong sign:" in " ".join(shown)

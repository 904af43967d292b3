"""What the name of a method, a model or a part stands for in the catalogue, and how to sweep it."""

from __future__ import annotations

import contextlib
import re
import tomllib
from pathlib import Path

from msgspec.structs import replace

from attnbench.base.parameters import base_name
from attnbench.base.registry import nearest, unknown
from attnbench.errors import UnknownNameError
from attnbench.planning.models import MODELS
from attnbench.schema.messages import Catalogue
from attnbench.theory.flags import DOCS

TABLE = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
# All but implementations, which a worker must be asked for.
PARTS = Catalogue(device="cpu", devices={}, environment={}, implementations=(), families={}, **DOCS)
Answer = tuple[str, set[str], list[str]]  # a line on a name, its entries, commands to measure them


def look_up(names: tuple[str, ...], catalogue: Catalogue) -> tuple[list[Answer], Catalogue]:
    """What all names together stand for, else each by itself; the catalogue with that alone.

    Raises:
        UnknownNameError: nothing is called so; the message names the nearest.
    """
    try:
        answers = [_answer(" ".join(names), catalogue)]
    except UnknownNameError as err:
        try:
            answers = [_answer(name, catalogue) for name in names]
        except UnknownNameError:
            raise err from None  # it names what is nearest to all of them
    kept = set().union(*(entries for _, entries, _ in answers))
    rows = tuple(row for row in catalogue.implementations if row.name in kept)
    families = {row.family: catalogue.families[row.family] for row in rows}
    kinds = TABLE["kinds"].keys() - {"implementations"}
    others = {k: {n: doc for n, doc in getattr(catalogue, k).items() if n in kept} for k in kinds}
    return answers, replace(catalogue, implementations=rows, families=families, **others)


def explained(error: UnknownNameError) -> str:
    """The error of an unknown name, with what that stands for where `list` knows it."""
    kind, name, known, flag = error.asked or ("", "", [], "")
    if f"{kind.partition(' ')[0]}s" in TABLE["kinds"] and flag != "--baseline":
        with contextlib.suppress(UnknownNameError):
            head, entries, commands = _answer(name, PARTS)
            plain = "".join(filter(str.isalnum, name))
            own = [f"'{each}'" for each in known if each in entries or _has(each, plain)][:3]
            if own or not nearest(name, known, cutoff=0.7):
                said = f", did you mean {' or '.join(own)}?{f'; {head}' * (head != name)}"
                hint = said if own else f"; {head}: {commands[0]}"
                error = unknown(kind, name, known, flag, hint)
    return str(error)


def _answer(name: str, catalogue: Catalogue) -> Answer:
    """By the table, else the entries of each kind that are called so, or whose doc has the word."""
    plain, known = "".join(filter(str.isalnum, name.lower())), [*MODELS]
    short = plain.removesuffix("attention") or plain  # not of docs: a ring is no ring attention
    for aliases, (words, flags) in TABLE["names"].items():
        known += (names := aliases.split(", "))
        if {plain, short} & {"".join(filter(str.isalnum, alias)) for alias in names}:
            given = [values.split(",") for values in flags.split()[1::2]]
            entries = {base_name(text) for values in given for text in values[1:] or values}
            return f"{name}: {words}", entries, _commands(flags)
    entries, commands = set(), []
    for kind, flags in TABLE["kinds"].items():
        texts = {r.name: (f"{r.family} {r.name}", r.doc) for r in catalogue.implementations}
        if kind != "implementations":
            texts = {e: (f"{kind} {e}", doc) for e, doc in getattr(catalogue, kind).items()}
        known += texts
        called = [e for e, (text, _) in texts.items() if _has(text, short)]
        if found := called or [e for e, (_, doc) in texts.items() if _has(doc, plain)]:
            entries |= set(found)
            every = (TABLE["entries"].get(entry) or flags.format(entry) for entry in found)
            commands += _commands(" ".join(every))
    if not entries:
        hint = nearest(name.lower(), known)
        raise UnknownNameError(f"nothing is called '{name:.60}'{hint}; see: attnbench list")
    return name, entries, commands


def _has(text: str, plain: str) -> bool:
    """Whether a word of the text begins so, or several in a row."""
    return bool(plain and re.search(r"(?<![^\W_])" + r"[\W_]*".join(plain), text, re.I))


def _commands(flags: str) -> list[str]:
    """A sweep of all that these flags say, one for each workload."""
    values: dict[str, dict[str, None]] = {}
    for flag, given in re.findall(r"(--\S+) (\S+)", flags):
        values.setdefault(flag, {}).update(dict.fromkeys(given.split(",")))
    values.setdefault("--impls", {"naive": None, "sdpa": None})
    workloads = values.pop("--workload", {"attention": None})
    rest = " ".join(f"{flag} {','.join(given)}" for flag, given in values.items())
    return [f"attnbench sweep --workload {workload} {rest}" for workload in workloads]

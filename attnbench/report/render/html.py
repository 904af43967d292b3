"""A document as a page that needs nothing but itself: figures inside, light and dark, in print."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from attnbench.report import document as doc
from attnbench.report.looks import looks_of
from attnbench.report.render import written


def render(
    document: doc.Document, folder: Path | None = None, failed: list[str] | None = None
) -> str:
    """The page; its figures are left in `folder`, if given.

    One that cannot be drawn is a note on the page, and in `failed`: it hides no verdict.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        return environment.get_template("document.html.jinja").render(
            document=document, written=written,
            kind=lambda of: "facts" if isinstance(of, Mapping) else type(of).__name__.lower(),
            looks=looks_of(_impls(document.sections)),
            drawn=lambda figure: _drawn(figure, folder or Path(scratch), failed),
        )  # fmt: skip


def _data_uri(svg: bytes) -> str:
    """An SVG inside a page, which isolates it from the page's ids and styles."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"


def _impls(parts: Sequence[doc.Part]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, doc.Section):
            yield from _impls(part.parts)
        elif isinstance(part, doc.Table):
            cells = (cell for row in part.rows for cell in row)
            yield from (
                written.value(c) for c in cells if isinstance(c, doc.Value) and c.unit == "impl"
            )


def _drawn(figure: doc.Figure, folder: Path, failed: list[str] | None) -> dict[str, Any]:
    module, _, name = figure.draw.partition(".")
    try:
        draw = getattr(import_module(f"attnbench.report.{module}"), name)
        groups = [
            {"title": title, "pictures": [(_data_uri(of.svg), of) for of in own]}
            for title, own in groupby(draw(*figure.of, folder), key=lambda picture: picture.title)
        ]
    except Exception as err:
        why = f"{figure.title}: cannot be drawn ({type(err).__name__}: {err!s:.200})"
        if failed is not None:
            failed.append(why)
        return {"groups": [], "note": why}
    return {"groups": groups, "note": ""}

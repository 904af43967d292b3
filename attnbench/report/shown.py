"""What Python callers get: a document that shows itself."""

from __future__ import annotations

from dataclasses import fields
from html import escape
from typing import Any

from attnbench.report.document import Document
from attnbench.report.render import rendered


class Shown(Document):
    """A document whose text is what the terminal shows, and in notebooks its page."""

    @classmethod
    def of(cls, document: Document, **changes: Any) -> Shown:
        """The same document, but for the fields given."""
        values = {field.name: getattr(document, field.name) for field in fields(document)}
        return cls(**values | changes)

    def __repr__(self) -> str:
        return rendered(self)

    def _repr_html_(self) -> str:
        page = escape(rendered(self, "html"))
        return f'<iframe srcdoc="{page}" style="width:100%;height:80vh;border:0"></iframe>'

"""Documents and figures of what was measured; never imports torch.

A document is made once, as values (`document`), by a producer for each command (`documents`), and
shown by a renderer for each format (`render`). `attnbench.report(run)` returns that of a run.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from attnbench.errors import in_keywords

if TYPE_CHECKING:
    from attnbench.report.shown import Shown


class _Report(ModuleType):
    """The package, which can be called like `attnbench.load`."""

    def __call__(
        self, run: str | Path = "latest", *, output: str | Path = "results",
        baseline: str | None = None,
    ) -> Shown:  # fmt: skip
        """What a sweep or a gate found: a folder, a name in `output`, `latest` or `previous`.

        Notebooks show its page; `attnbench.report.render.rendered(document, "markdown")` is its
        text. `baseline` is as for `attnbench.load`.

        Raises:
            StoreError: there is no such run, or its records are damaged.
            UnknownNameError: the run has no implementation called `baseline`.
        """
        from attnbench.report.documents import stored
        from attnbench.report.shown import Shown

        with in_keywords(lambda: {"baseline": "baseline"}):
            return Shown.of(stored(str(run), Path(output), baseline)[1])


# Where matplotlib cannot write to a home it says so on stderr, and keeps its caches elsewhere.
logging.getLogger("matplotlib").addFilter(lambda x: x.funcName != "_get_config_or_cache_dir")
sys.modules[__name__].__class__ = _Report

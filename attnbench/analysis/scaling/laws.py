"""The laws that a run's implementations declared, as they turn out in a case."""

from __future__ import annotations

from typing import Any

from attnbench.errors import UsageError
from attnbench.execution.store import Run
from attnbench.schema.case import Case
from attnbench.theory.law import Law, parse
from attnbench.theory.traits import law_of, memory_of


class Laws:
    """Declared laws by implementation; a text that is no law counts as none, and is a problem."""

    def __init__(self, run: Run) -> None:
        rows = run.info.get("implementations") or []
        self._rows: dict[str, dict[str, Any]] = {row["name"]: row for row in rows if "name" in row}
        self._known: dict[tuple[Any, ...], Law | None] = {}
        self.problems: dict[str, str] = {}

    def time(self, impl: str, case: Case) -> Law | None:
        """How time grows; per token where the workload's times are."""
        return self._law(impl, "time", case)

    def flops(self, impl: str, case: Case) -> Law | None:
        """How FLOPs grow: as `flops_law`, or else as time."""
        declared = (self._rows.get(impl) or {}).get("flops_law")
        return self._law(impl, "flops_law" if declared else "time", case)

    def memory(self, impl: str, case: Case) -> Law | None:
        """How the workspace grows."""
        return self._law(impl, "memory", case)

    def _law(self, impl: str, field: str, case: Case) -> Law | None:
        windowed = case.mask.before is not None
        key = impl, field, case.workload, case.cache, case.projection, windowed
        if key not in self._known:
            self._known[key] = self._in_case(impl, field, case, windowed)
        return self._known[key]

    def _in_case(self, impl: str, field: str, case: Case, windowed: bool) -> Law | None:
        """Under a window an implementation may do less than it declares for all pairs."""
        text = (self._rows.get(impl) or {}).get(field)
        if not text:
            return None
        try:
            core = parse(str(text))
        except UsageError as err:
            self.problems[impl] = f"{field}: {err}"
            return None
        law = memory_of(core, case) if field == "memory" else law_of(core, case)
        return law.upper() if windowed else law

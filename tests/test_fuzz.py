"""A few hundred of the inputs of `make validate PART=store`: what crashes, hangs or misleads?"""

from __future__ import annotations

from pathlib import Path

from tests.validation.fuzz import fuzz


def test_no_damaged_file_list_or_command_line_crashes_hangs_or_misleads(tmp_path: Path) -> None:
    found = fuzz(tmp_path / "fuzz", inputs=400)
    assert found.findings == []
    assert len(found.ends) == 12
    # A fuzzer whose inputs are all refused, or all read, tries nothing.
    assert sum(ends["read"] for ends in found.ends.values()) > 30
    assert sum(ends["refused"] for ends in found.ends.values()) > 120

"""The command of the validation, run in the process of a test."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tests.conftest import Cli
from tests.validation.__main__ import main


@pytest.fixture
def cli() -> Cli:
    """`cli("scaling", "--draws", 8)` runs `python -m tests.validation` in this process."""
    return lambda *args: CliRunner().invoke(main, [str(arg) for arg in args])

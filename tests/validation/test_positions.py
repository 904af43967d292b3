"""The study of position encodings: what it draws, and what it says of the trained length."""

import re
from pathlib import Path

import pytest

from attnbench.execution.store import load_run
from attnbench.schema.case import Case, parse_position
from tests import synthetic
from tests.validation.positions import ROTARY, TRAINED, beyond, examine, frequencies, kernel


def test_interpolation_meets_no_new_angle_where_rope_and_ntk_do():
    new = {row[0]: int(row[1].split()[0]) for row in beyond().rows}
    assert new == {
        "rope": 16, "rope-linear": 0, "rope-ntk": 15, "rope-yarn": 0, "rope-llama3": 0
    }  # fmt: skip
    # Counted by wavelength: a pair that does not go round within the trained length.
    assert sum(2 * 3.14159265 / theta > TRAINED for theta in frequencies("rope")) == 16


def test_a_key_equal_to_its_query_scores_most_at_its_own_place():
    assert [kernel(text, [0])[0] for text in ROTARY[:3]] == pytest.approx([8.0] * 3)
    assert kernel("rope-linear:4", [40])[0] == pytest.approx(kernel("rope", [10])[0])


def test_the_study_leaves_its_tables_and_pictures_in_the_run(tmp_path: Path):
    records = [
        synthetic.ok(Case(seq_len=n, position=parse_position(text)), impl)
        for n in (512, 2048)
        for text in ("none", "rope", "alibi")
        for impl in ("naive", "sdpa")
    ]
    page = examine(load_run(synthetic.write_run(tmp_path, "positions", records)))
    assert re.search(r"^\| rope \| \+\d+ % \\\[", page, re.M)  # the imagined RoPE costs something
    assert {file.name for file in tmp_path.rglob("*.*g")} == {
        "costs.png", "costs.svg", "patterns.png", "patterns.svg"
    }  # fmt: skip

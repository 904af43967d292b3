"""`attnbench report --figure`: figures as files for a paper."""

import re

import pytest

from attnbench.schema.case import Case
from tests import synthetic


@pytest.fixture
def run(tmp_path):
    records = [
        synthetic.ok(Case(seq_len=n), impl)
        for n in (256, 512, 1024) for impl in ("naive", "sdpa", "own$x$")
    ]  # fmt: skip
    return synthetic.write_run(tmp_path, "r", records)


def test_figures_have_their_width_and_real_text_and_their_paths_are_printed(cli, run):
    asked = ("report", run, "--figure", "time,speedup", "--format", "svg", "--width", "4")
    paths = cli(*asked).stdout.split()
    assert [path.rpartition("/")[2].split("-")[0] for path in paths] == ["time", "speedup"]
    svg = (run / "figures" / "time-attention-cpu-float32-forward.svg").read_text()
    assert re.search(r'width="288(\.0)?pt"', svg)
    assert all(f">{name}</text>" in svg for name in ("Time per call", "naive", "own$x$"))
    chosen = (*asked, "--no-title", "--impls", "naive,sdpa")
    assert cli(*chosen).exit_code == 0
    svg = (run / "figures" / "time-attention-cpu-float32-forward.svg").read_text()
    assert ">Time per call<" not in svg
    assert "own" not in svg
    (path,) = cli("report", run, "--figure", "workspace").stdout.split()
    pdf = (run / "figures" / path.rpartition("/")[2]).read_bytes()
    assert b"/Type0" in pdf, "text, not outlines"
    assert b"/Type3" not in pdf


@pytest.mark.parametrize(("asked", "said"), [
    (("--figure", "speed"), "did you mean 'speedup'?"),
    (("--figure", "decode"), "there are: time, speedup, tflops, workspace"),
    (("--figure", "time", "--impls", "sdpaa"), "did you mean 'sdpa'?"),
    (("--figure", "time", "--width", "1"), "1.5<=x<=20"),
    (("--width", "4"), "are for --figure"),
    (("--no-title",), "are for --figure"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_one_line_and_nothing_is_written(
    cli, assert_refused, run, asked, said
):
    assert_refused(cli("report", run, *asked), said)
    assert not (run / "figures").exists()

"""What the charts of a report draw: which lines, in which figures, and how they are named."""

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from attnbench.analysis.crossovers import crossovers
from attnbench.analysis.table import load, rope_cost
from attnbench.report import axes, figures
from attnbench.report.figures import Sketch
from attnbench.report.looks import looks_of
from attnbench.report.pages import sketches
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.record import Record
from attnbench.store.runs import load_run
from tests import synthetic
from tests.test_report import CEILINGS

CPU = {"environment": synthetic.CPU | {"ceilings": CEILINGS}}


def drawn(tmp_path: Path, records: list[Record], info: Any = None) -> dict[str, Sketch]:
    """The figures of a run of these records, by the names of their files."""
    run = load_run(synthetic.write_run(tmp_path, "run", records, info))
    found = sketches(load(run), rope_cost(run), crossovers(run))
    return {sketch.stem: sketch for sketch in found}


def ends(figure: Figure) -> dict[str, str]:
    """The colours of the names at the ends of lines, which must not overlap."""
    found = [text for ax in figure.axes for text in ax.texts if text.get_text()]
    boxes = [text.get_window_extent() for text in found]
    for i, box in enumerate(boxes):
        assert box.x1 <= figure.bbox.x1, f"{found[i].get_text()} is cut"
        for other in boxes[:i]:
            shared = min(box.y1, other.y1) - max(box.y0, other.y0)
            across = min(box.x1, other.x1) - max(box.x0, other.x0)
            assert across <= 0 or shared < 0.25 * box.height
    return {text.get_text(): to_hex(text.get_color()) for text in found}


def several(count: int, lengths: tuple[int, ...] = (256, 512, 1024)) -> list[Record]:
    names = ["naive", "sdpa", *(f"own-{i}" for i in range(count - 2))]
    return [synthetic.ok(Case(seq_len=n), name) for n in lengths for name in names]


@pytest.mark.parametrize("width", [None, 3.3])
def test_lines_are_named_at_their_ends_in_their_colour_and_no_name_meets_another(tmp_path, width):
    found = drawn(tmp_path, several(8))
    looks = looks_of(["naive", "sdpa", *(f"own-{i}" for i in range(6))])
    for chart in ("time", "workspace"):
        with figures.styled():
            names = ends(found[f"{chart}-attention-cpu-float32-forward"].draw(figures.Size(width)))
        assert {
            name: figures.dark(look.colour) for name, look in looks.items()
        }.items() <= names.items()


def test_of_many_lines_a_figure_has_eleven_and_each_the_two_that_all_is_compared_with(tmp_path):
    found = drawn(tmp_path, several(25))
    lines = [of.alt[0].split(", ") for stem, of in found.items() if stem.startswith("time-")]
    assert len(set().union(*lines)) == 25
    assert all(len(own) <= 11 and {"naive", "sdpa"} <= set(own) for own in lines)


def test_of_one_n_there_is_a_row_for_each_implementation_with_its_value(tmp_path):
    found = drawn(tmp_path, several(20, (512,)))
    with figures.styled():
        (ax,) = found["time-attention-cpu-float32-forward"].draw(figures.OWN).axes
    texts = [text.get_text() for text in ax.texts]
    assert {"naive", "sdpa", *(f"own-{i}" for i in range(18))} <= set(texts)
    assert sum(bool(re.search(r"\d [µm]?s$", text)) for text in texts) == 20
    assert [int(np.asarray(line.get_ydata())[0]) for line in ax.lines] == list(range(20))


def test_a_line_of_decoding_is_an_implementation_with_a_cache(tmp_path):
    cases = [
        Case(workload="decode", seq_len=n, new_tokens=2, cache=cache)
        for n in (128, 256, 512) for cache in ("none", "static")
    ]  # fmt: skip
    records = [synthetic.ok(case, name) for case in cases for name in ("naive", "sdpa")]
    found = drawn(tmp_path, records)["decode-decode-cpu-float32-forward"]
    with figures.styled():
        names = ends(found.draw(figures.OWN))
    colours = {f"{impl} {cache}": figures.dark(looks_of([impl])[impl].colour)
               for impl in ("naive", "sdpa") for cache in ("none", "static")}  # fmt: skip
    assert colours.items() <= names.items()


def test_a_line_that_fails_from_some_n_on_says_so_at_its_end(tmp_path):
    records = [
        *several(2),
        *(synthetic.failed(Case(seq_len=n), "naive", "oom", "too large") for n in (2048, 4096)),
        *(synthetic.ok(Case(seq_len=n), "sdpa") for n in (2048, 4096)),
        synthetic.failed(Case(seq_len=512), "flex", "unsupported", "no"),
    ]
    found = drawn(tmp_path, records)["time-attention-cpu-float32-forward"]
    with figures.styled():
        assert "naive: oom from 2k" in ends(found.draw(figures.OWN))
    assert "without a result: flex (unsupported)" in found.caption


def test_a_guide_lies_just_below_the_lines_that_grow_as_it_does(tmp_path):
    size = {"naive": lambda n: 64 * n * n, "chunked": lambda n: 4096 * n}
    records = [
        synthetic.ok(Case(seq_len=n), name, memory_workspace_bytes=of(n))
        for n in (256, 512, 1024) for name, of in size.items()
    ]  # fmt: skip
    sketch = drawn(tmp_path, records)["workspace-attention-cpu-float32-forward"]
    with figures.styled():
        (ax,) = sketch.draw(figures.OWN).axes
    guides = {}
    for line in ax.lines:
        xs, ys = (np.log(np.asarray(of, float)) for of in (line.get_xdata(), line.get_ydata()))
        if line.get_color() == figures.QUIET:
            slope = float(np.diff(ys)[-1] / np.diff(xs)[-1])
            guides[round(slope)] = math.exp(ys[-1] + slope * (math.log(1024) - xs[-1]))
    assert guides == pytest.approx({1: 0.72 * 4096 * 1024, 2: 0.72 * 64 * 1024**2})


def test_time_is_drawn_along_the_head_dim_and_along_the_width_of_a_layer(tmp_path):
    cases = [Case(seq_len=n, head_dim=d) for n in (256, 512) for d in (16, 32, 64)]
    cases += [
        Case(workload="layer", projection="fused", seq_len=256, width=w, heads=w // 64, head_dim=64)
        for w in (128, 256, 512)
    ]  # fmt: skip
    found = drawn(tmp_path, [synthetic.ok(case, "naive") for case in cases])
    for workload, x, panels in (("attention", "head dim D", 2), ("layer", "model width E", 1)):
        with figures.styled():
            found_axes = found[f"time-d-{workload}-cpu-float32-forward"].draw(figures.OWN).axes
        assert [ax.get_xlabel() for ax in found_axes] == [x] * panels
        assert all("∝ d" in {text.get_text() for text in ax.texts} for ax in found_axes)


def test_the_flops_of_a_generation_are_those_of_all_its_tokens(tmp_path):
    cases = [
        Case(workload="decode", seq_len=1, new_tokens=t, cache=cache)
        for t in (16, 32, 64) for cache in ("rerun", "static")
    ]  # fmt: skip
    records = [synthetic.ok(case, "naive", flops_counted=1000) for case in cases]
    sketch = drawn(tmp_path, records)["generation-decode-cpu-float32-forward"]
    with figures.styled():
        (ax,) = sketch.draw(figures.OWN).axes
    assert ax.get_xlabel() == "new tokens T"
    lines = [np.asarray(line.get_ydata(), float).tolist() for line in ax.lines]
    assert lines.count([16e3, 32e3, 64e3]) == 2


def test_a_recurrent_network_stands_beside_layers_of_its_width_with_its_steps(tmp_path):
    layer: dict[str, Any] = {"workload": "layer", "projection": "fused", "heads": 4}
    sizes = [(n, e) for n in (64, 128, 256) for e in (128, 256)]
    records = [
        synthetic.ok(Case(seq_len=n, width=e, head_dim=e // 4, **layer), "sdpa") for n, e in sizes
    ]
    gru = [
        Case(workload="recurrent", heads=1, head_dim=256, width=256, seq_len=n,
             mask=parse_mask("causal")) for n in (64, 128, 256)
    ]  # fmt: skip
    found = drawn(tmp_path, [*records, *(synthetic.ok(case, "gru") for case in gru)])
    sketch = found["steps-layer-cpu-float32-forward"]
    assert [*sketch.alt] == ["sdpa: 1 step, gru: n steps"]


def test_what_is_kept_and_cached_is_drawn_where_it_was_measured(tmp_path):
    kept = [
        synthetic.ok(Case(seq_len=n, pass_="both"), "naive", memory_saved_bytes=n * n)
        for n in (256, 512, 1024)
    ]
    cached = [
        synthetic.ok(Case(workload="decode", seq_len=n, new_tokens=2, cache="static"), "naive",
                     cache_bytes=n) for n in (256, 512, 1024)
    ]  # fmt: skip
    found = drawn(tmp_path, [*kept, *cached])
    assert {"saved-attention-cpu-float32-both", "cache-decode-cpu-float32-forward"} <= set(found)


def test_methods_are_drawn_at_the_largest_n_that_most_of_them_share(tmp_path):
    near = [
        synthetic.ok(Case(seq_len=n), f"near:{w}", approx_error=1.5, approx_error_local=0.02)
        for n in (256, 512) for w in (32, 64)
    ]  # fmt: skip
    found = drawn(tmp_path, [*several(2), *near])["tradeoff-1"]
    assert found.caption.endswith("n=512")
    assert {text.split()[0] for text in found.alt} == {"near:32", "near:64"}


def test_no_point_lies_above_the_roof(tmp_path):
    for stem, sketch in drawn(tmp_path, synthetic.RUNS["quick"](), CPU).items():
        if stem.startswith("roofline-"):
            for ax in sketch.draw(figures.OWN).axes:
                roof, *rest = [np.asarray(line.get_ydata(), float) for line in ax.lines]
                points = np.concatenate(rest)
                assert max(points) <= max(roof) * (1 + 1e-9)


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


@pytest.mark.parametrize(("asked", "said"), [
    (("--figure", "speed"), "did you mean 'speedup'?"),
    (("--figure", "time,decode,cache"), "no data for decode, cache (--figure): nothing written"),
    (("--figure", "decode"), "there are: time, speedup, tflops, workspace, flops, fit"),
    (("--figure", "time", "--impls", "sdpaa"), "did you mean 'sdpa'?"),
    (("--figure", "time", "--width", "1"), "1.5<=x<=20"),
    (("--width", "4"), "are for --figure"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_one_line_and_nothing_is_written(
    cli, assert_refused, run, asked, said
):
    assert_refused(cli("report", run, *asked), said)
    assert not (run / "figures").exists()


def test_figures_of_growth_are_drawn_for_papers_too(cli, tmp_path):
    cases = [
        Case(workload="layer", projection="fused", heads=4, seq_len=n, width=e, head_dim=e // 4)
        for n in (1, 256, 512, 1024, 2048) for e in (128, 256)
    ]  # fmt: skip
    run = synthetic.write_run(tmp_path, "r", [synthetic.ok(case, "naive") for case in cases])
    paths = cli("report", run, "--figure", "fit,model", "--format", "svg").stdout.split()
    assert {path.rpartition("/")[2].split("-")[0] for path in paths} == {"fit", "model"}
    svg = (run / "figures" / "model-layer-n.svg").read_text()
    assert "overtakes at n = 512 by FLOPs" in svg
    assert "n, d = 256" in svg
    assert all(f">{text}</text>" in svg for text in ("d=128", "d=256", "at n = 2048"))


@pytest.mark.parametrize("high", [1.1e9, 2.5e9, 1e13])
def test_ticks_along_x_do_not_overlap(high):
    ax = Figure(figsize=(2, 1)).add_axes((0, 0, 1, 1))
    axes.log_axis(ax, "x", (5.5e8, high), 10, axes.round_flops)
    boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
    assert len(boxes) > 1
    assert all(a.x1 < b.x0 for a, b in pairwise(sorted(boxes, key=lambda box: box.x0)))


def test_panels_along_d_are_in_the_order_of_n(tmp_path):
    sizes = (512, 128), (512, 256), (64, 256), (64, 512), (2048, 256), (2048, 512)
    cases = [
        Case(workload="layer", projection="fused", heads=4, seq_len=n, width=d, head_dim=d // 4)
        for n, d in sizes
    ]
    found = drawn(tmp_path, [synthetic.ok(case, "naive") for case in cases])
    assert found["time-d-layer-cpu-float32-forward"].alt == ["naive", "n=64", "n=512", "n=2048"]

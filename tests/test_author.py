"""What an author of an implementation does: five lines in a file, then every way to use it."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import attnbench
from attnbench.analysis import notes
from attnbench.api import IMPLEMENTATIONS, loader
from attnbench.cli.sweep import sweep
from attnbench.errors import UsageError
from attnbench.planning.plan import chosen
from attnbench.store.runs import load_run
from tests.masks import admitted
from tests.repositories import kernel, write

# The example of the design, with a body.
MINE = """\
from attnbench.api import attention

@attention("mine", time="n^2 d", memory="n^2")
def mine(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
    queries, keys, groups = q_BHLD.shape[2], k_BGSD.shape[2], q_BHLD.shape[1] // k_BGSD.shape[1]
    k_BHSD, v_BHSV = (x.repeat_interleave(groups, dim=1) for x in (k_BGSD, v_BGSV))
    scores_BHLS = (q_BHLD @ k_BHSD.mT) * scale
    if causal:
        hidden = scores_BHLS.new_ones(queries, keys).tril(keys - queries) == 0
        scores_BHLS = scores_BHLS.masked_fill(hidden, float("-inf"))
    o_BHLV = scores_BHLS.softmax(-1).nan_to_num() @ v_BHSV
    return o_BHLV
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    file = tmp_path_factory.mktemp("author") / "mine.py"
    file.write_text(MINE)
    yield file
    IMPLEMENTATIONS.remove("mine")


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


# Several files that register one name.


def test_versions_in_several_files_are_swept_resumed_and_shown_side_by_side(
    cli, assert_refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    broken, wider = MINE.replace("softmax(-1)", "gone()"), MINE.replace("scale)", "scale, w=4)")
    write(tmp_path, a=MINE, v1__kern=broken, v2__kern=wider + kernel("more"))
    swept = ["sweep", *(f"--impl={name}.py" for name in ("a", "v1/kern", "v2/kern", "./a"))]
    sizes = "--seq-lens 8,16 --heads 2 --head-dims 8 --ceilings none --max-time 0.01 --device cpu"
    asked = ("--name", "r", "--min-time", "0.001", "--impls", "naive,mine,v2/kern:mine:w=2..4")
    assert cli(*swept, *sizes.split(), *asked).exit_code == 0
    records = tmp_path / "results" / "r" / "records.jsonl"
    records.write_bytes(b"".join(records.read_bytes().splitlines(keepends=True)[:3]))
    assert [cli(*of.split(), "r").exit_code for of in ("sweep --resume", "report", "export")] == [
        0, 0, 0
    ]  # fmt: skip
    table = attnbench.load("r")
    right = {"naive", "a:mine", "v2/kern:mine", "v2/kern:mine:2"}
    assert set(table["impl"][table["status"] == "ok"]) == right
    assert set(table["impl"][table["status"] == "error"]) == {"v1/kern:mine"}
    assert (len(table), set(table["family"])) == (10, {"exact"})
    listed = cli("list", *swept[1:]).stdout.split()
    assert {"a:mine", "v1/kern:mine", "v2/kern:mine", "more"} < {*listed} - {"mine"}
    wrong = cli(*swept, "--impls", "a:mein", "--name", "q")
    assert_refused(wrong, "'a:mein' (--impls), did you mean 'a:mine'?")
    assert chosen(["sdpa", "a:mine"], [("a:mine",), ("b:mine",), ("other",)])[2:] == ["other"]
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["r"]


# From Python.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", ["naive", "mine"])
def test_get_computes_what_sdpa_does(mine, name, scale, causal):
    call = attnbench.get(name, file=str(mine))
    q, k, v = draw(2, 4, 9, 8), draw(2, 2, 9, 8), draw(2, 2, 9, 5)
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    torch.testing.assert_close(call(q, k, v, causal=causal, scale=scale), expected)


@pytest.mark.parametrize("name", ["naive", "chunked", "sdpa"])
@pytest.mark.parametrize(
    "mask",
    ["full", "causal", "window:3", "prefix:5", "document:3+5", "padding:4+9", "padding:7:causal=1"],
)
def test_get_takes_masks_by_the_words_of_the_command_line(name, mask):
    q, k, v = draw(3, 4, 6, 8), draw(3, 2, 9, 8), draw(3, 2, 9, 5)
    sees = torch.tensor(np.array([[admitted(mask, 6, 9, item)] for item in range(3)]))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)
    torch.testing.assert_close(attnbench.get(name)(q, k, v, mask=mask), expected)


def test_a_query_that_sees_no_key_gives_0():
    q = draw(1, 1, 4, 8)
    for name in ("naive", "chunked"):
        o = attnbench.get(name)(q, q[:, :, :2], q[:, :, :2], mask="causal")
        assert (o[:, :, :2] == 0).all()
        assert o[:, :, 2:].isfinite().all()


def test_what_is_prepared_for_a_mask_is_prepared_once(tmp_path):
    (tmp_path / "counts.py").write_text(COUNTS)
    call = attnbench.get("counts", file=str(tmp_path / "counts.py"))
    masks = ["window:3", "causal", "window:3", "window:2", "causal"]
    built = [int(call(*[draw(*GOOD)] * 3, mask=mask)) for mask in masks]
    IMPLEMENTATIONS.remove("counts")
    assert built == [1, 2, 1, 3, 2]


COUNTS = """
import torch
from attnbench.api import ALL_MASKS, attention_builder

built = []

@attention_builder("counts", masks=ALL_MASKS)
def build(case):
    built.append(case)
    number = torch.tensor(len(built))
    return lambda q, k, v: number
"""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mask": "windw:3"}, "unknown mask 'windw' (mask=…), did you mean 'window'?"),
        ({"mask": "window"}, "needs its width, a whole number, 1 or more (mask=window:…)"),
        ({"mask": "window:3", "causal": True}, "take causal=True or mask='window:3', not both"),
        ({"mask": torch.ones(6, 6)}, "mask is a word such as 'window:256', not a Tensor"),
        ({"scale": -1.0}, "scale=… takes a number above 0, not -1.0"),
    ],
)
def test_a_mask_that_makes_no_sense_is_one_line(options, says):
    with pytest.raises(UsageError) as caught:
        attnbench.get("naive")(draw(*GOOD), draw(*GOOD), draw(*GOOD), **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


GOOD = (2, 4, 6, 8)
MISFITS: dict[str, tuple[Callable[[], tuple[Any, Any, Any]], list[str]]] = {
    "three axes": (lambda: (draw(4, 6, 8),) * 3, ["four axes"]),
    "batches": (lambda: (draw(*GOOD), draw(1, 4, 6, 8), draw(1, 4, 6, 8)), ["(1, 4, 6, 8)"]),
    "heads of k and v": (lambda: (draw(*GOOD), draw(*GOOD), draw(2, 2, 6, 8)), ["(2, 2, 6, 8)"]),
    "heads": (lambda: (draw(*GOOD), draw(2, 3, 6, 8), draw(2, 3, 6, 8)), ["3", "4", "divide"]),
    "no tokens": (lambda: (draw(2, 4, 0, 8), draw(*GOOD), draw(*GOOD)), ["at least 1"]),
    "dtypes": (
        lambda: (draw(*GOOD), draw(*GOOD, dtype=torch.float32), draw(*GOOD)),
        ["one dtype", "float64, float32, float64"],
    ),
    "devices": (
        lambda: (draw(*GOOD), draw(*GOOD), torch.empty(GOOD, device="meta", dtype=torch.float64)),
        ["one device", "cpu, cpu, meta"],
    ),
    "a device of no use": (lambda: (torch.empty(GOOD, device="meta"),) * 3, ["meta", "cpu"]),
}


@pytest.mark.parametrize(("tensors", "says"), MISFITS.values(), ids=MISFITS)
def test_tensors_that_do_not_fit_are_one_clear_line(tensors, says):
    with pytest.raises(UsageError) as caught:
        attnbench.get("naive")(*tensors())
    assert "\n" not in str(caught.value)
    assert [text for text in says if text not in str(caught.value)] == []


def fails(source: str) -> str:
    """What Python says of a few lines by an author."""
    try:
        exec(source, {"attnbench": attnbench, "q": draw(*GOOD)})
    except Exception as err:
        return f"{type(err).__name__}: {err}"
    raise AssertionError(source)


@pytest.mark.parametrize(
    ("source", "says"),
    {
        "attnbench.sweep(seqlens=(128,))": "'seq_lens'?; known: workload, passes, dtypes, ",
        "attnbench.sweep(settings={'maxtime': 1})": "'max_time_s'?; known: device, ",
    }.items(),
)
def test_a_word_that_is_not_there_names_the_nearest_and_what_there_is(source, says):
    assert says in fails(source)


def test_what_an_implementation_cannot_take_is_said(tmp_path):
    file = tmp_path / "picky.py"
    file.write_text(MINE.replace('"mine",', '"picky", dtypes=("bfloat16",),'))
    call = attnbench.get("picky", file=str(file))
    IMPLEMENTATIONS.remove("picky")
    with pytest.raises(UsageError, match="picky cannot take this: takes bfloat16, not float64"):
        call(draw(*GOOD), draw(*GOOD), draw(*GOOD))


def test_a_broken_entry_point_only_warns(monkeypatch):
    from attnbench.api import direct

    monkeypatch.setattr(direct, "load_entry_points", lambda: ["entry point x (y): ImportError"])
    direct._load.cache_clear()
    with pytest.warns(UserWarning, match="entry point x"):
        attnbench.get("naive")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attnbench.get("naive")


@pytest.mark.parametrize("error", [ImportError("no such module"), SystemExit(1)])
def test_an_entry_point_that_does_not_load_costs_one_line_and_no_other(monkeypatch, error):
    points = [Mock(value="package.broken"), Mock()]
    points[0].name, points[1].name = "broken", "fine"
    points[0].load.side_effect = error
    monkeypatch.setattr(loader, "entry_points", lambda group: points)
    (line,) = loader.load_entry_points()
    assert line.startswith(f"entry point broken (package.broken): {type(error).__name__}")
    points[1].load.assert_called_once()


COMPILED = """
import torch
from attnbench.api import attention

@torch.compile(backend="eager", dynamic=False)
def source(q, k, v, scale):
    return ((q * scale) @ k.mT).softmax(-1) @ v

@attention("compiled", workloads=("attention",), masks=("full",), gqa=False, compiles=True)
def call(q, k, v, *, causal, scale):
    return source(q, k, v, scale)
"""


def test_what_compiles_is_compiled_for_every_length_however_many_went_before(tmp_path):
    """Dynamo runs the source from the ninth shape of a function on, without a word."""
    (tmp_path / "compiled.py").write_text(COMPILED)
    table = attnbench.sweep(
        files=(str(tmp_path / "compiled.py"),), output=tmp_path, impls=["compiled"],
        settings={"device": "cpu", "min_time_s": 0.001, "max_time_s": 0.01},
        seq_lens=range(8, 20), heads=(2,), head_dims=(8,), positions=["none", "rope"],
    )  # fmt: skip
    assert len(table) == 24
    assert set(table[table["position"] == "none"]["compiled"]) == {"yes"}
    again = table[table["position"] == "rope"]  # in the same group, of the same shapes
    assert set(again["compiled"]) == {"no"}
    assert all("not-compiled" in codes for codes in again["unsteady"])


LATE = """
from attnbench.api import attention

@attention("late", workloads=("attention",), masks=("full",), gqa=False)
def call(q, k, v, *, causal, scale):
    import torch._dynamo
    return ((q * scale) @ k.mT).softmax(-1) @ v
"""


def test_who_loads_dynamo_in_a_call_changes_no_setting_of_it(tmp_path):
    """Whose flags are ours while several lengths share their rounds."""
    (tmp_path / "late.py").write_text(LATE)
    table = attnbench.sweep(
        files=(str(tmp_path / "late.py"),), output=tmp_path, impls=["late"], seq_lens=[8, 16],
        settings={"device": "cpu", "min_time_s": 0.001, "max_time_s": 0.01}, heads=(2,),
        head_dims=(8,),
    )  # fmt: skip
    assert not table["unsteady"].str.contains("meddles", na=False).any()


ONE_KEY_MORE = """
import torch
from attnbench.api import attention

@attention("one-key-more", workloads=("attention",), gqa=False)
def call(q, k, v, *, causal, scale):
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(2)
    return (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v
"""


def test_a_wrong_cell_of_a_sweep_is_explained(cli, tmp_path):
    (tmp_path / "wrong.py").write_text(ONE_KEY_MORE)
    options = ("--seq-lens", "16,24", "--heads", "2", "--head-dims", "8", "--masks", "causal",
               "--output", tmp_path)  # fmt: skip
    found = cli("sweep", "--impl", tmp_path / "wrong.py", "--impls", "one-key-more", *options)
    assert found.exit_code == 1
    assert found.stdout.count("each query sees one key too many") == 1, "of the first alone"
    assert "it should see 0 …" in found.stdout


def test_sweep_and_load_return_the_same_table(mine, tmp_path):
    table = attnbench.sweep(
        files=(str(mine),),
        output=tmp_path,
        name="r",
        settings={"device": "cpu", "min_time_s": 0.001, "max_time_s": 0.01},
        impls=["naive"],
        seq_lens=[8, 16],
        heads=(2,),
        head_dims=(8,),
    )
    assert table[["impl", "seq_len"]].drop_duplicates().shape == (4, 2)
    assert set(table["status"]) == {"ok"}
    timed = table[table["overhead_us"].notna()]
    assert list(zip(timed["impl"], timed["seq_len"], strict=True)) == [("naive", 8)]
    assert len({record.metrics["group"] for record in load_run(tmp_path / "r").records}) == 1
    assert attnbench.load("r", output=tmp_path).equals(table)
    assert attnbench.load(tmp_path / "r").equals(table)
    proposed = notes.remedy(load_run(tmp_path / "r"), table)
    words = shlex.split(proposed.partition("attnbench sweep ")[2])
    typed = sweep.make_context("sweep", words).params
    assert typed["files"] == (str(mine),)
    assert (typed["device"], set(typed["impls"]), typed["heads"]) == (
        "cpu",
        set(table["impl"]),
        (2,),
    )
    assert typed["seq_lens"] == (8, 16)
    assert typed["max_time"] == pytest.approx(0.03)

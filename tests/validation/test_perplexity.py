"""The model sees no future, a seed decides all of a training, and ratios are paired by seed."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Cli
from tests.validation.perplexity import session
from tests.validation.perplexity.model import Variant
from tests.validation.perplexity.session import Request, examine
from tests.validation.perplexity.summary import compared, ratio
from tests.validation.perplexity.text import is_held_out, split
from tests.validation.perplexity.training import Recipe, judged, train

SMALL = Recipe(width=16, blocks=2, length=16, batch=2, steps=4, judged=4, looks=2)
FILES = [
    (f"{name}.py", f'"""All of {name}."""\ndef f():\n    """{name} does {name}. \\d"""\n'.encode())
    for name in map(str, range(400))
]
VARIANTS = [Variant(position=p, heads=h) for p in ("sinusoidal", "rope") for h in (1, 2, 8)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_later_byte_changes_no_earlier_logits_and_an_earlier_one_changes_all(
    variant: Variant,
) -> None:
    torch.manual_seed(1)
    model = SMALL.model(variant).double()
    bytes_BL = torch.randint(256, (2, 24))
    other_BL = bytes_BL.clone()
    other_BL[:, 11] = (bytes_BL[:, 11] + 1) % 256
    moved_BL = (model(bytes_BL) - model(other_BL)).abs().amax(-1)
    assert moved_BL[:, :11].max() < 1e-12
    assert moved_BL[:, 11:].min() > 1e-6


@pytest.mark.parametrize("variant", VARIANTS[1::3], ids=lambda variant: variant.name)
def test_the_order_of_what_was_seen_counts(variant: Variant) -> None:
    """In one block: a second one could tell it from the mask alone."""
    model = replace(SMALL, blocks=1).model(variant)
    logits_BLV = model(torch.tensor([[65, 66, 67], [66, 65, 67]]))
    assert (logits_BLV[0, -1] - logits_BLV[1, -1]).abs().max() > 1e-3


def test_variants_start_from_the_same_weights_and_a_seed_repeats_its_training() -> None:
    text = split(FILES)
    starts = []
    for variant in VARIANTS:
        torch.manual_seed(5)
        starts.append(torch.cat([p.flatten() for p in SMALL.model(variant).parameters()]))
    assert all(torch.equal(start, starts[0]) for start in starts)
    first, again, other = (train(VARIANTS[-1], seed, SMALL, text) for seed in (7, 7, 8))
    figures = ("loss", "curve", "by_place", "beyond", "cut")
    assert [first[key] for key in figures] == [again[key] for key in figures]
    assert other["loss"] != first["loss"]
    assert [trained for trained, _ in first["curve"]] == [64, 128]


def test_beyond_and_cut_are_of_the_same_bytes(monkeypatch: Any) -> None:
    """With a model whose loss on a byte is the byte: both means are those of the second half."""
    monkeypatch.setattr(
        "tests.validation.perplexity.training.losses",
        lambda _model, window_BL: window_BL[:, 1:].double().requires_grad_(),
    )
    text = split(FILES)
    row = train(VARIANTS[0], 0, SMALL, text)
    assert row["beyond"] == pytest.approx(row["cut"])
    assert row["beyond"] != pytest.approx(row["loss"])
    halves = (sum(row["by_place"][:8]) / 8, row["beyond"])
    assert row["loss"] == pytest.approx(sum(halves) / 2)
    assert judged(SMALL.model(VARIANTS[0]), torch.full((40, 3), 9)).shape == (40, 2)


def test_text_is_split_by_file_and_a_docstring_counts_once() -> None:
    text = split([*FILES, ("again.py", FILES[0][1])])
    train_text, held_out = (bytes(x.tolist()).decode() for x in (text.train, text.held_out))
    names = {name for name, _ in FILES if is_held_out(name)}
    assert 20 <= len(names) <= 60
    for name, _ in FILES:
        stem = name.removesuffix(".py")
        told = (train_text.count(f"All of {stem}."), held_out.count(f"All of {stem}."))
        assert sum(told) == 1
        if stem != "0":  # whose docstrings stand in another file, too
            assert told == ((0, 1) if name in names else (1, 0))
    assert text.bytes_per_word == len(held_out) / len(held_out.split())


def test_ratios_are_paired_by_seed() -> None:
    """Differences −0.1, −0.2, −0.3: mean −0.2, standard error 0.1/√3, t(2) = 4.3027."""
    half = 4.302653 * 0.1 / math.sqrt(3)
    found = ratio([(1.9, 2.0), (2.8, 3.0), (0.7, 1.0)])
    assert found == pytest.approx([math.exp(x) for x in (-0.2, -0.2 - half, -0.2 + half)])
    alone, *unknown = ratio([(1.9, 2.0)])
    assert alone == pytest.approx(math.exp(-0.1))
    assert unknown == [None, None]


@pytest.mark.parametrize(
    ("spread", "shift", "verdict"),
    [(0.001, -0.1, "holds"), (0.001, 0.1, "refuted"), (0.2, -0.1, "inconclusive")],
)
def test_a_ratio_per_word_is_that_per_byte_to_the_power_of_bytes_per_word(
    spread: float, shift: float, verdict: str
) -> None:
    base, variant = VARIANTS[1], VARIANTS[4]
    rows = []
    for v, seed in itertools.product((base, variant), (2, 0, 1)):
        loss = 2 + 0.5 * seed + (v is variant) * (shift + spread * (seed - 1))
        figures = {"loss": loss, "beyond": 2 * loss, "curve": [(64, 3.0), (128, loss)]}
        rows.append({"position": v.position, "heads": v.heads, "seed": seed} | figures)
    found = compared(rows, variant, base, 6.0)
    assert found["per_byte"][0] == pytest.approx(math.exp(shift))
    assert found["per_word"][0] == pytest.approx(math.exp(6 * shift))
    assert found["beyond"][0] == pytest.approx(math.exp(2 * shift))
    assert found["curve"] == [[64, (1.0, 1.0, 1.0)], [128, found["per_byte"]]]
    assert found["lower"] == verdict
    assert found["noted"]["loss"] == pytest.approx(0.9205, abs=1e-4)


def test_a_folder_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: Any, cli: Cli) -> None:
    monkeypatch.setattr(session, "standard_library", lambda: split(FILES))
    monkeypatch.setattr(session, "ProcessPoolExecutor", Here)
    asked: Any = {"recipe": SMALL, "heads": (2,), "output": tmp_path}
    for seeds, told in ((1, 2), (3, 4), (3, 0)):
        lines: list[str] = []
        path, summary = examine(Request(seeds=seeds, **asked), lines.append)
        assert len(lines) == told
        (pair,) = summary["pairs"]
        assert (pair["per_byte"][1] is None) is (seeds == 1)
    page = (path / session.PAGE).read_text()
    assert "rope, 2 heads against sinusoidal, 2 heads" in page
    assert (path / "perplexity.svg").exists()
    refused = cli("perplexity", "--output", tmp_path, "--steps", 20)
    assert refused.exit_code == 2
    assert "choose another --name" in refused.output
    uneven = cli("perplexity", "--output", tmp_path, "--heads", "2,7")
    assert uneven.exit_code == 2
    assert "--heads 7" in uneven.output


class Here:
    """A pool that runs in this process."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def map(self, function: Any, *of: Any) -> Any:
        return map(function, *of)

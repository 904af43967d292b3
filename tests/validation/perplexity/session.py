"""`make validate PART=perplexity` from options to a finished folder."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnbench.errors import UsageError
from attnbench.version import __version__
from tests.validation.page import markdown, write_texts
from tests.validation.perplexity.draw import draw
from tests.validation.perplexity.model import Variant
from tests.validation.perplexity.summary import summarise
from tests.validation.perplexity.tables import facts, tables
from tests.validation.perplexity.text import standard_library
from tests.validation.perplexity.training import Recipe, train
from tests.validation.sittings import sitting

Figures = dict[str, Any]
SUMMARY, PAGE = "summary.json", "perplexity.md"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `make validate PART=perplexity` was asked for: `seeds` trainings of each variant.

    The folder keeps the trainings by one recipe on one text.

    Raises:
        UsageError: heads that do not cut the width into even parts, as RoPE needs them.
    """

    seeds: int = 4
    heads: tuple[int, ...] = (1, 2, 8)
    recipe: Recipe = field(default_factory=Recipe)
    jobs: int = 2
    output: Path = Path("results")
    name: str = "selftest-perplexity"

    def __post_init__(self) -> None:
        width = self.recipe.width
        if uneven := [str(heads) for heads in self.heads if width % (2 * heads)]:
            raise UsageError(
                f"--heads {', '.join(uneven)}: the width {width} has to be even parts for each head"
            )

    @property
    def variants(self) -> list[Variant]:
        """RoPE with each number of heads, and sinusoids with the most."""
        sinusoidal = Variant(position="sinusoidal", heads=max(self.heads))
        return [sinusoidal, *(Variant(position="rope", heads=h) for h in sorted(self.heads))]


def examine(request: Request, tell: Callable[[str], None]) -> tuple[Path, Figures]:
    """Make the trainings that the folder lacks, and count; an interrupt ends them, and is noted.

    Raises:
        StoreError: the folder cannot be written, or holds trainings on another text or by another
            recipe.
    """
    path, text = request.output / request.name, standard_library()
    asked = {"recipe": asdict(request.recipe), "text": text.sha256}
    wanted = list(itertools.product(range(request.seeds), request.variants))

    def missing(done: list[Figures]) -> Iterator[Figures]:
        have = [_made(row) for row in done]
        todo = [each for each in wanted if each not in have]
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(request.jobs, spawn) as pool:
            made = pool.map(_train, todo, itertools.repeat(request.recipe))
            for number, row in enumerate(made, start=1):
                tell(f"training {number} of {len(todo)}: {row['wall_s']:.0f} s")
                yield row

    model = request.recipe.model(request.variants[0])
    rows, interrupted = sitting(path, asked, missing)
    rows = [row for row in rows if _made(row) in wanted]
    summary = asked | {
        "attnbench": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes_train": len(text.train),
        "bytes_held_out": len(text.held_out),
        "bytes_per_word": text.bytes_per_word,
        "interrupted": interrupted,
    }
    summary |= summarise(rows, request.variants, text.bytes_per_word)
    picture = draw(summary, path)
    title = f"make validate PART=perplexity: {path.name}"
    page = markdown(title, tables(summary), facts(summary), picture=picture)
    write_texts(path, {SUMMARY: json.dumps(summary, indent=1) + "\n", PAGE: page})
    return path, summary


def _made(row: Figures) -> tuple[int, Variant]:
    return row["seed"], Variant(position=row["position"], heads=row["heads"])


def _train(todo: tuple[int, Variant], recipe: Recipe) -> Figures:
    """One training, in one thread of a process of its own."""
    torch.set_num_threads(1)
    seed, variant = todo
    return train(variant, seed, recipe, standard_library())

"""Which command would measure what a claim needs."""

from __future__ import annotations

from attnbench.analysis.claims import statement
from attnbench.analysis.claims.reading import EXTREMES, PAIRED
from attnbench.analysis.claims.statement import Quantity, Range, Where

# Sizes that serve where a claim asks for an extreme, a range, or growth; others take `1,2`.
_USUAL = {"seq_len": "1,128..2048", "heads": "1,2,4", "head_dim": "64,128,256", "mask": "full"}
_FLAGS = {name: f"--{name.replace('_', '-')}s" for name in PAIRED} | {
    "workload": "--workload", "device": "--device", "pass": "--passes", "batch": "--batch-sizes",
    "heads": "--heads", "kv_heads": "--kv-heads", "new_tokens": "--new-tokens",
}  # fmt: skip


def command(quantity: Quantity) -> str | None:
    """The command that would measure what a quantity needs; None where none does."""
    if isinstance(quantity, statement.Unmeasured):
        return None
    if isinstance(quantity, statement.Share):
        return "attnbench verify --sweep"
    growing = isinstance(quantity, (statement.Exponent, statement.Crossover))
    varied = ["seq_len"] * growing + getattr(quantity, "free", [])
    ways: list[Where] = [getattr(quantity, name, {}) for name in ("first", "second")]
    sides = [{**quantity.where, **way} for way in ways]
    if len({str(side.get("workload")) for side in sides}) > 1:
        return " and ".join(_sweep([side], []) for side in sides)
    return _sweep(sides, varied)


def _sweep(sides: list[Where], varied: list[str]) -> str:
    """A sweep of all values that the sides name, and of usual sizes where they name none."""
    words = ["attnbench sweep"]
    for name, flag in _FLAGS.items():
        selectors = [side[name] for side in sides if name in side]
        values = [v for s in selectors for v in (s if isinstance(s, list) else [s])]
        known = [str(v) for v in values if not isinstance(v, Range) and v not in EXTREMES]
        if name in varied or len(known) < len(values):
            known = [_USUAL.get(name, "1,2")]
        words += [f"{flag} {','.join(dict.fromkeys(known))}"] * bool(known)
    return " ".join(words)

"""Whether this machine is fit to measure: a diagnosis, turned into findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attnbench.base import units
from attnbench.machine.symptoms import Finding, Level, symptoms

# A batch of 1 ms, the shortest that is timed, is then some 1000 ticks. Before Hopper events tick in
# 1.024 µs.
RESOLUTION_US = {"cpu": 1.0, "cuda": 1.1}
CALL_US = 1.0
COLD_RATIO = 1.05
HIDDEN_SHARE = 0.9  # of the time to issue a call
SEEN = (1.03, 1.07)  # what the interval of a slowdown of 1.05 must touch
ALIKE = (0.99, 1.01)  # what the interval of identical work must touch
NOISE_WARNING, NOISE_FAIL = 0.05, 0.20

_AGAIN = "close what else runs, then again: attnbench doctor"
_NO_CLOCK = "no time from here is worth anything: use another machine, or report this"


def judge(diagnosis: dict[str, Any]) -> tuple[Finding, ...]:
    """The findings of a diagnosis: first all self-tests, then those of the machine."""
    found: list[Finding] = []
    for name, outcome in diagnosis["tests"].items():
        if "raised" in outcome:
            found.append(_test(name, False, f"could not run: {outcome['raised']}", None, _NO_CLOCK))
        else:
            found += _RULES[name](outcome, diagnosis["facts"]["device"])
    return (*found, *symptoms(diagnosis))


def _test(
    name: str, passed: bool, fact: str, limit: str | None, remedy: str, otherwise: Level = "fail"
) -> Finding:
    level: Level = "ok" if passed else otherwise
    needed = None if passed else remedy
    return Finding(kind="test", name=name, level=level, fact=fact, limit=limit, remedy=needed)


def _clock(seen: dict[str, Any], device: str) -> Iterator[Finding]:
    finest_us, limit_us = seen["seen_us"], RESOLUTION_US[device]
    fine = finest_us is not None and finest_us <= limit_us and not seen["negative"]
    fact = f"{units.time(finest_us)} (claimed: {units.time(seen['claimed_us'])})"
    if seen["negative"]:
        fact += f", {seen['negative']} readings below 0"
    limit = f"≤ {units.time(limit_us)}"
    yield _test("clock resolution", fine, fact, limit, _NO_CLOCK)
    call_us = seen["call_us"]
    yield _test(
        "clock overhead",
        call_us <= CALL_US,
        f"{units.time(call_us)} a call, {units.time(seen['block_us'])} a block",
        f"≤ {units.time(CALL_US)} a call",
        "calls shorter than 100 times this look slower than they are: take larger cases",
        otherwise="warning",
    )


def _cold(seen: dict[str, Any], device: str) -> Iterator[Finding]:
    yield _test(
        "cold told from warm",
        seen["low"] is not None and seen["low"] > COLD_RATIO,
        f"{units.time(seen['cold_us'])} and {units.time(seen['warm_us'])}:"
        f" {units.ratio(seen['ratio'])} [{units.ratio_interval(seen['low'], seen['high'])}]",
        f"interval above {COLD_RATIO}",
        "times with --l2 cold may be those of a warm cache: do not quote them",
    )


def _planted(seen: dict[str, Any], device: str) -> Iterator[Finding]:
    slowed, twin = seen["slowed"], seen["twin"]
    found = _touches(slowed, SEEN) and not slowed["low"] <= 1 <= slowed["high"]
    limit = f"excludes 1, meets {SEEN[0]}–{SEEN[1]}"
    yield _test("slowdown of 5 % seen", found, _interval(slowed), limit, _AGAIN)
    limit = f"meets {ALIKE[0]}–{ALIKE[1]}"
    yield _test("identical work alike", _touches(twin, ALIKE), _interval(twin), limit, _AGAIN)


def _touches(seen: dict[str, Any], band: tuple[float, float]) -> bool:
    return seen["low"] is not None and bool(seen["low"] <= band[1] and seen["high"] >= band[0])


def _interval(seen: dict[str, Any]) -> str:
    if seen["low"] is None:
        return f"no interval from {seen['rounds']} rounds"
    low, high = (f"{seen[end]:.4f}" for end in ("low", "high"))
    return f"ratio {seen['ratio']:.4f} [{low}–{high}], {seen['rounds']} rounds"


def _noise(seen: dict[str, Any], device: str) -> Iterator[Finding]:
    width = seen["width"]
    fact = "no interval" if width is None else f"median ± {100 * width:.2f} %"
    fact += f", {seen['samples']} samples ({seen['discarded']} discarded)"
    limit = f"± {100 * NOISE_WARNING:.0f} %, fit up to {100 * NOISE_FAIL:.0f} %"
    loud: Level = "fail" if width is None or width > NOISE_FAIL else "warning"
    calm = width is not None and width <= NOISE_WARNING
    yield _test("noise in 10 s", calm, fact, limit, _AGAIN, loud)


def _launch(seen: dict[str, Any], device: str) -> Iterator[Finding]:
    """On a GPU alone."""
    hidden_us, enqueue_us = seen["hidden_us"], seen["enqueue_us"]
    yield _test(
        "launch hidden",
        hidden_us >= HIDDEN_SHARE * enqueue_us,
        f"{units.time(hidden_us)} of {units.time(enqueue_us)}, by a flush of"
        f" {units.time(seen['flush_us'])} and a spin",
        f"≥ {units.percent(HIDDEN_SHARE)}",
        "times of short calls have waiting for the host in them: --timer graph",
        otherwise="warning",
    )


_RULES: dict[str, Callable[[dict[str, Any], str], Iterator[Finding]]] = {
    "clock": _clock,
    "cold": _cold,
    "planted": _planted,
    "noise": _noise,
    "launch": _launch,
}

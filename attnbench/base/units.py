"""How numbers and tables are written for people: the only module that formats them.

What is unknown (None, NaN, pandas' NA) is written "–".
"""

from __future__ import annotations

import functools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, ParamSpec

from attnbench.errors import UsageError

UNKNOWN = "–"

_Units = tuple[tuple[float, str], ...]
TIMES: _Units = ((1e-3, "ns"), (1.0, "µs"), (1e3, "ms"), (1e6, "s"))
_RATES: _Units = ((1e-6, "MFLOP/s"), (1e-3, "GFLOP/s"), (1.0, "TFLOP/s"), (1e3, "PFLOP/s"))
_BANDWIDTHS: _Units = ((1e-3, "MB/s"), (1.0, "GB/s"), (1e3, "TB/s"))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
P = ParamSpec("P")


def is_unknown(value: Any) -> bool:
    """True for None, NaN and whatever else does not equal itself (such as pandas' NA)."""
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas' NA refuses to be true or false
        return True


def _or_unknown(write: Callable[P, str]) -> Callable[P, str]:
    """The function that writes UNKNOWN where an argument is."""

    @functools.wraps(write)
    def written(*args: P.args, **options: P.kwargs) -> str:
        return UNKNOWN if any(map(is_unknown, args)) else write(*args, **options)

    return written


@_or_unknown
def digits(value: Any, count: int = 3) -> str:
    """Return `value` with `count` significant digits and no exponent: 0.0512, 1.23, 123, 4567."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{count - 1}e}".split("e")
    return f"{float(mantissa) * 10 ** int(exponent):.{max(0, count - 1 - int(exponent))}f}"


def unit(value: float, units: _Units) -> tuple[float, str]:
    """Return the unit of these in which a value is written: its size, and its name."""
    # 999.6 µs would round to 1000 µs: 999.5 is where three digits roll over.
    return next((each for each in units if abs(value) < 999.5 * each[0]), units[-1])


@_or_unknown
def _scaled(value: Any, units: _Units) -> str:
    scale, name = unit(value, units)
    return f"{digits(value / scale)} {name}".replace("-", "−")


def time(time_us: float | None) -> str:
    """Return a duration given in microseconds: `1.23 ms`."""
    return _scaled(time_us, TIMES)


@_or_unknown
def time_interval(low_us: Any, high_us: Any) -> str:
    """Return `1.20–1.31 ms`, both ends in the unit of the upper one."""
    scale, name = unit(max(high_us, 0.0), TIMES)
    return f"{digits(low_us / scale)}–{digits(high_us / scale)} {name}"


@_or_unknown
def seconds(value_s: Any) -> str:
    """Return a wall time given in seconds: `0.35 s`, `42.0 s`, `12 min 3 s`, `2 h 5 min`."""
    whole = round(value_s)
    if whole < 100:
        return f"{value_s:.{2 if value_s < 10 else 1}f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@_or_unknown
def size(bytes_: Any) -> str:
    """Return a number of bytes in powers of 1024: `512 B`, `8.0 MiB`."""
    value, step = float(bytes_), 0
    while abs(value) >= 1023.95 and step < len(_BYTES) - 1:
        value, step = value / 1024, step + 1
    return f"{value:.0f} B" if step == 0 else f"{value:.1f} {_BYTES[step]}"


def flop_rate(tflops: float | None) -> str:
    """Return a rate given in TFLOP/s: `51.2 GFLOP/s`, `615 TFLOP/s`."""
    return _scaled(tflops, _RATES)


def rate_unit(tflops: float) -> tuple[float, str]:
    """Return the unit in which `flop_rate` writes a rate: in TFLOP/s, and its name."""
    return unit(tflops, _RATES)


def bandwidth(gbps: float | None) -> str:
    """Return a rate given in GB/s (10⁹ bytes): `31.2 GB/s`, `4.80 TB/s`."""
    return _scaled(gbps, _BANDWIDTHS)


@_or_unknown
def ratio(value: Any) -> str:
    """Return a ratio: `4.10×`."""
    return f"{digits(value)}×"


@_or_unknown
def ratio_interval(low: Any, high: Any) -> str:
    """Return the interval of a ratio: `3.90–4.31×`."""
    return f"{digits(low)}–{digits(high)}×"


@_or_unknown
def percent(fraction: Any) -> str:
    """Return a fraction as a percentage: `8.3 %`."""
    return f"{100 * fraction:.1f} %".replace("-", "−")


@_or_unknown
def change(of_ratio: Any) -> str:
    """Return a ratio as the change it is: 1.104 is `+10.4 %`."""
    share = 100 * (of_ratio - 1)
    text = f"{share:+.1f}" if abs(share) < 99.95 else f"{share:+.0f}"
    return f"{text} %".replace("-", "−") if float(text) else "0.0 %"


@_or_unknown
def change_interval(low: Any, high: Any) -> str:
    """Return both ends of an interval of ratios as changes: `+9.8 … +11.1 %`."""
    return f"{change(low).removesuffix(' %')} … {change(high)}"


def delta(write: Callable[[Any], str]) -> Callable[[Any], str]:
    """What writes a difference with its sign: `+1.20 ms`, `−35.0 MiB`, `0`."""
    return lambda value: f"{'−+'[value > 0]}{write(abs(value))}" if value else "0"


def brief_percent(share: float) -> str:
    """Return a share in as few digits as tell it: `10 %`, `3.3 %`, `0.5 %`."""
    value = 100 * share
    rounded = float(f"{value:.{2 if abs(value) < 10 else 3}g}")
    return f"{rounded:g} %".replace("-", "−")


@_or_unknown
def count(value: Any) -> str:
    """Return a count with thousands apart: `12,345`."""
    return f"{int(value):,}"


def counted(number: int, what: str) -> str:
    """Return how many there are of what: `1 round`, `2 rounds`."""
    return f"{number} {what}{'s' * (number != 1)}"


def length(n: float) -> str:
    """Return a sequence length as on an axis: 128, 512, 1k, 2k, 128k, 1M; 1000 stays 1000."""
    whole = round(n)
    for step, suffix in ((2**20, "M"), (2**10, "k")):
        if whole >= step and whole % step == 0:
            return f"{whole // step}{suffix}"
    return str(whole)


def moment(iso: str | None) -> str:
    """Return an ISO 8601 time to the minute: `2026-11-21 01:02 UTC`; other texts as they are."""
    if not iso:
        return UNKNOWN
    try:
        when = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    return f"{when:%Y-%m-%d %H:%M} {when.tzname() or ''}".strip()


GLUE = "\ue000"  # stands for the blank between a number and its unit while lines are broken
_UNIT = re.compile(r"(?<=\d) (?=[%×]|(?:[nmµ]?s|min|[KMGT]?i?B|doublings?)\b)|(?<=±) (?=\d)")


def glued(text: str) -> str:
    """The text with each number and its unit as one word; `GLUE` is to become a blank again."""
    return _UNIT.sub(GLUE, text)


def filled(text: str, width: int, hang: int) -> str:
    """The text broken between words, `hang` blanks before each line but the first."""
    lines = textwrap.fill(
        glued(text),
        width,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(GLUE, " ")


def escape(text: str) -> str:
    """Make a text safe inside a table cell: no pipe, no line break, no HTML, no emphasis."""
    flat = re.sub(r"\s+", " ", text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([|`*_\[\]\\])", r"\\\1", flat)


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool] | None = None
) -> str:
    """Return a GitHub table; columns with `numbers`, or after the first one, are aligned right."""
    right = numbers or [i > 0 for i in range(len(header))]
    rule = ["---:" if number else "---" for number in right]
    lines = [list(map(escape, header)), rule, *([escape(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bullets(sentences: Iterable[str]) -> str:
    """Return a Markdown list; of empty sentences nothing."""
    return "\n".join(f"- {escape(sentence)}" for sentence in sentences if sentence)


def tally(words: Iterable[str], order: Iterable[str]) -> str:
    """Return how often each word of `order` came, if at all: `1 regressed, 7 ok`."""
    of = Counter(words)
    return ", ".join(f"{of[word]} {word}" for word in order if of[word])


def by_reason(reasons: Mapping[str, str]) -> str:
    """Names by their reason: `a, b: runs on cuda; c: too large`."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(each)}: {reason}" for reason, each in names.items())


def split_common(texts: Sequence[str], *, keep: str = "") -> tuple[str, list[str]]:
    """Return the words that all texts have, in the order of the first, and each text without them.

    Words that begin with `keep` stay.
    """
    words = [text.split() for text in texts]
    every = [word for word in (words[0] if words else []) if all(word in own for own in words)]
    common = [word for word in every if not (keep and word.startswith(keep))]
    return " ".join(common), [" ".join(w for w in own if w not in common) for own in words]


# What reads options: each raises UsageError, which names the flag and what it takes.

_LARGEST = 1 << 40
_DURATION = re.compile(
    r"(?:([\d.]+)\s*h)?\s*(?:([\d.]+)\s*m(?:in)?)?\s*(?:([\d.]+)\s*s?)?", re.ASCII
)
_MOST_DIGITS = 20  # Python refuses to read numbers of thousands of digits


def parse_sizes(text: str, flag: str) -> list[int]:
    """Read `128,256,1k` or `128..8k` (doubling, k = 1024), or a mix; duplicates are dropped."""
    sizes: list[int] = []
    for part in parse_names(text, flag):
        first, dots, last = part.partition("..")
        start = _size(first, part, flag)
        sizes += _doubling(start, _size(last, part, flag), flag) if dots else [start]
    return list(dict.fromkeys(sizes))


ALL_THREADS = 0  # as many as torch takes by itself


def parse_threads(text: str, flag: str) -> list[int]:
    """Read `1,2,all`; `all` is `ALL_THREADS`."""
    found: list[int] = []
    for part in parse_names(text, flag):
        found += [ALL_THREADS] if part == "all" else parse_sizes(part, flag)
    if max(found) > 1024:
        raise UsageError(f"{flag} is at most 1024, not {max(found)}")
    return list(dict.fromkeys(found))


def parse_names(text: str, flag: str) -> list[str]:
    """Read `naive,sdpa`; duplicates are dropped."""
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise UsageError(f"{flag} has an empty element in {text!r}; write it as a,b,c")
    return list(dict.fromkeys(names))


def parse_positive(text: str, flag: str) -> float:
    """Read a finite number above 0."""
    if not (value := _number(text.strip())):
        raise UsageError(f"{flag} takes a number above 0, not {text[:40]!r}")
    return value


def parse_scales(text: str, flag: str, word: str = "default") -> list[float | None]:
    """Read `default,0.5`; `default`, or another word, is None."""
    numbers = {part: _number(part) for part in parse_names(text, flag) if part != word}
    if wrong := next((part for part, number in numbers.items() if not number), None):
        raise UsageError(f"{flag} takes {word} or a number above 0, not {wrong[:40]!r}")
    return [numbers.get(part) for part in parse_names(text, flag)]


def parse_share(text: str, flag: str) -> float:
    """Read `10%`, `10 %` or `0.1` as 0.1."""
    number = text.strip()
    percent = number.endswith("%")
    value = _number(number.removesuffix("%").strip())
    if value is None:
        raise UsageError(f"{flag} takes a share such as 10% or 0.1, not {text[:40]!r}")
    return value / 100 if percent else value


def parse_growth(text: str, flag: str) -> dict[str, float]:
    """Read `300%` as the share of `flops` and `memory`, `flops=1%,memory=300%` as that of each."""
    if "=" not in text:
        return dict.fromkeys(("flops", "memory"), parse_share(text, flag))
    named = dict(part.partition("=")[::2] for part in parse_names(text, flag))
    if not named.keys() <= {"flops", "memory"}:
        raise UsageError(f"{flag} takes flops and memory, such as memory=300%, not {text[:40]!r}")
    return {name: parse_share(share, flag) for name, share in named.items()}


def parse_shard(text: str, flag: str) -> tuple[int, int]:
    """Read `3/8` as (3, 8)."""
    found = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", text, re.ASCII)
    if found and (shard := (int(found[1]), int(found[2])))[0] <= shard[1]:
        return shard
    raise UsageError(f"{flag} takes a part and of how many, from 1/8 to 8/8, not {text[:40]!r}")


_MEMORY = {"%": 0.01, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_MEMORY |= {f"{name}IB": 1024.0**power for power, name in enumerate("KMGT", 1)}
_LEAST_BYTES = 1 << 26


def parse_memory(text: str, flag: str) -> float:
    """Read `8GB` or `8GiB` as bytes, `80%` as the share 0.8, and `none` as 0."""
    name = text.strip().lstrip("0123456789. ")
    number = _number(text.strip().removesuffix(name).strip() or "0")
    value = (number or 0.0) * _MEMORY.get(name.upper(), 0.0)
    if name != "none" and not 0 < value <= (1 if name == "%" else 1e18):
        raise UsageError(f"{flag} takes 8GB, 500MiB, 80% or none, not {text[:40]!r}")
    if name not in ("%", "none") and value < _LEAST_BYTES:
        raise UsageError(f"{flag} {text.strip()}: a worker needs {_LEAST_BYTES >> 20} MiB at least")
    return value


def parse_duration(text: str, flag: str) -> float:
    """Read `90s`, `5m`, `2m30s`, `1h` or plain seconds: the time in seconds."""
    found = _DURATION.fullmatch(text.strip())
    parts = [_number(part or "0") for part in found.groups()] if found else []
    if None in parts or not any(parts):
        raise UsageError(f"{flag} takes a time from 1s on, such as 90s or 5m, not {text[:40]!r}")
    return sum(unit_s * (part or 0.0) for unit_s, part in zip((3600, 60, 1), parts, strict=True))


def _number(text: str) -> float | None:
    """A finite number from 0 on in plain or scientific notation, else None."""
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None


def _size(text: str, part: str, flag: str) -> int:
    digits = text.strip().removesuffix("k")
    if not (digits.isascii() and digits.isdecimal()) or not digits.strip("0"):
        raise UsageError(
            f"{flag} takes whole numbers of at least 1, such as 128,256 or 1k..8k, not {part!r}"
        )
    unit = 1024 if text.strip().endswith("k") else 1
    if len(digits) > _MOST_DIGITS or int(digits) * unit > _LARGEST:
        raise UsageError(f"{flag} is at most 2^40, not {part[:40]!r}")
    return int(digits) * unit


def _doubling(start: int, end: int, flag: str) -> list[int]:
    if end < start:
        raise UsageError(f"{flag} {start}..{end} is reversed: {end}..{start}")
    sizes = [start << step for step in range((end // start).bit_length())]
    if sizes[-1] != end:
        raise UsageError(
            f"{flag} {start}..{end} doubles and must land on its end: {start}..{sizes[-1]}"
            f" or {start}..{2 * sizes[-1]}"
        )
    return sizes

"""What `check` prints is read by kernel."""

from tests.validation import wrong
from tests.validation.wrong_kernels import RIGHT, SAYS

ROWS = [
    {"impl": name, "verdict": {"verdict": verdict}, "passed": {"value": passed},
     "failed": {"value": failed}}
    for name, verdict, passed, failed in (
        ("heads-modulo", "FAILED", 41, 60), ("right-as-view", "right (6 of 366)", 6, 0),
    )
]  # fmt: skip
FOUND = {"sections": [
    {"section": "heads-modulo", "parts": [
        {"verdict": "wrong", "reason": "o is wrong: 59 checks, only grouped heads"},
        {"text": ["query head h uses key/value head h mod G, not h // (H / G)",
                  "padding, causal: attention forward n=48 B=1 H=4 G=2 D=32 float32 causal",
                  "batch 0, head 1, query 2, dim 1: expected -1.014, got 1.508",
                  "query 2 misses keys 4 … 9; it should see 0 … 12"]},
        {"verdict": "raised", "reason": "it raises ValueError: 1 check"},
    ]},
    {"section": "Implementations", "parts": [
        {"table": ROWS}, {"text": ["right-as-view returns the same memory at each call"]},
    ]},
]}  # fmt: skip


def test_sentences_are_read_and_the_name_of_the_check_that_is_shown_is_not():
    heads, view = wrong.read(FOUND, ["heads-modulo", "right-as-view"])
    assert (heads.verdict, heads.passed, heads.failed) == ("FAILED", 41, 60)
    assert heads.sentences == (
        "o is wrong: 59 checks, only grouped heads",
        "query head h uses key/value head h mod G, not h // (H / G)",
        "query 2 misses keys 4 … 9; it should see 0 … 12",
        "it raises ValueError: 1 check",
    )
    assert heads.explained
    assert heads.well
    assert view.sentences == ("right-as-view returns the same memory at each call",)
    assert view.well


def test_kernels_are_told_apart_by_name():
    assert len(SAYS) >= 24
    assert len(RIGHT) >= 6
    assert not set(RIGHT) & set(SAYS)

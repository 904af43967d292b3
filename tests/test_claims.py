"""The claims ledger: every identity decides itself and can fail; the command says what it found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnbench.claims import cost, exact, examples, formulas, recurrent, rotary, sinusoidal, softmax
from attnbench.claims.claim import CLAIMS, NOTES, Answer, Claim
from attnbench.claims.ledger import exit_code, ledger
from attnbench.errors import UnknownNameError
from tests import synthetic
from tests.claimed import OF_RUN, ask, decode_cells, metric
from tests.conftest import Cli, Refused

IDENTITIES = [name for name, claim in CLAIMS.items() if claim.kind == "identity"]


@pytest.mark.parametrize("name", IDENTITIES)
def test_every_identity_reaches_the_verdict_that_agrees_with_theory(name):
    finding = ask(name)
    assert finding.verdict == CLAIMS.get(name).expected, finding.reason
    assert finding.figures


@pytest.mark.parametrize("name", OF_RUN)
def test_what_needs_a_run_is_inconclusive_without_one_and_says_what_to_do(name):
    finding = ask(name)
    assert finding.verdict == "inconclusive"
    assert "attnbench verify --sweep" in finding.reason


def test_every_statement_that_is_not_right_says_what_is():
    for name, claim in CLAIMS.items():
        assert (claim.right is None) == (claim.theory in ("right", "open")), name
        assert claim.text != claim.right
        assert claim.section
        assert claim.note in NOTES


def test_all_five_notes_are_in_the_ledger():
    assert {claim.note for _, claim in CLAIMS.items()} == set(NOTES)


@pytest.mark.parametrize(
    ("name", "scores"), [("example-softmax", [2.4, 1.2, 0.3]), ("example-cat", examples.CAT / 8)]
)
def test_the_figures_said_to_be_right_are_those_computed(name, scores):
    powers = np.exp(np.array(scores))
    assert exact.listed(powers / powers.sum()) in str(CLAIMS.get(name).right)


def test_a_wrong_statement_without_the_right_one_cannot_be_registered():
    claim = CLAIMS.get("example-softmax")
    with pytest.raises(ValueError, match="example-softmax"):
        replace(claim, right=None)
    with pytest.raises(ValueError, match="no note"):
        replace(claim, note="005.txt")


def test_a_flipped_sign_in_the_right_expansion_is_noticed(monkeypatch):
    monkeypatch.setattr(rotary, "RIGHT_SIGN", 1)
    assert ask("rope-expansion").verdict == "inconclusive"
    assert not CLAIMS.get("rope-expansion").agrees(ask("rope-expansion"))


def test_were_the_printed_expansion_right_it_would_hold(monkeypatch):
    monkeypatch.setattr(rotary, "PRINTED_SIGN", -1)
    finding = ask("rope-expansion")
    assert finding.verdict == "holds"
    assert exit_code([(CLAIMS.get("rope-expansion"), finding)]) == 1


def transposed(dims: int, place: float) -> exact.Array:
    return ROTATION(dims, place).T


ROTATION, SOFTMAX = formulas.rotation_matrix, formulas.softmax


def unturned_odd(x: exact.Array, places: exact.Array) -> exact.Array:
    found = formulas.rotated(x, places)
    found[..., 1::2] = x[..., 1::2]
    return found


def shifted(width: int, shift: float) -> exact.Array:
    return formulas.rotation_matrix(width, shift)


def unnormalised(scores: exact.Array) -> exact.Array:
    return SOFTMAX(scores) * 1.001


MUTANTS: list[tuple[str, Any, str, Any]] = [
    ("rope-matrix", formulas, "rotation_matrix", transposed),
    ("rope-relative", rotary, "rotated", unturned_odd),
    ("sinusoidal-projection", sinusoidal, "shift_matrix", shifted),
    ("softmax-rows", softmax, "softmax", unnormalised),
    ("example-weights", examples, "SCALED", examples.SCALED * math.sqrt(2)),
    ("example-output", examples, "V", examples.V.T),
    ("online-softmax", softmax, "attention", lambda q, k, v: formulas.attention(q, k, v[::-1])),
    ("scores-12-million", np, "broadcast_to", lambda _, shape: np.zeros((8, 10, 10))),
    ("long-sequences", cost, "core_flops", lambda case, pairs: case.seq_len * 10**6),
    ("path-length", recurrent, "attention", lambda q, k, v: np.roll(q, 1, axis=0)),
    ("scale-variance", softmax, "score_variance", lambda d, scale: (d * scale, 1e-3)),
]


@pytest.mark.parametrize(("name", "module", "attribute", "mutant"), MUTANTS)
def test_an_identity_with_a_wrong_formula_is_refuted(name, module, attribute, mutant, monkeypatch):
    monkeypatch.setattr(module, attribute, mutant)
    finding = ask(name)
    assert finding.verdict == "refuted"
    assert not CLAIMS.get(name).agrees(finding)


@pytest.mark.parametrize("name", ["total-uncached", "softmax-scale", "combined-softmax"])
def test_a_wrong_statement_is_refuted_by_figures_beside_those_of_the_right_one(name):
    numbers = [value for value in ask(name).figures.values() if isinstance(value, (int, float))]
    assert len(numbers) >= 2


@pytest.mark.parametrize(
    ("printed", "corrected", "verdict"),
    [
        (1e-13, None, "holds"),
        (1e-7, None, "inconclusive"),
        (0.5, None, "refuted"),
        (0.5, 1e-14, "refuted"),
        (0.5, 0.5, "inconclusive"),
        (float("nan"), None, "inconclusive"),
        (0.5, float("nan"), "inconclusive"),
    ],
)
def test_the_error_alone_decides(printed, corrected, verdict):
    assert exact.decide(printed, corrected).verdict == verdict


def test_shapes_that_differ_are_an_infinite_error_and_no_broadcast():
    assert exact.error(np.zeros((2, 1)), np.zeros((2, 2))) == math.inf


def test_without_a_run_the_command_checks_identities_and_says_what_a_run_would_add(
    cli: Cli, tmp_path
):
    result = cli("claims", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert "no run" in result.stdout
    assert "attnbench verify --sweep" in result.stdout
    assert "rope-expansion" in result.stdout
    assert "[q₁k₂ − q₂k₁] sin((m−n)θ)" in result.stdout


def test_the_latest_run_is_taken(cli: Cli, tmp_path):
    synthetic.write_run(tmp_path, "mine", decode_cells())
    result = cli("claims", "--output", tmp_path, "--only", "cached-flops,example-softmax", "--json")
    found = json.loads(result.stdout)
    assert found["run"] == "mine"
    assert [row["finding"]["verdict"] for row in found["claims"]] == ["holds", "refuted"]
    assert result.exit_code == 0


def test_a_verdict_against_theory_exits_1_and_is_named(cli: Cli, tmp_path):
    lying = [metric("flops_counted", lambda c, v: v + c.seq_len**2)(r) for r in decode_cells()]
    synthetic.write_run(tmp_path, "lying", lying)
    result = cli("claims", "lying", "--output", tmp_path, "--only", "cached-flops,cache-grows")
    assert result.exit_code == 1
    assert "against theory: cached-flops" in result.stdout


def test_no_verdict_at_all_exits_3(cli: Cli, tmp_path):
    result = cli("claims", "--output", tmp_path, "--only", "cached-time,rope-perplexity")
    assert result.exit_code == 3
    assert "not measured: needs a trained model" in result.stdout


def test_an_unknown_claim_is_one_line_with_the_nearest(cli: Cli, assert_refused: Refused, tmp_path):
    result = cli("claims", "--output", tmp_path, "--only", "rope-expansoin")
    assert_refused(
        result, "unknown claim 'rope-expansoin' (--only)", "did you mean 'rope-expansion'"
    )


@pytest.mark.parametrize("name", ["latest", "missing"])
def test_a_run_that_is_not_there_is_one_line(name, cli: Cli, assert_refused: Refused, tmp_path):
    assert_refused(cli("claims", name, "--output", tmp_path), "run")


def test_json_holds_no_number_that_is_none(cli: Cli, tmp_path):
    synthetic.write_run(tmp_path, "whole", decode_cells())
    result = cli(
        "claims", "--output", tmp_path, "--json", "--only", ",".join(CLAIMS.names()[:60:7])
    )

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    json.loads(result.stdout, parse_constant=refuse)


def test_an_unknown_name_is_refused_before_anything_is_checked():
    with pytest.raises(UnknownNameError):
        ledger(None, ["nothing-like-it"])


def test_a_figure_that_is_no_number_is_unknown():
    answer = Answer(verdict="refuted", reason="shapes differ", figures={"error": math.inf})
    claim = replace(CLAIMS.get("rope-matrix"), check=lambda _: answer)
    assert claim.finding(None).figures == {"error": None}


def test_an_undecided_identity_counts_as_a_contradiction():
    claim: Claim = CLAIMS.get("rope-relative")
    undecided = replace(ask("rope-relative"), verdict="inconclusive")
    assert exit_code([(claim, undecided)]) == 1

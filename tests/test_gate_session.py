"""A whole gate run: real checks in real processes; rounds as they could have been measured."""

from __future__ import annotations

import random
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from attnbench.errors import ExitCode, UsageError
from attnbench.execution.settings import Settings
from attnbench.gate.decide.data import Rules, Version
from attnbench.gate.decide.verdict import decide
from attnbench.gate.run import checking, session
from attnbench.gate.run.session import GateRequest, run_gate
from attnbench.gate.run.turns import ChangedError
from attnbench.planning.plan import Axes
from attnbench.report.gate import texts
from attnbench.schema.record import Cell
from tests.gate_runs import a_round

HEADER = "import torch\nfrom attnbench.api import attention\n"
RIGHT = """
    @attention("{name}")
    def {name}(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
        return torch.nn.functional.scaled_dot_product_attention(
            q_BHLD, k_BGSD, v_BGSV, is_causal=causal, scale=scale
        )
"""
KEEPS = """
    KEPT = []

    @attention("{name}")
    def {name}(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
        if not KEPT:
            KEPT.append(torch.zeros(4, 64, 64, 64))
        return torch.nn.functional.scaled_dot_product_attention(
            q_BHLD, k_BGSD, v_BGSV, is_causal=causal, scale=scale
        )
"""
WRONG = RIGHT.replace("v_BGSV, is", "v_BGSV * 1.01, is")


def code(**kinds: str) -> str:
    return HEADER + "".join(textwrap.dedent(text).format(name=name) for name, text in kinds.items())


def a_request(folder: Path, base: str | None, candidate: str, **more) -> GateRequest:
    sides: dict[str, Version] = {}
    both: tuple[tuple[Literal["base", "candidate"], str | None], ...]
    both = ("base", base), ("candidate", candidate)
    for name, text in both:
        root = folder / name
        root.mkdir()
        file = root / "kernels.py"
        if text is not None:
            file.write_text(text)
        files = () if text is None else (str(file),)
        sides[name] = Version(name=name, root=str(root), files=files)
    axes = Axes(seq_lens=(16,), heads=(1,), head_dims=(8,))
    return GateRequest(
        base=sides["base"],
        candidate=sides["candidate"],
        sweeps=(axes,),
        settings=Settings(device="cpu", threads=1, timeout_s=60.0),
        **more,
    )


class Notes:
    """A listener that remembers."""

    def __init__(self):
        self.warnings: list[str] = []
        self.cells: tuple[Cell, ...] = ()
        self.rounds: list[str] = []

    def stage(self, words):
        pass

    def planned(self, cells):
        self.cells = cells

    def heard(self, found, number, words):
        self.rounds.append(words)

    def warned(self, message):
        self.warnings.append(message)


@pytest.fixture
def recorded(monkeypatch):
    """Rounds that are not measured: identical sides, in which all but the planted is alike."""
    vetoed: list[str | None] = []
    chance = random.Random(0)

    def fake(bench, order, number):
        found = a_round(order, {}, chance)
        return replace(found, veto=vetoed.pop(0)) if vetoed else found

    monkeypatch.setattr(session, "measure_round", fake)
    return vetoed


def test_a_run_of_identical_sides_passes_and_holds_its_raw_data(tmp_path, recorded):
    notes = Notes()
    run = run_gate(a_request(tmp_path, code(mine=RIGHT), code(mine=RIGHT)), notes)
    assert [cell.impl for cell in run.cells] == ["mine"]
    assert run.checks[0]["base"].status == "ok"
    assert run.checks[0]["base"].metrics == run.checks[0]["candidate"].metrics
    assert len(run.rounds) == len(notes.rounds) == Rules().screen_rounds
    assert run.environment["threads"] == 1
    assert decide(run).exit_code == ExitCode.OK


def test_names_of_installed_implementations_belong_to_the_sides_files(tmp_path, recorded):
    """Both sides register `naive`: it is theirs that is checked, and the base's is wrong."""
    run = run_gate(a_request(tmp_path, code(naive=WRONG), code(naive=RIGHT)), Notes())
    assert run.checks[0]["base"].status == "incorrect"
    assert run.checks[0]["candidate"].status == "ok"
    assert decide(run).rows[0].verdict == "not comparable"


def test_new_gone_wrong_and_hoarding_implementations_each_get_their_row(tmp_path, recorded):
    base = code(gone=RIGHT, spoilt=RIGHT, hoarder=RIGHT, same=RIGHT)
    candidate = code(spoilt=WRONG, hoarder=KEEPS, same=RIGHT, new=RIGHT)
    run = run_gate(a_request(tmp_path, base, candidate), Notes())
    outcome = decide(run)
    rows = {row.cell.impl: row for row in outcome.rows}
    assert {name: row.verdict for name, row in rows.items()} == {
        "gone": "not comparable",
        "spoilt": "incorrect",
        "hoarder": "regressed",
        "same": "ok",
        "new": "not comparable",
    }
    assert "o is off by" in rows["spoilt"].reason
    assert "held on to after the call grew" in rows["hoarder"].reason
    assert outcome.exit_code == ExitCode.FINDING


FAILS_ONCE = """
    import os, pathlib

    @attention("{name}")
    def {name}(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
        once = pathlib.Path(__file__).parent.parent / "{name}-was-here"
        if not once.exists():
            once.touch()
            {how}
        return torch.nn.functional.scaled_dot_product_attention(
            q_BHLD, k_BGSD, v_BGSV, is_causal=causal, scale=scale
        )
"""


@pytest.mark.parametrize(
    "how", ["os._exit(9)", "os.kill(os.getpid(), 9)", "raise RuntimeError('busy')"]
)
@pytest.mark.parametrize("where", ["base", "candidate"])
def test_one_lost_process_proves_nothing_against_either_side(tmp_path, recorded, how, where):
    once = FAILS_ONCE.replace("{how}", how)
    texts = {"base": code(mine=RIGHT), "candidate": code(mine=RIGHT), where: code(mine=once)}
    run = run_gate(a_request(tmp_path, texts["base"], texts["candidate"]), Notes())
    outcome = decide(run)
    assert outcome.exit_code == ExitCode.OK
    (note,) = outcome.rows[0].notes
    assert note.startswith(f"failed once on the {where} (")


def test_what_fails_again_is_held_against_the_candidate(tmp_path, recorded):
    dies = FAILS_ONCE.replace("once.touch()", "pass").replace("{how}", "os._exit(9)")
    run = run_gate(a_request(tmp_path, code(mine=RIGHT), code(mine=dies)), Notes())
    assert decide(run).rows[0].verdict == "incorrect"


def test_a_base_without_the_file_leaves_nothing_to_compare(tmp_path, recorded):
    run = run_gate(a_request(tmp_path, None, code(mine=RIGHT)), Notes())
    assert decide(run).exit_code == ExitCode.USAGE
    assert run.rounds == ()


def test_a_base_that_does_not_import_is_said_and_leaves_nothing_to_compare(tmp_path, recorded):
    notes = Notes()
    run = run_gate(a_request(tmp_path, "import no_such_module\n", code(mine=RIGHT)), notes)
    assert "No module named 'no_such_module'" in notes.warnings[0]
    outcome = decide(run)
    assert outcome.exit_code == ExitCode.USAGE
    assert "no_such_module" in outcome.rows[0].reason


def test_a_candidate_that_does_not_import_is_one_line(tmp_path, recorded):
    with pytest.raises(UsageError, match=r"candidate cannot be measured.*SyntaxError"):
        run_gate(a_request(tmp_path, code(mine=RIGHT), "def broken(:\n"), Notes())


def test_an_implementation_that_no_watched_file_has_is_refused(tmp_path, recorded):
    request = a_request(tmp_path, code(mine=RIGHT), code(mine=RIGHT))
    request = replace(request, sweeps=(replace(request.sweeps[0], impls=("sdpa",)),))
    with pytest.raises(UsageError, match=r"sdpa \(--impls\) is in none of the files.*mine"):
        run_gate(request, Notes())


def test_vetoed_rounds_are_measured_again_but_not_for_ever(tmp_path, recorded):
    recorded.extend(["other processes kept 2 CPUs busy"] * 40)
    run = run_gate(a_request(tmp_path, code(mine=RIGHT), code(mine=RIGHT)), Notes())
    vetoed = [found for found in run.rounds if found.veto]
    assert len(vetoed) == session.MOST_VETOES
    assert len(run.rounds) == session.MOST_VETOES + Rules().screen_rounds
    assert run.rounds[-1].facts["not_vetoed"] == "other processes kept 2 CPUs busy"
    assert decide(run).exit_code == ExitCode.OK


def test_a_case_that_makes_no_sense_is_a_row(tmp_path, recorded):
    request = a_request(tmp_path, code(mine=RIGHT), code(mine=RIGHT))
    axes = replace(request.sweeps[0], heads=(4,), kv_heads=(2, 3))
    run = run_gate(replace(request, sweeps=(axes,)), Notes())
    verdicts = {row.cell.case.kv_heads: row.verdict for row in decide(run).rows}
    assert verdicts[3] == "not comparable"
    assert len(verdicts) == 2


def test_a_sweep_of_nothing_but_nonsense_is_refused(tmp_path):
    request = a_request(tmp_path, code(mine=RIGHT), code(mine=RIGHT))
    axes = replace(request.sweeps[0], heads=(4,), kv_heads=(3,))
    with pytest.raises(UsageError, match="kv"):
        run_gate(replace(request, sweeps=(axes,)), Notes())


def test_an_interrupt_does_not_wait_for_the_checks():
    """The jobs are left behind: whoever is interrupted ends, and their workers with them."""
    ended = threading.Event()

    def hangs():
        ended.wait(60)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checking._do([hangs, interrupted], together=True)
    assert not ended.is_set()
    ended.set()


def test_a_budget_that_ends_leaves_cells_open(tmp_path, recorded):
    request = a_request(tmp_path, code(mine=RIGHT), code(mine=RIGHT), rules=Rules(budget_s=1.0))
    run = run_gate(request, Notes())  # the checks alone take longer
    assert run.over_budget
    assert decide(run).exit_code == ExitCode.INCONCLUSIVE


def test_code_that_is_edited_meanwhile_ends_the_run_with_one_line(tmp_path, monkeypatch):
    def edited(bench, order, number):
        raise ChangedError("candidate")

    monkeypatch.setattr(session, "measure_round", edited)
    with pytest.raises(UsageError, match=r"candidate changed while they were measured"):
        run_gate(a_request(tmp_path, code(mine=RIGHT), code(mine=RIGHT)), Notes())


@pytest.mark.parametrize(("appended", "alike"), [("", True), ("# another comment\n", False)])
def test_a_run_says_whether_what_it_loaded_differs_at_all(tmp_path, appended, alike):
    rules = Rules(screen_rounds=1, looks=(1, 2), alpha=0.6, beta=0.6)
    text = code(mine=RIGHT)
    run = run_gate(a_request(tmp_path, text, text + appended, rules=rules), Notes())
    assert run.options["loaded_alike"] is alike
    assert bool(texts.code(run)) is alike


def test_a_run_with_real_rounds_comes_to_verdicts(tmp_path):
    rules = Rules(screen_rounds=2, looks=(2, 4), alpha=0.4, beta=0.4)
    request = a_request(tmp_path, code(mine=RIGHT), code(mine=RIGHT), rules=rules)
    run = run_gate(request, Notes())
    assert not any(found.failures for found in run.rounds)
    assert {arm for found in run.rounds for arms in found.samples.values() for arm in arms} == {
        "base", "candidate", "null", "planted",
    }  # fmt: skip
    assert len(decide(run).rows) == 1

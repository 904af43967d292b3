"""Advice: what is best for each call, what the default costs, and where the budget goes."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import attnbench
from attnbench.analysis import table
from attnbench.analysis.advice import advices, changes, shares
from attnbench.base import units
from attnbench.errors import StoreError, UsageError
from attnbench.execution import advising, session
from attnbench.execution.process import Settings
from attnbench.machine.host import is_here
from attnbench.planning.advice import TIMING, beside, by_share
from attnbench.planning.forecast import Forecast
from attnbench.planning.plan import Axes, Job, expand, make_plan
from attnbench.report.documents import stored
from attnbench.report.documents.advise import document
from attnbench.report.render import rendered
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.messages import ModelSizes
from attnbench.schema.record import Cell, Record
from attnbench.store.folder import SWEEP, RunFolder
from attnbench.store.runs import load_run, new_run
from attnbench.theory.choices import as_transformers
from tests import synthetic
from tests.conftest import parsed

CALL = Case(heads=8, kv_heads=2, seq_len=1, kv_len=1000)


def timed(impl: str, us: float, case: Case = CALL, **metrics: object) -> Record:
    """Samples a few percent apart, in rounds that pair with those of the others."""
    spread = [1.0 + 0.004 * (i % 5) for i in range(20)]
    own: dict[str, object] = {"memory_workspace_bytes": 4096, "sdpa_backend": None, "group": "g"}
    return synthetic.timed(case, impl, [us * x for x in spread], **(own | metrics))


def advice_of(tmp_path: Path, *records: Record, **info: object):
    run = load_run(synthetic.write_run(tmp_path, "run", records, dict(info)))
    return run, advices(run, table.load(run, "sdpa"))


@pytest.mark.parametrize(
    ("times", "verdict", "best", "sure"),
    [
        ({"sdpa": 100.0, "naive": 60.0, "chunked": 300.0}, "likely", "naive", False),
        ({"sdpa": 100.0, "naive": 99.5}, "keep", "sdpa", True),
        ({"sdpa": 100.0, "naive": 170.0}, "keep", "sdpa", True),
        ({"naive": 60.0, "chunked": 90.0}, "failed", "naive", False),
    ],
)
def test_the_verdict_of_a_call(tmp_path, times, verdict, best, sure):
    records = [timed(impl, us) for impl, us in times.items()]
    if "sdpa" not in times:
        records.append(synthetic.failed(CALL, "sdpa", "incorrect", "o: wrong"))
    run, [found] = advice_of(tmp_path, *records)
    assert (found.verdict, found.best["impl"], found.sure) == (verdict, best, sure)
    shown = document(run)
    assert shown.exit_code == (1 if verdict == "failed" else 0)
    if verdict == "failed":
        assert shown.conclusion.verdict == "sdpa is wrong"
    if verdict == "likely":
        assert found.regret[0] == pytest.approx(100 / 60, rel=0.01)
        text = rendered(shown)
        assert "1.67 times as fast as sdpa" in text
        assert "✓" not in text, "the process that picked it is the only one"


@pytest.mark.parametrize(
    ("second", "verdict"), [((110.0, 100.0), "switch"), ((100.0, 108.0), "keep"), ((), "likely")]
)
def test_a_small_gain_is_sure_once_a_fresh_process_finds_it_again(tmp_path, second, verdict):
    records = [timed("sdpa", 110.0, lost_to="chunked", lost_by=1.1), timed("naive", 100.0)]
    records.append(timed("chunked", 105.0))
    for impl, us in zip(("sdpa", "naive"), second, strict=False):
        again = timed(impl, us, lost_to="naive" if impl == "sdpa" else None, lost_by=1.1)
        samples = [structs.replace(sample, process=1) for sample in again.samples]
        records.append(replace(again, process=1, samples=tuple(samples)))
    _, [found] = advice_of(tmp_path, *records)
    assert (found.verdict, found.sure) == (verdict, verdict != "likely")


def test_few_or_wild_samples_are_likely_or_open_and_never_sure(tmp_path):
    wild = [timed("naive", 100.0), timed("sdpa", 112.0)]
    shaken = synthetic.timed(
        CALL, "naive", [100.0 * (1.5 if i % 2 else 0.8) for i in range(20)], group="g"
    )
    _, [found] = advice_of(tmp_path, shaken, wild[1])
    assert not found.sure
    assert found.verdict in ("likely", "open", "keep")


def test_a_race_that_was_cut_off_names_who_was_ahead_and_advises_nobody_else(tmp_path):
    records = [
        timed(impl, us, lost_to="naive", lost_by=us / 50)
        for impl, us in (("sdpa", 150.0), ("chunked", 100.0))
    ]
    run, found = advice_of(tmp_path, *records, plan=[])
    assert found == []
    shown = replace(run, torn=True)  # unfinished
    assert "sdpa took 3.00 times as long as naive" in rendered(document(shown))


def test_a_step_is_the_sum_of_its_calls_and_names_them(tmp_path):
    long = replace(CALL, kv_len=4000)
    records = [
        timed("sdpa", 100.0), timed("naive", 50.0), timed("sdpa", 400.0, long),
        timed("naive", 800.0, long),
    ]  # fmt: skip
    steps = {"decode": {CALL.case_id: 10, long.case_id: 5}}
    run, found = advice_of(tmp_path, *records, steps=steps)
    text = " ".join(rendered(document(run)).split())
    assert [each.count for each in found] == [10, 5]
    assert re.search(r"decode: all calls spend 3\.0\d ms in attention with sdpa", text)
    assert "saves 16.7 % of that" in text  # 500 of 3000 µs: the long call is kept
    assert "10 × decode S=1000" in text


def around(us: float, core_us: float, mlp_us: float, process: int = 0) -> Record:
    """The layer around `CALL`, and half as much head as MLP for each of two layers."""
    case = Case(workload="decode", heads=8, kv_heads=2, seq_len=1000, kv_len=1000, new_tokens=1)
    record, parts = timed("sdpa", us, case, model_layers=2), {"core": core_us, "mlp": mlp_us}
    parts["head"] = mlp_us
    record.metrics.update(mlp_us=mlp_us, head_us=mlp_us)
    samples = [
        structs.replace(
            s, process=process, **{f"{n}_us": x * s.time_us / us for n, x in parts.items()}
        )
        for s in record.samples
    ]
    return replace(record, samples=tuple(samples), process=process)


def test_a_change_saves_its_share_of_the_step_with_mlp_and_head(tmp_path):
    records = [timed("sdpa", 100.0), timed("naive", 50.0), around(300.0, 100.0, 200.0)]
    run, _ = advice_of(tmp_path, *records, steps={"decode": {CALL.case_id: 2}})
    text = " ".join(rendered(document(run)).split())
    parts = r"of the step \(projections 33.\d %, MLP 33.\d %, head 16.\d %\)"
    saving = (
        r"; the change saves 8.3 % \[(.*?)–(.*?) %\] of it\. Norms and residuals are left out\."
    )
    saved = re.search(r"With sdpa attention is 16.7 % \[.*?\] " + parts + saving, text)
    assert saved
    assert float(saved[1]) < 8.3 < float(saved[2]), "with the errors of share and of ratio"
    assert "nothing you choose" not in text


def test_the_range_of_a_share_holds_both_processes(tmp_path):
    records = [timed("sdpa", 100.0), timed("naive", 50.0)]
    records += [around(300.0, 100.0, 200.0), around(300.0, 120.0, 200.0, process=1)]
    run, _ = advice_of(tmp_path, *records, steps={"decode": {CALL.case_id: 2}})
    found = shares(run, CALL)
    assert found
    value, low, high = found[0]
    assert low
    assert high
    assert low < 1 / 6 < (value or 0) < 1 / 5 < high


def test_attention_that_is_little_of_a_step_is_said_first(tmp_path):
    records = [timed("sdpa", 100.0), timed("naive", 50.0), around(300.0, 100.0, 2000.0)]
    run, _ = advice_of(tmp_path, *records, steps={"decode": {CALL.case_id: 2}})
    text = " ".join(rendered(document(run)).split())
    first = "Attention is 3 % of this step: nothing you choose here saves more than that."
    assert text.index(first) < text.index("naive is 2.00 times as fast")


def test_a_model_whose_step_was_not_timed_says_so(tmp_path):
    for inner, why in ((64, "no time for its layer; give a longer --budget"), (0, "no activation")):
        settings = {"model": {"layers": 2, "inner": inner, "notes": ["no activation"]}}
        records = timed("sdpa", 100.0), timed("naive", 50.0)
        run, _ = advice_of(tmp_path / str(inner), *records, settings=settings)
        text = " ".join(rendered(document(run)).split())
        assert f"attention takes of the step is unknown: {why}." in text


def test_what_another_way_of_calling_sdpa_saves(tmp_path):
    strided = replace(CALL, seq_len=1000, mask=parse_mask("causal"), layout="BLHD")
    records = [
        timed("sdpa", 100.0, strided), timed("naive", 300.0, strided),
        timed("sdpa-mask", 150.0, strided), timed("sdpa-expanded", 120.0, strided),
        timed("sdpa", 80.0, replace(strided, layout="BHLD")),
    ]  # fmt: skip
    run, found = advice_of(tmp_path, *records, steps={"prefill": {strided.case_id: 1}})
    ratios = {change.slower: round(change.ratio[0] or 0, 2) for change in changes(run, found)}
    assert ratios == {
        "keys expanded to every head": 1.2, "a dense attn_mask": 1.5, "q, k, v in BLHD": 1.25,
    }  # fmt: skip


def test_a_call_of_a_padded_list_and_a_packed_one_has_the_name_of_neither(tmp_path):
    records = [timed("sdpa", 100.0), timed("naive", 200.0)]
    steps = {f"call {how}": {CALL.case_id: 2} for how in ("padded", "packed")}
    run, [found] = advice_of(tmp_path, *records, steps=steps)
    assert (found.step, found.count) == ("call", 2)
    assert "2 × this call: keep sdpa" in rendered(document(run))


def test_a_name_that_is_taken_by_advice_cannot_be_resumed(tmp_path):
    (tmp_path / "taken").mkdir()
    for command, says in (("sweep", "choose another --name, or continue"), ("advise", "--name$")):
        with (
            pytest.raises(StoreError, match=says),
            new_run(tmp_path, "taken", {"options": {"command": command}}),
        ):
            pass


PADDED = Case(batch=2, heads=8, seq_len=512, mask=parse_mask("padding:512+128"))


@pytest.mark.parametrize(("status", "says"), [("error", "fails"), ("incorrect", "is wrong")])
def test_a_kernel_of_yours_that_has_no_right_result_is_the_finding(tmp_path, status, says):
    records = [timed("sdpa", 100.0), timed("naive", 170.0)]
    records.append(synthetic.failed(CALL, "mine", status, "ValueError: no such tile"))
    shown = document(advice_of(tmp_path, *records, own=["mine"])[0])
    assert (shown.exit_code, shown.conclusion.verdict) == (1, f"mine {says}")
    assert "no such tile" in str(shown.conclusion.reason)
    others = document(advice_of(tmp_path / "not-mine", *records)[0])
    assert (others.exit_code, others.conclusion.verdict) == (0, "keep sdpa")


def test_a_padded_batch_is_compared_with_the_best_of_its_tokens_packed(tmp_path):
    records = [
        timed("sdpa", 150.0, PADDED), timed("sdpa-items", 100.0, PADDED),
        timed("sdpa", 120.0, PADDED.unpadded), timed("chunked", 50.0, PADDED.unpadded),
    ]  # fmt: skip
    run, _ = advice_of(tmp_path, *records, steps={"call": {PADDED.case_id: 1}})
    text = " ".join(rendered(document(run)).split())
    assert "packed as document:512+128:causal=0: chunked is 2.00 times as fast as" in text
    assert "sdpa-items padded" in text
    assert "packing is what cuts these" in text
    assert "packed, behind a dense mask 1.25×" in text
    alone, _ = advice_of(tmp_path / "alone", *records[:2], steps={"call": {PADDED.case_id: 1}})
    assert "packed as" not in rendered(document(alone)), "nothing was measured of that"


def test_advice_on_a_padded_batch_tries_all_on_its_tokens_packed_too():
    axes = Axes(batch_sizes=2, heads=8, seq_lens=512, masks="padding:512+128")
    [packed] = beside([axes])
    [case] = expand(packed, "cpu")
    assert (case, packed.step) == (PADDED.unpadded, "")
    assert {"sdpa", "sdpa-items", "sdpa-varlen", "chunked"} <= set(packed.impls or ())
    [named] = beside([axes.having(impls=("naive",))])
    assert set(named.impls or ()) == {"sdpa", "naive"}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "sdpa"), ({"kv_heads": 8}, "sdpa"), ({"head_dim": 512}, "sdpa-grouped"),
        ({"mask": parse_mask("padding:300")}, "sdpa-grouped"),
        ({"seq_len": 1000, "mask": parse_mask("causal")}, "sdpa"),
        ({"seq_len": 1000, "mask": parse_mask("window:64")}, "sdpa-expanded"),
        ({"seq_len": 10, "mask": parse_mask("causal")}, "sdpa-expanded"),
    ],
)  # fmt: skip
def test_how_transformers_calls_sdpa(fields, name):
    """integrations/sdpa_attention.py and masking_utils.py of transformers 5.24."""
    assert as_transformers(replace(CALL, **fields)) == name


def test_the_budget_goes_first_where_a_step_spends_most_and_what_does_not_fit_is_last():
    short, long, huge = (replace(CALL, seq_len=n, kv_len=n) for n in (64, 1024, 65536))
    jobs = [Job(groups=tuple(((case, ("sdpa", "naive")),) for case in (short, long, huge)))]
    counts = {short.case_id: 1, long.case_id: 100_000, huge.case_id: 10}
    found = list(by_share(jobs, Forecast(TIMING), lambda: 60.0, counts))
    assert [job.cases[0][0] for job, _ in found] == [long, short, huge]
    assert found[0][1] > 40  # of the 60 that there are all along
    assert found[1][1] > 0 > -60 > found[2][1], "that one is declined, with its seconds"


def test_what_a_step_spends_most_in_is_tried_whatever_the_forecast_says():
    huge = replace(CALL, seq_len=65536, kv_len=65536)
    jobs = [Job(groups=(((huge, ("sdpa", "naive")),),))]
    [(_, seconds)] = by_share(jobs, Forecast(TIMING), lambda: 60.0, {})
    assert seconds == 60


def test_a_run_of_another_machine_says_so(cli, tmp_path):
    run, _ = advice_of(tmp_path, timed("sdpa", 100.0), timed("naive", 50.0))
    assert "measured there, not here" in cli("advise", run.path).output
    environment = run.info["environment"]
    assert not is_here(environment)
    mine = {"device_name": "", "memory_bytes": None}
    assert is_here(environment | mine), "what is not known is no other machine"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


ASKED = ("advise", "--case", "H=4,G=2,L=1,S=200,D=16", "--impls", "sdpa,naive,sdpa-grouped")


def test_a_call_is_measured_within_the_budget_and_then_known(cli, here):
    first = cli(*ASKED, "--budget", "60s", "--name", "one")
    assert first.exit_code in (0, 3), first.output
    run = load_run(here / "results" / "one")
    assert {record.status for record in run.records} == {"ok"}
    assert all(len(record.samples) >= 7 for record in run.records), "too few for an interval"
    assert {record.metrics["l2"] for record in run.records} == {"cold"}, "as a step leaves it"
    again = cli(*ASKED)
    assert "from results/one, measured on this machine" in again.output
    assert len(list((here / "results").iterdir())) == 1
    answer = json.loads(cli("advise", "one", "--json").stdout)
    assert answer["conclusion"]["verdict"]
    settings = Settings(l2="step")
    plan = make_plan(run.cells, {})
    assert advising.stored(plan, [run.path], settings) == run.path
    warm = [replace(r, metrics=r.metrics | {"l2": "warm"}) for r in run.records]
    other = synthetic.write_run(here, "warm", warm, {"plan": run.info["plan"]})
    assert advising.stored(plan, [other], settings) is None, "a warm cache is no step's"
    model = replace(settings, model=ModelSizes(layers=2, inner=64))
    assert advising.stored(plan, [run.path], model) is None, "it says nothing of MLP and head"


def test_python_measures_advises_from_what_is_stored_and_has_the_table(cli, here):
    calls: dict[str, Any] = {"case": ASKED[2], "impls": ASKED[4]}
    measured = attnbench.advise(**calls, budget=60, name="one")
    assert set(measured.table["impl"]) == {"sdpa", "naive", "sdpa-grouped"}
    assert set(measured.table["status"][measured.table["impl"] == "sdpa"]) == {"ok"}
    assert measured.table.equals(attnbench.load("one"))
    again = attnbench.advise(run="one")
    assert again == attnbench.advise(**calls), "which measures nothing: it has been tried"
    assert rendered(again, "json") == cli("advise", "one", "--json").stdout
    assert rendered(again) == repr(measured) == cli("advise", "one").stdout
    assert measured.conclusion.verdict in measured._repr_html_()
    assert [path.name for path in (here / "results").iterdir()] == ["one"]


WRONG: dict[str, dict[str, Any]] = {
    "budget=… takes a time from 1s on, such as 90s or 5m, not 'soon'": {"budget": "soon"},
    "budget=… takes a time from 1s on, such as 90s or 5m, not '0'": {"budget": 0},
    "budget=1.00 s is too short: starting took": {"budget": 1, "seq_lens": 64},
    "remove impls=…, budget=…": {"run": "latest", "impls": "naive", "budget": "2m"},
    "step=… and tokens=… go with model=NAME": {"tokens": "2k"},
    "model=bert-base: tokens=… takes whole numbers": {"model": "bert-base", "tokens": "2x"},
    "take step=prefill, or train": {"model": "bert-base", "step": "decode"},
    "seq_lens=… takes whole numbers of at least 1": {"seq_lens": "1k..8x"},
    "seq_lens=512..3072 doubles": {"seq_lens": "512..3k"},
    "unknown implementation 'sdpaa' (impls=…), did you": {"impls": "sdpaa,naive"},
    "/a,b.py does not exist (files=…)": {"files": "a,b.py"},
    "take only one of model=…, case=… or cases=…": {"model": "bert-base", "case": "B=2"},
    "known: device, seed": {"settings": {"max_time_s": 3}},
    "exists in results; choose another name=…": {"name": "there", "case": "B=1,n=8"},
}


@pytest.mark.parametrize(("says", "asked"), WRONG.items())
def test_bad_values_are_refused_in_the_words_of_python(here, says, asked):
    (here / "results" / "there").mkdir(parents=True)
    with pytest.raises(UsageError) as caught:
        attnbench.advise(**asked)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in (here / "results").iterdir()] == ["there"]


def test_what_is_interrupted_says_what_is_known(cli, here, monkeypatch):
    whole = session.sweep

    def cut(*args: object) -> Iterator[object]:
        count = 0
        for event in whole(*args):  # type: ignore[arg-type]
            yield event
            count += isinstance(event, Record)
            if count == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(session, "sweep", cut)
    found = cli(*ASKED, "--budget", "60s")
    assert found.exit_code == 130
    assert re.search(r"Until it was interrupted, \S+ took|Everything tried", found.output)
    assert "Interrupted. This is advice from: results/" in found.output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["--case", "n=64", "--budget", "1s"],
            r"--budget 1.00 s is too short: starting took .*; give at least \d",
        ),
        (["latest", "--budget", "9s"], "RUN is advice from what was measured; remove --budget"),
        (["latest"], "no runs? "),
        (["--case", "n=64", "--impls", "sdpa-cudnn"], "no call has two implementations .*on cuda"),
        (["--step", "decode"], "--step and --tokens go with --model NAME"),
    ],
)
def test_bad_input_is_one_line(cli, assert_refused, here, args, says):
    result = cli("advise", *args)
    assert result.exit_code == 2
    assert re.search(says, result.output), result.output
    assert "Traceback" not in result.output


def test_every_declined_call_has_a_command_that_parses(tmp_path):
    case = replace(CALL, mask=parse_mask("window:64"), seq_len=9, layout="BLHD", scale=0.5)
    records = [timed("sdpa", 100.0), timed("naive", 50.0)]
    plan = [record.cell.to_json() for record in records] + [Cell(case=case, impl="sdpa").to_json()]
    run, _ = advice_of(tmp_path, *records, declined={case.case_id: 200.0}, plan=plan)
    [command] = re.findall(r"attnbench advise --case .*?--budget \d+s", " ".join(
        rendered(document(run), "markdown").split()))  # fmt: skip
    parsed(command)
    assert RunFolder.find(str(run.path), tmp_path, SWEEP).path == run.path


def second(record: Record, us: float) -> Record:
    """The same cell in a fresh process, whose times alone would give another ratio."""
    again = timed(record.cell.impl, us)
    samples = [structs.replace(sample, process=1) for sample in again.samples]
    return replace(again, process=1, samples=tuple(samples))


RUNS: dict[str, list[Record]] = {
    "decided": [
        timed("sdpa", 130.0), timed("naive", 100.0), timed("chunked", 180.0),
        second(timed("sdpa", 1.0), 120.0), second(timed("naive", 1.0), 100.0),
    ],
    "level": [timed("sdpa", 100.0), timed("naive", 99.5), timed("chunked", 101.0)],
    "wrong": [
        timed("sdpa", 100.0), timed("naive", 60.0),
        synthetic.failed(CALL, "chunked", "incorrect", "o: wrong"),
    ],
    "interrupted": [timed("sdpa", 100.0), timed("naive", 90.0)],
    "of a GPU": [
        timed(impl, us, replace(CALL, device="cuda"))
        for impl, us in (("sdpa", 30.0), ("sdpa-cudnn", 20.0), ("naive", 80.0))
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_ratio_has_one_value_wherever_it_stands(tmp_path, name):
    info = {"options": {"command": "advise"}}
    path = synthetic.write_run(tmp_path, "run", RUNS[name], info)
    run = load_run(path)
    shown = document(run, here=True, interrupted=name == "interrupted")
    [found] = advices(run, table.load(run, "sdpa"))
    texts = {kind: rendered(shown, kind) for kind in ("text", "markdown", "html", "junit")}
    sections = {
        part["section"]: part["parts"] for part in json.loads(rendered(shown, "json"))["sections"]
    }
    tried = {row["impl"]: row["speed"] for row in sections["Everything tried"][0]["table"]}
    ratios = {impl: ratio for impl, ratio in found.ratios.items() if ratio[0]}
    assert ratios
    for impl, (value, low, high) in ratios.items():
        assert [tried[impl].get(end) for end in ("value", "low", "high")] == [value, low, high], (
            impl
        )
        words = units.ratio(value)
        missing = [kind for kind, text in texts.items() if kind != "junit" and words not in text]
        assert not missing, (impl, words)
    costs = sections["Which attention"][0]["table"][0]["costs"]
    if (best := str(found.best["impl"])) != "sdpa":
        assert [costs.get(end) for end in ("value", "low", "high")] == [*ratios[best]]
    again = stored(str(path), tmp_path)[1]
    plain = [json.loads(rendered(each, "json"))["sections"] for each in (shown, again)]
    assert plain[0] == plain[1], "a report of advice is the advice"
    assert again.kind == "advise"


PROGRAM = """
import torch
q = torch.randn(1, 2, 64, 8)
for _ in range(3):
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
"""


@pytest.mark.usefixtures("imagined_worker")
def test_a_program_is_run_and_its_calls_are_advised_on_by_place(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PROGRAM)
    ended = cli("advise", "--impls", "naive", "--", sys.executable, "mine.py")
    assert ended.exit_code == 2
    assert "the program says what it calls; remove --impls" in ended.stderr
    ended = cli("advise", "--", sys.executable, "mine.py")
    shown = " ".join(ended.stdout.split())
    assert ended.exit_code == 0, ended.stderr
    assert re.search(r"Attention takes [\d.]+ % of the program's [\d.]+ m?s: ", shown)
    assert re.search(r"1 call is not compared, [\d.]+ % of the program: dropout", shown)
    assert "mine.py:5" in shown
    (run,) = Path("results").iterdir()
    again = cli("advise", run)
    assert "Attention takes" in again.stdout


def test_a_program_without_attention_and_a_run_beside_one_are_refused(cli):
    ended = cli("advise", "--", sys.executable, "-c", "import torch")
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "the program made no call" in ended.stderr
    ended = cli("advise", "latest", "--", sys.executable)
    assert ended.exit_code == 2
    assert "remove the program" in ended.stderr
    assert "no program nowhere" in cli("advise", "--", "nowhere").stderr

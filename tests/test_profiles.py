"""Two profiles: what differs adds up, noise is no change, and what is shown of it."""

import math
import random
import shlex
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from attnbench.analysis.profiles import difference, matched
from attnbench.errors import StoreError, UsageError
from attnbench.report import ops
from attnbench.report.documents.profile import document, entries
from attnbench.report.files import write_files
from attnbench.report.render import rendered
from attnbench.schema.case import Case
from attnbench.schema.profile import (
    Live,
    Memory,
    Op,
    Profile,
    Unprofiled,
    read_profile,
    write_profile,
)

MEMORY = Memory(
    timeline=(Live(1.0, 4096, "aten::bmm"), Live(2.0, 8192, "aten::softmax"), Live(9.0, 0, None)),
    peak_bytes=8192, peak_op="aten::softmax", outputs_bytes=1024,
    traced_bytes=7168, measured_bytes=7168, predicted_bytes=7168,
)  # fmt: skip


def op(name, self_us, count=1.0, spread=0.05, **fields):
    """An op half of whose calls lie within ± `spread`; None is unknown."""
    low, high = (None, None) if spread is None else (self_us * (1 - spread), self_us * (1 + spread))
    return Op(name=name, count=count, self_us=self_us, low_us=low, high_us=high, **fields)


def profile(*ops, label="a", time_us=None, **fields):
    total = time_us or 1.1 * sum(each.self_us for each in ops)
    time = Unprofiled(
        median_us=total, low_us=0.98 * total, high_us=1.02 * total, samples=9, calls=1,
        timer="host", l2="warm",
    )  # fmt: skip
    plain = {
        "case": Case(seq_len=64).to_json(), "impl": "naive", "label": label, "ceilings": {},
        "environment": {"torch": "2.13.0", "device_name": "a CPU"}, "time": time, "calls": 9,
        "profiled_us": total, "gaps_us": 1.0, "ops": ops, "memory": MEMORY,
    }  # fmt: skip
    return Profile(**{**plain, **fields})


NAIVE = (
    op("aten::bmm", 600.0, 2.0, bytes=4e6), op("aten::_softmax", 300.0, bytes=2e6),
    op("aten::mul", 50.0, bytes=1e5),
)  # fmt: skip


def test_where_there_is_no_profile_the_message_names_the_command(tmp_path):
    with pytest.raises(StoreError, match="attnbench profile"):
        read_profile(tmp_path)


def scaled(ops, factors):
    return tuple(
        op(x.name, x.self_us * f, x.count, bytes=x.bytes) for x, f in zip(ops, factors, strict=True)
    )


def changed(a, b):
    return {change.name: change.what for change in difference(a, b).ops}


@pytest.mark.parametrize("seed", range(40))
def test_the_changes_always_sum_to_the_difference_of_the_times(seed):
    draw = random.Random(seed)
    names = [f"aten::op{n}" for n in range(8)]
    names += [f"void kernel<{n}, float>(int)" for n in range(4)] + ["gemm_v1", "gemm_v2"]

    def some(label):
        ops = [
            op(name, draw.lognormvariate(3, 2), draw.randint(1, 5), draw.choice([None, 0.01, 0.4]),
               bytes=draw.choice([None, 0.0, 100.0]))
            for name in draw.sample(names, draw.randint(0, len(names)))
        ]  # fmt: skip
        return profile(*ops, label=label, time_us=draw.uniform(1, 5000))

    a, b = some("a"), some("b")
    found = difference(a, b)
    for shown in (found.changes, entries(found, 3), entries(found, 9, least=0.1)):
        assert math.isclose(sum(c.delta_us for c in shown), found.delta_us, abs_tol=1e-6)
        assert math.isclose(sum(c.a_us for c in shown), a.time.median_us, abs_tol=1e-6)
        assert math.isclose(sum(c.b_us for c in shown), b.time.median_us, abs_tol=1e-6)
    assert found.changes[-1].what == "outside"
    assert not any(c.assured_us > abs(c.delta_us) + 1e-9 for c in found.changes)


def test_an_op_that_appeared_counts_by_its_time_however_it_scatters():
    wild = op("aten::clone", 500.0, spread=None)
    grown = scaled(NAIVE, (1.6, 1.0, 1.0))
    found = difference(profile(*NAIVE), profile(*grown, wild, label="b"))
    assert [change.name for change in found.ops] == ["aten::clone", "aten::bmm"]


def test_an_op_that_alone_takes_longer_grew_and_the_others_did_not_shrink():
    for slow, name in enumerate(x.name for x in NAIVE):
        factors = [1.6 if n == slow else 1.0 for n in range(3)]
        assert changed(profile(*NAIVE), profile(*scaled(NAIVE, factors))) == {name: "grew"}


def test_a_process_that_is_slower_as_a_whole_changes_no_op_and_the_factor_is_said():
    found = difference(profile(*NAIVE), profile(*scaled(NAIVE, (2.8, 2.75, 2.9)), label="b"))
    assert found.ops == ()
    assert found.common == pytest.approx(2.8, rel=0.04)
    both = [(of, Path()) for of in (found.a, found.b)]
    assert "take 2.8 times as long" in rendered(document(both, found), "markdown")


def test_an_op_that_reads_more_or_is_called_more_often_is_named_even_where_its_time_is_the_same():
    a = profile(*NAIVE)
    for other in ({"count": 3.0, "bytes": 4e6}, {"count": 2.0, "bytes": 5e6}):
        b = profile(op("aten::bmm", 601.0, **other), *NAIVE[1:])
        assert changed(a, b) == {"aten::bmm": "other work"}
    unknown = profile(op("aten::bmm", 601.0, 2.0), *NAIVE[1:])
    assert changed(a, unknown) == {}


ADD = "void at::native::vectorized_kernel<4, at::native::CUDAFunctor_add<float>, {}>(int, {})"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ADD.format("x", "x"), ADD.format("x", "x").replace("add", "mul")),
        ("aten::softmax", "aten::_softmax"),
        ("aten::add", "aten::add_"),
        ("sgemm_128x64_tn", "sgemm_128x64_nn"),
    ],
)
def test_kernels_that_do_another_thing_are_not_matched(one, other):
    assert len(matched([op(one, 1.0)], [op(other, 1.0)])) == 2


def test_profiles_of_different_cases_are_not_compared():
    other = replace(profile(*NAIVE), case=Case(seq_len=128).to_json())
    with pytest.raises(UsageError, match="seq_len 64 and 128"):
        difference(profile(*NAIVE), other)


def test_the_terminal_keeps_to_eighty_columns_with_the_longest_names(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    kernels = [op(f"void at::native::{'long_name_' * 8}{n}<float>(int)", 90.0) for n in range(30)]
    found = difference(profile(*NAIVE, label="naive"), profile(*kernels, *NAIVE, label="mine"))
    lines = rendered(document([(found.a, Path()), (found.b, Path())], found)).splitlines()
    assert max(map(len, lines)) <= 80
    header = next(n for n, line in enumerate(lines) if line.startswith("op "))
    assert 10 < len(lines) - header < 30
    assert any("more" in line for line in lines)


def test_a_profile_that_lost_its_kernels_has_a_page_all_the_same(tmp_path):
    write_files(tmp_path, document([(profile(time_us=900.0), tmp_path)]))
    assert "a call, unprofiled" in (tmp_path / "profile.html").read_text()


def test_a_thinned_timeline_keeps_the_peak_and_the_end():
    points = [Live(float(t), (t * 7919) % 1000, "aten::bmm") for t in range(20_000)]
    points[777] = Live(777.0, 5000, "aten::softmax")
    thin = ops.thinned(points)
    assert len(thin) <= ops.MOST_POINTS + 3
    assert max(thin, key=lambda p: p.live_bytes) == points[777]
    assert thin[-1] == points[-1]
    assert [p.t_us for p in thin] == sorted(p.t_us for p in thin)


@pytest.fixture
def profiled(cli, monkeypatch, tmp_path):
    """The command, with NAIVE as the profile of `naive` and a copy more as that of any other."""
    from attnbench.execution import profiling

    def made(subject, case, folder, **_):
        more = () if subject.impl == "naive" else (op("aten::clone", 400.0),)
        found = profile(*NAIVE, *more, label=subject.label, impl=subject.impl)
        write_profile(folder, found)
        return found

    monkeypatch.setattr(profiling, "profile_subject", made)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("# mine")
    return lambda line: cli("profile", *shlex.split(line))


def test_the_command_shows_the_difference_and_names_the_page(profiled):
    done = profiled("naive mine --impl mine.py --name p")
    assert done.exit_code == 0, done.output
    assert "mine takes 1.42 times naive's time" in done.output
    assert "page:   results/p/profile.html" in done.output


def test_a_stored_profile_has_a_report(profiled, cli):
    for impls, name in (("naive", "one"), ("naive mine --impl mine.py", "two")):
        profiled(f"{impls} --name {name}")
        page = Path("results", name, "profile.html")
        page.unlink()
        assert cli("report", name).stdout == f"{page}\n"
        assert ("naive → mine" in page.read_text()) == (name == "two")


@pytest.mark.slow
def test_one_implementation_in_two_environments_is_two_profiles(profiled):
    python = f"--python {shlex.quote(sys.executable)}"
    done = profiled(f"naive {python} {python} --name p")
    assert done.exit_code == 0, done.output
    assert sorted(p.parent.name for p in Path("results/p").glob("*/profile.json")) == ["a", "b"]

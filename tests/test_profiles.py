"""Two profiles: what differs adds up, noise is no change, and what is shown and bundled of it."""

import gzip
import math
import random
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from attnbench.analysis.profiles import difference, kernel_name, matched
from attnbench.cli import main
from attnbench.errors import StoreError, UsageError
from attnbench.report.profile import figure, page, texts
from attnbench.report.profile.bundle import Part, check_target, write_bundle
from attnbench.schema.case import Case
from attnbench.schema.profile import Live, Memory, Op, Profile, Unprofiled, write_profile

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
    for shown in (found.changes, texts.shown(found, 3), texts.shown(found, 9, least=0.1)):
        assert math.isclose(sum(c.delta_us for c in shown), found.delta_us, abs_tol=1e-6)
        assert math.isclose(sum(c.a_us for c in shown), a.time.median_us, abs_tol=1e-6)
        assert math.isclose(sum(c.b_us for c in shown), b.time.median_us, abs_tol=1e-6)
    assert found.changes[-1].what == "outside"
    assert not any(c.assured_us > abs(c.delta_us) + 1e-9 for c in found.changes)


def test_a_planted_copy_is_the_first_line_however_noisy_the_others_are():
    copy = op("aten::clone", 12.0, bytes=2e5)
    noisy = tuple(op(x.name, 1.4 * x.self_us, x.count, 0.5, bytes=x.bytes) for x in NAIVE)
    found = difference(profile(*NAIVE), profile(*noisy, copy, label="b"))
    assert [(c.name, c.what, c.a_count, c.b_count) for c in found.ops] == [
        ("aten::clone", "appeared", 0.0, 1.0)
    ]
    assert texts.rows(found)[0][:5] == ("aten::clone", "–", "12.0 µs", "+12.0 µs", "0 → 1")
    assert changed(found.b, found.a) == {"aten::clone": "vanished"}


def test_an_op_that_appeared_counts_by_its_time_however_it_scatters():
    wild = op("aten::clone", 500.0, spread=None)
    grown = scaled(NAIVE, (1.6, 1.0, 1.0))
    found = difference(profile(*NAIVE), profile(*grown, wild, label="b"))
    assert [change.name for change in found.ops] == ["aten::clone", "aten::bmm"]


def test_what_scatters_is_one_entry_and_no_change():
    found = difference(profile(*NAIVE), profile(*scaled(NAIVE, (1.05, 0.97, 1.03)), label="b"))
    assert [(c.name, c.what) for c in found.changes] == [
        ("3 within noise", "noise"), ("in no op", "outside"),
    ]  # fmt: skip
    assert found.changes[0].delta_us == pytest.approx(30.0 - 9.0 + 1.5)


def test_an_op_that_alone_takes_longer_grew_and_the_others_did_not_shrink():
    for slow, name in enumerate(x.name for x in NAIVE):
        factors = [1.6 if n == slow else 1.0 for n in range(3)]
        assert changed(profile(*NAIVE), profile(*scaled(NAIVE, factors))) == {name: "grew"}


def test_a_process_that_is_slower_as_a_whole_changes_no_op_and_the_factor_is_said():
    found = difference(profile(*NAIVE), profile(*scaled(NAIVE, (2.8, 2.75, 2.9)), label="b"))
    assert found.ops == ()
    assert found.common == pytest.approx(2.8, rel=0.04)
    assert any("2.8 times as long" in text for text in texts.summary(found))


def test_with_an_unknown_spread_time_alone_is_no_change():
    a, b = (profile(op("aten::bmm", us, spread=None)) for us in (100.0, 300.0))
    assert changed(a, b) == {}


def test_a_mean_that_few_slow_calls_make_is_no_change():
    middle: dict[str, Any] = {"low_us": 90.0, "high_us": 110.0, "bytes": 1.0}
    a, b = (profile(Op(name="aten::bmm", count=1, self_us=us, **middle)) for us in (100.0, 170.0))
    assert changed(a, b) == changed(b, a) == {}


def test_an_op_that_reads_more_or_is_called_more_often_is_named_even_where_its_time_is_the_same():
    a = profile(*NAIVE)
    for other in ({"count": 3.0, "bytes": 4e6}, {"count": 2.0, "bytes": 5e6}):
        b = profile(op("aten::bmm", 601.0, **other), *NAIVE[1:])
        assert changed(a, b) == {"aten::bmm": "other work"}
    unknown = profile(op("aten::bmm", 601.0, 2.0), *NAIVE[1:])
    assert changed(a, unknown) == {}


ADD = "void at::native::vectorized_kernel<4, at::native::CUDAFunctor_add<float>, {}>(int, {})"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (ADD.format("at::detail::Array<char*, 3>", "x"), ADD.format("std::array<char*, 3ul>", "y")),
        ("triton_poi_fused_mul_0", "triton_poi_fused_mul_3"),
        ("void gemm_sm80<64, 64>(Params)", "void gemm_sm90<128, 64>(Params)"),
        ("sgemm_128x64_tn_v1", "sgemm_128x64_tn_v2"),
        ("void (anonymous namespace)::softmax_warp<float>(int)", "void softmax_warp<float>(int)"),
    ],
)
def test_a_kernel_is_the_same_whatever_its_template_arguments_and_version(old, new):
    found = matched([op(old, 1.0)], [op(new, 2.0)])
    assert [(len(a), len(b)) for _, a, b in found] == [(1, 1)]


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


def test_names_are_loosened_only_where_the_same_name_is_not_in_both():
    names = ["void gemm_sm80<64>(int)", "void gemm_sm80<128>(int)"]
    a, b = [op(name, 1.0) for name in names], [op(names[0], 2.0)]
    assert sorted((len(x), len(y)) for _, x, y in matched(a, b)) == [(1, 0), (1, 1)]
    assert kernel_name(names[0]) == kernel_name(names[1]) == "gemm"


def test_profiles_of_different_cases_are_not_compared():
    other = replace(profile(*NAIVE), case=Case(seq_len=128).to_json())
    with pytest.raises(UsageError, match="seq_len 64 and 128"):
        difference(profile(*NAIVE), other)


def terminal(found, width=80):
    return page.terminal(found, Console(width=width, no_color=True, force_terminal=False))


def both(ratio, **fields):
    a = profile(*NAIVE, label="naive")
    b = profile(*scaled(NAIVE, [ratio] * 3), label="mine", **fields)
    return difference(a, b)


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (0.28, "mine takes 0.28 of naive's time (0.27–0.29): 293 µs, not 1.04 ms"),
        (1.5, "mine takes 1.50 times naive's time (1.44–1.56): 1.57 ms, not 1.04 ms"),
        (1.01, "mine and naive take the same time but for noise: 1.01 of it (0.97–1.05)"),
    ],
)
def test_the_verdict_is_one_sentence(ratio, said):
    assert texts.verdict(both(ratio)).startswith(said)


def test_the_terminal_keeps_to_eighty_columns_with_the_longest_names():
    kernels = [op(f"void at::native::{'long_name_' * 8}{n}<float>(int)", 90.0) for n in range(30)]
    found = difference(profile(*NAIVE, label="naive"), profile(*kernels, *NAIVE, label="mine"))
    lines = terminal(found).splitlines()
    assert max(map(len, lines)) <= 80
    header = next(n for n, line in enumerate(lines) if line.startswith("op "))
    assert 10 < len(lines) - header < 30
    assert any("more" in line for line in lines)


def test_what_differs_between_environments_is_said_before_the_verdict_and_load_is_no_difference():
    other = {"torch": "2.11.0", "device_name": "a CPU", "load_1m": 3.0}
    found = both(1.0, environment=other)
    assert found.environment == (("torch", "2.13.0", "2.11.0"),)
    shown = terminal(found)
    assert shown.index("torch: 2.13.0 → 2.11.0") < shown.index("mine and naive take")


def test_two_labels_that_are_alike_or_long_become_a_and_b():
    long = both(1.0)
    found = difference(replace(long.a, label="naive at a very long name"), long.b)
    assert texts.header(found)[1:3] == ("A", "B")
    assert texts.pair(found) == "A: naive at a very long name → B: mine"
    assert texts.verdict(found).startswith("B and A take the same time but for noise")
    assert "B: memory peaks" in terminal(found)


def test_the_head_names_of_machine_and_torch_only_what_is_the_same():
    assert texts.head(both(1.0)).endswith("· a CPU · torch 2.13.0")
    assert texts.head(both(1.0, environment={"torch": "2.11.0"})).endswith("float32")


def test_where_nothing_changed_that_is_said():
    assert texts.NONE in texts.summary(both(1.0))
    assert not any("times as long" in text for text in texts.summary(both(1.0)))


def test_a_waterfall_has_few_bars_that_end_at_the_second_time():
    extra = [op(f"aten::extra{n}", 40.0) for n in range(30)]
    found = difference(profile(*NAIVE), profile(*NAIVE, *extra, label="b"))
    (ax,) = figure.waterfall(found).axes[:1]
    bars: list[Any] = list(ax.patches)
    *changes, first, second = bars
    assert len(changes) <= figure.MOST_BARS + 3  # more, within noise, in no op
    assert (first.get_width(), second.get_width()) == (1045.0, found.b.time.median_us)
    assert math.isclose(changes[0].get_x(), 1045.0)
    end = changes[-1].get_x() + changes[-1].get_width()
    assert math.isclose(end, found.b.time.median_us)


def test_a_change_of_a_percent_is_seen_in_the_waterfall():
    found = difference(profile(*NAIVE), profile(*NAIVE, op("aten::clone", 10.0), label="b"))
    ax = figure.waterfall(found).axes[0]
    assert ax.get_xlim()[0] > 0.9 * found.a.time.median_us
    assert "does not begin at 0" in ax.get_xlabel()


def test_a_thinned_timeline_keeps_the_peak_and_the_end():
    points = [Live(float(t), (t * 7919) % 1000, "aten::bmm") for t in range(20_000)]
    points[777] = Live(777.0, 5000, "aten::softmax")
    thin = figure.thinned(points)
    assert len(thin) <= figure.MOST_POINTS + 3
    assert max(thin, key=lambda p: p.live_bytes) == points[777]
    assert thin[-1] == points[-1]
    assert [p.t_us for p in thin] == sorted(p.t_us for p in thin)


@pytest.mark.parametrize("memory", [MEMORY, replace(MEMORY, timeline=(), predicted_bytes=None)])
def test_the_page_stands_alone_and_names_every_op_that_changed(tmp_path, memory):
    found = difference(
        profile(*NAIVE, label="naive"),
        profile(*NAIVE, op("<b>planted</b>", 400.0), label="mine", memory=memory,
                trace="trace.json.gz"),
    )  # fmt: skip
    written = page.write_all(tmp_path, [found.a, found.b], found)
    html, markdown = written.read_text(), (tmp_path / page.MARKDOWN).read_text()
    assert not re.findall(r'(?:src|href)="(?!data:|#|https://ui\.perfetto\.dev")', html)
    assert "<b>planted</b>" not in html
    for text in (html, markdown):
        assert "&lt;b>planted&lt;/b>" in text or "&lt;b&gt;planted&lt;/b&gt;" in text
        assert texts.verdict(found) in text.replace("&#39;", "'")
    assert "b/trace.json.gz" in html
    assert "a/trace.json.gz" not in html


def test_one_profile_has_a_page_of_its_own(tmp_path):
    html = page.write_all(tmp_path, [profile(*NAIVE, trace="trace.json.gz")]).read_text()
    assert "What changed" not in html
    assert "<code>trace.json.gz</code>" in html


def bundled(tmp_path, **fields):
    folder = tmp_path / "results"
    (folder / "a").mkdir(parents=True)
    made = profile(*NAIVE, trace="trace.json.gz", **fields)
    write_profile(folder / "a", made)
    (folder / "a" / "trace.json.gz").write_bytes(gzip.compress(f"in {Path.home()}/x".encode()))
    page.write_all(folder, [made])
    part = Part(profile=made, folder=folder / "a", files={"mine.py": f"# {Path.home()}/mine\n"})
    return folder, [part]


def test_a_bundle_has_everything_to_repeat_the_cell_and_no_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    folder, parts = bundled(tmp_path, environment={"torch": "2.13.0", "where": "/home/somebody/y"})
    file = write_bundle(tmp_path / "x.zip", folder, parts)
    with zipfile.ZipFile(file) as archive:
        data = {name: archive.read(name) for name in archive.namelist()}
    assert set(data) == {
        "profile.html", "profile.md", "a/profile.json", "a/trace.json.gz", "a/cell.json",
        "a/environment.json", "a/repro.sh", "a/mine.py",
    }  # fmt: skip
    plain = [gzip.decompress(v) if k.endswith(".gz") else v for k, v in data.items()]
    assert not any(b"somebody" in text for text in plain)
    script = data["a/repro.sh"].decode()
    (tmp_path / "repro.sh").write_text(script)
    assert subprocess.run(["sh", "-n", tmp_path / "repro.sh"], check=False).returncode == 0
    assert re.search(r"^#   torch", script, re.M)
    commands = [line for line in script.splitlines() if line.startswith("attnbench ")]
    assert [line.split()[1] for line in commands] == ["sweep", "profile"]
    for line in commands:
        _, name, *arguments = shlex.split(line)
        made = main.commands[name].make_context(name, arguments)
        assert made.params["seq_lens"] == (64,)
        assert made.params["files"] == ("mine.py",)


def test_a_bundle_overwrites_nothing_and_what_fails_leaves_nothing(tmp_path):
    (tmp_path / "x.zip").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        check_target(tmp_path / "x.zip")
    with pytest.raises(UsageError, match="no folder"):
        check_target(tmp_path / "nowhere" / "x.zip")
    folder, parts = bundled(tmp_path)
    (folder / "a" / "trace.json.gz").unlink()
    with pytest.raises(StoreError, match="--bundle"):
        write_bundle(tmp_path / "y.zip", folder, parts)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results", "x.zip"]


def plain(q, k, v, *, causal, scale):
    return ((q * scale) @ k.mT).softmax(-1) @ v


def planted(q, k, v, *, causal, scale):
    return plain(q, k, v.mT.contiguous().mT, causal=causal, scale=scale)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Real profiles of `plain` and `planted`, as the worker makes them."""
    from attnbench.api import IMPLEMENTATIONS, attention
    from attnbench.schema.messages import Trace
    from attnbench.worker import tracing

    case, found = Case(seq_len=32, heads=2), {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tracing, "take_cores", lambda threads: None)  # tests share this process
        patched.setattr(tracing, "_BUDGET_S", 0.0)  # as few rounds as it takes
        for function in (plain, planted):
            name, file = function.__name__, tmp_path_factory.mktemp("trace") / "trace.json.gz"
            attention(name, gqa=False)(function)
            asked = Trace(case=case, impl=name, seed=0, file=str(file), label=name)
            try:
                found[name] = tracing.trace_cell(asked).profile
            finally:
                IMPLEMENTATIONS.remove(name)
    return found


def test_a_copy_planted_in_a_real_implementation_is_called_once_more(traced):
    found = difference(traced["plain"], traced["planted"])
    (clone,) = [change for change in found.ops if change.name == "aten::clone"]
    assert (clone.what, clone.a_count, clone.b_count) == ("appeared", 0.0, 1.0)
    assert clone.bytes == 2 * (2 * 32 * 64 * 4)  # read and written
    # All else that is called differently only describes memory.
    assert {c.name for c in found.ops if c.bytes and c.a_count != c.b_count} == {"aten::clone"}
    back = difference(traced["planted"], traced["plain"])
    assert {c.name: c.what for c in back.ops}["aten::clone"] == "vanished"


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


def test_the_command_shows_the_difference_and_names_the_page_and_what_is_bundled(profiled):
    done = profiled("naive mine --impl mine.py --name p --bundle p.zip")
    assert done.exit_code == 0, done.output
    assert "mine takes 1.42 times naive's time" in done.output
    assert "page: results/p/profile.html" in done.output
    assert re.search(r"bundle: p\.zip \(.* KiB: .*your mine\.py\)", done.output)
    assert "a/mine.py" in zipfile.ZipFile("p.zip").namelist()


def test_files_of_one_name_are_bundled_under_names_of_their_own(profiled):
    Path("other").mkdir()
    Path("other/mine.py").write_text("# another")
    done = profiled("naive --impl mine.py --impl other/mine.py --name p --bundle p.zip")
    assert "your mine.py, mine-2.py)" in done.output
    with zipfile.ZipFile("p.zip") as bundle:
        assert [bundle.read(name) for name in ("mine.py", "mine-2.py")] == [b"# mine", b"# another"]
        assert b"--impl mine.py --impl mine-2.py" in bundle.read("repro.sh")


def test_one_implementation_has_its_table_and_a_page(profiled):
    done = profiled("naive --name p --bundle p.zip")
    assert done.exit_code == 0, done.output
    assert "takes" not in done.output
    assert Path("results/p/profile.html").is_file()
    names = zipfile.ZipFile("p.zip").namelist()
    assert {"profile.html", "profile.json", "repro.sh"} <= set(names)


def test_a_bundle_that_exists_is_refused_before_anything_is_profiled(profiled, assert_refused):
    Path("p.zip").write_text("mine")
    assert_refused(profiled("naive --bundle p.zip"), "p.zip", "--bundle")
    assert not Path("results").exists()


def test_what_was_profiled_stays_where_nobody_reads_the_output(profiled, monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(page, "terminal", closed)
    profiled("naive mine --name p")
    for name in ("a/profile.json", "b/profile.json", page.PAGE):
        assert Path("results/p", name).is_file()


@pytest.mark.parametrize(
    "line",
    [
        "naive mine --python . --python .",
        "naive --base HEAD --python . --python .",
        "naive mine --base HEAD",
        "naive --python . --python . --python .",
    ],
)
def test_more_than_two_profiles_are_refused(profiled, assert_refused, line):
    assert_refused(profiled(line), "two profiles are compared")


@pytest.mark.slow
def test_one_implementation_in_two_environments_is_two_profiles(profiled):
    python = f"--python {shlex.quote(sys.executable)}"
    done = profiled(f"naive {python} {python} --name p")
    assert done.exit_code == 0, done.output
    assert sorted(p.parent.name for p in Path("results/p").glob("*/profile.json")) == ["a", "b"]

import math
import random

import pytest

from attnbench.analysis.apart import CellTime, common_shift, residuals, scale, spread


def run_of(factor=1.0, cells=20, groups=4, noise=0.0, seed=0, by_group=(), own=()):
    """Cells of 100, 200, … µs, slowed by `factor`, some groups and some cells by factors more."""
    draw = random.Random(seed)
    slow, changed = dict(by_group), dict(own)
    return {
        (f"case{n}", "naive"): CellTime(
            time_us=100.0 * (n + 1) * factor * math.exp(draw.gauss(0, noise))
            * slow.get(n % groups, 1.0) * changed.get(n, 1.0),
            group=f"{seed}-{n % groups}",
        )
        for n in range(cells)
    }  # fmt: skip


def moved(after, before):
    return residuals(after, before, common_shift(after, before))


KEYS = [(f"case{n}", "naive") for n in range(20)]


def test_a_neighbour_who_slowed_one_group_is_taken_off_that_group():
    after = run_of(seed=1, by_group={2: 1.4}, own={6: 1.3})  # cell 6 is of group 2
    found = moved(after, run_of())
    assert found[KEYS[6]] == pytest.approx(math.log(1.3))
    assert found[KEYS[10]] == pytest.approx(0.0, abs=1e-9)


def test_a_cell_alone_in_its_group_keeps_its_change():
    found = moved(run_of(1.2, seed=1, groups=20, own={3: 1.3}), run_of(groups=20))
    assert found[KEYS[3]] == pytest.approx(math.log(1.3))


def test_the_scale_of_residuals_leaves_out_those_that_are_0_by_definition():
    assert scale([0.0, 0.0, 0.0, 0.1, -0.1]) == pytest.approx(0.14826)
    assert scale([0.0]) == scale([]) == 0.0


def test_runs_that_share_no_cell_are_not_a_shift_of_0():
    draw = random.Random(1)
    runs = [
        {(name, "it"): CellTime(time_us=math.exp(draw.gauss(0, 0.1))) for name in names}
        for names in ("abc", "xyz", "abc", "xyz")
    ]
    assert (spread([runs]).shifts, spread([runs]).shift_bound) == ([], None)

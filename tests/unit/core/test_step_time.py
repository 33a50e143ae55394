"""Learned step times: two factors on a profile follow the machine."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.step_time import (
    LEAST_PROMPT_ROWS,
    MOST_ROWS,
    NODE_SHARE,
    PROMPT_STEP_S,
    PromptRows,
    StepCost,
    StepTimes,
)

PROFILE = StepCost(rows=(1, 128), seconds=(0.010, 0.137))
MODE = "plain"


def test_a_profile_is_read_between_and_beyond_its_points():
    cost = StepCost(rows=(1, 5, 10), seconds=(1.0, 2.0, 4.5))
    assert cost.from_to(1, 12).tolist() == pytest.approx([cost.at(rows) for rows in range(1, 13)])


def test_nothing_observed_leaves_the_profile():
    expected = [PROFILE.at(8 + guesses) + NODE_SHARE * PROFILE.at(1) * guesses for guesses in range(5)]
    assert StepTimes(PROFILE).with_guesses(MODE, 8, 4).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("factor", [0.01, 1.5, 300.0])
def test_the_first_step_sets_the_scale_of_a_shape(factor):
    times = StepTimes(PROFILE)
    times.observe(MODE, roots=4, guesses=0, seconds=factor * PROFILE.at(4))
    assert times.with_guesses(MODE, 4, 0)[0] == pytest.approx(factor * PROFILE.at(4))
    assert times.with_guesses(MODE, 32, 32)[-1] > factor * PROFILE.at(64)


def test_a_mode_begins_with_the_times_of_the_first_one_and_learns_its_own_in_a_few_steps():
    times = StepTimes(PROFILE, {"another": (1.2, 1.2)})
    assert times.with_guesses(MODE, 4, 0)[0] == pytest.approx(1.2 * PROFILE.at(4))
    for _ in range(30):
        times.observe(MODE, roots=4, guesses=0, seconds=1.8 * PROFILE.at(4))
    assert times.with_guesses(MODE, 4, 0)[0] == pytest.approx(1.8 * PROFILE.at(4), rel=0.05)
    assert times.with_guesses("another", 4, 0)[0] == pytest.approx(1.2 * PROFILE.at(4))


def test_one_accident_hardly_counts():
    times = StepTimes(PROFILE)
    for _ in range(200):
        times.observe(MODE, roots=8, guesses=0, seconds=PROFILE.at(8))
    times.observe(MODE, roots=8, guesses=0, seconds=100.0)
    assert times.with_guesses(MODE, 8, 0)[0] < 1.25 * PROFILE.at(8)


def test_guesses_never_save_time_whatever_was_observed():
    times, rng = StepTimes(PROFILE), np.random.default_rng(5)
    for _ in range(500):
        guesses = int(rng.integers(0, 64))
        times.observe(MODE, roots=int(rng.integers(1, 64)), guesses=guesses, seconds=float(rng.uniform(1e-4, 1.0)))
        assert np.all(np.diff(times.with_guesses(MODE, 8, 64)) > 0.0)


def test_steps_with_more_rows_than_any_profile_has_are_left_out():
    times = StepTimes(PROFILE)
    times.observe(MODE, roots=MOST_ROWS, guesses=1, seconds=9.0)
    assert not times.factors
    times.observe(MODE, roots=MOST_ROWS - 1, guesses=1, seconds=9.0)
    assert times.factors


def test_steps_that_scatter_do_not_shake_the_factors():
    times, rng = StepTimes(PROFILE), np.random.default_rng(5)
    slopes, ratios = [], []
    for number in range(1500):
        guesses = int(rng.choice([0, 0, 0, 4]))
        seconds = PROFILE.at(8 + guesses) * float(np.exp(0.35 * rng.standard_normal()))
        times.observe(MODE, roots=8, guesses=guesses, seconds=seconds)
        if number >= 300:
            alone, one_more = times.with_guesses(MODE, 8, 1)
            slopes.append(one_more / alone - 1.0)
            ratios.append(times.with_guesses(MODE, 8, 4)[-1] / times.with_guesses(MODE, 8, 0)[0])
    truth = (PROFILE.at(9) - PROFILE.at(8)) / PROFILE.at(8)
    assert np.std(ratios) < 0.1
    assert np.std(slopes) < 0.35 * truth
    assert np.mean(slopes) == pytest.approx(truth, rel=0.3)


def test_what_guesses_cost_is_told_from_what_the_rest_of_a_step_does():
    times, rng = StepTimes(PROFILE), np.random.default_rng(5)
    for _ in range(2000):
        roots, guesses = int(rng.integers(1, 40)), int(rng.integers(0, 2)) * int(rng.integers(1, 40))
        seconds = 1.5 * PROFILE.at(roots) + 0.4 * (PROFILE.at(roots + guesses) - PROFILE.at(roots))
        times.observe(MODE, roots=roots, guesses=guesses, seconds=seconds)
    whole, extra = times.factors[MODE]
    assert whole == pytest.approx(1.5, rel=0.02)
    node_s = NODE_SHARE * PROFILE.at(1)
    assert extra * (1.0 + node_s / (PROFILE.at(9) - PROFILE.at(8))) == pytest.approx(0.4, rel=0.05)


@pytest.mark.parametrize("fixed_s", [0.0, 0.3])
@pytest.mark.parametrize("row_s", [1e-4, 0.01, 0.03])
def test_steps_of_a_prompt_approach_the_bound_from_below(row_s, fixed_s):
    rows = PromptRows()
    rows.start_from(StepCost(rows=(1, 4, 8), seconds=tuple(fixed_s + row_s * count for count in (1, 4, 8))))
    seconds = []
    for _ in range(30):
        count = rows.most(4096)
        seconds.append(fixed_s + row_s * count)
        rows.observe(rows=count, seconds=seconds[-1])
    assert max(seconds) <= PROMPT_STEP_S
    assert count == 4096 or seconds[-1] > 0.9 * PROMPT_STEP_S


def test_a_slow_step_has_the_next_one_read_less_and_fast_ones_take_it_back():
    rows = PromptRows()
    rows.observe(rows=512, seconds=8.0 * PROMPT_STEP_S)
    assert rows.most(512) == 64
    rows.observe(rows=64, seconds=1000.0)
    assert rows.most(512) == LEAST_PROMPT_ROWS
    rows.observe(rows=LEAST_PROMPT_ROWS, seconds=PROMPT_STEP_S / 8)
    assert rows.most(512) == 8 * LEAST_PROMPT_ROWS
    rows.observe(rows=1, seconds=PROMPT_STEP_S / 2)
    assert rows.most(512) == 8 * LEAST_PROMPT_ROWS, "the end of a prompt shows less"


def test_beside_sessions_whose_step_alone_takes_longer_prompts_double_it_at_most():
    rows = PromptRows()
    rows.observe(rows=100, seconds=8.0, plain_s=2.0)
    assert rows.most(512) == 50


def test_where_the_first_step_is_beyond_the_bound_a_prompt_begins_with_the_fewest_rows():
    rows = PromptRows()
    rows.start_from(StepCost(rows=(1, 4), seconds=(2.0, 2.5)))
    assert rows.most(512) == LEAST_PROMPT_ROWS


def test_nothing_bounds_prompts_before_a_step_was_slow():
    assert PromptRows().most(8192) == 8192

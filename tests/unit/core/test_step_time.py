"""Learned step times: two factors on a profile follow the machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.core.step_time import MOST_ROWS, NODE_S, StepCost, StepTimes

PROFILE = StepCost(rows=(1, 128), seconds=(0.010, 0.137))


def test_a_profile_is_read_between_and_beyond_its_points():
    cost = StepCost(rows=(1, 5, 10), seconds=(1.0, 2.0, 4.5))
    assert cost.from_to(1, 12).tolist() == pytest.approx([cost.at(rows) for rows in range(1, 13)])


def test_nothing_observed_leaves_the_profile():
    times = StepTimes(replace(PROFILE, node_s=0.001))
    expected = [PROFILE.at(8 + guesses) + 0.001 * guesses for guesses in range(5)]
    assert times.with_guesses(8, 4).tolist() == pytest.approx(expected)


def test_a_slower_machine_is_learned_by_any_steps():
    times = StepTimes(PROFILE)
    for _ in range(100):
        times.observe(roots=4, guesses=0, seconds=1.5 * PROFILE.at(4))
    assert times.with_guesses(4, 0)[0] == pytest.approx(1.5 * PROFILE.at(4), rel=0.03)
    assert times.with_guesses(32, 32)[-1] > 1.3 * PROFILE.at(64)


def test_one_accident_hardly_counts():
    times = StepTimes(PROFILE)
    for _ in range(200):
        times.observe(roots=8, guesses=0, seconds=PROFILE.at(8))
    times.observe(roots=8, guesses=0, seconds=100.0)
    assert times.with_guesses(8, 0)[0] < 1.25 * PROFILE.at(8)


def test_guesses_never_save_time_whatever_was_observed():
    times, rng = StepTimes(PROFILE), np.random.default_rng(5)
    for _ in range(500):
        guesses = int(rng.integers(0, 64))
        times.observe(roots=int(rng.integers(1, 64)), guesses=guesses, seconds=float(rng.uniform(1e-4, 1.0)))
        assert np.all(np.diff(times.with_guesses(8, 64)) > 0.0)


def test_steps_with_more_rows_than_any_profile_has_are_left_out():
    times = StepTimes(PROFILE)
    times.observe(roots=MOST_ROWS, guesses=1, seconds=9.0)
    assert times.learned() == [1.0, 1.0]
    times.observe(roots=MOST_ROWS - 1, guesses=1, seconds=9.0)
    assert times.learned()[0] > 1.0


def test_steps_that_scatter_do_not_shake_the_factors():
    times, rng = StepTimes(PROFILE), np.random.default_rng(5)
    slopes, ratios = [], []
    for number in range(1500):
        guesses = int(rng.choice([0, 0, 0, 4]))
        seconds = PROFILE.at(8 + guesses) * float(np.exp(0.35 * rng.standard_normal()))
        times.observe(roots=8, guesses=guesses, seconds=seconds)
        if number >= 300:
            alone, one_more = times.with_guesses(8, 1)
            slopes.append(one_more / alone - 1.0)
            ratios.append(times.with_guesses(8, 4)[-1] / times.with_guesses(8, 0)[0])
    truth = (PROFILE.at(9) - PROFILE.at(8)) / PROFILE.at(8)
    assert np.std(ratios) < 0.1
    assert np.std(slopes) < 0.35 * truth
    assert np.mean(slopes) == pytest.approx(truth, rel=0.3)


def test_what_guesses_cost_is_told_from_what_the_rest_of_a_step_does():
    times, rng = StepTimes(PROFILE), np.random.default_rng(5)
    for _ in range(2000):
        roots, guesses = int(rng.integers(1, 40)), int(rng.integers(0, 2)) * int(rng.integers(1, 40))
        seconds = 1.5 * PROFILE.at(roots) + 0.4 * (PROFILE.at(roots + guesses) - PROFILE.at(roots))
        times.observe(roots=roots, guesses=guesses, seconds=seconds)
    whole, extra = times.learned()
    assert whole == pytest.approx(1.5, rel=0.02)
    assert extra * (1.0 + NODE_S / (PROFILE.at(9) - PROFILE.at(8))) == pytest.approx(0.4, rel=0.05)

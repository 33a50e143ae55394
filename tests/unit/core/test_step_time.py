"""Learned step times: they follow the machine, stay monotone, and know what they have not seen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.core.step_time import KNOTS, MOST_ROWS, StepCost, StepTimes

PROFILE = StepCost(rows=(1, 128), seconds=(0.010, 0.137))


def test_a_profile_is_read_between_and_beyond_its_points():
    cost = StepCost(rows=(1, 5, 10), seconds=(1.0, 2.0, 4.5))
    assert cost.from_to(1, 12).tolist() == pytest.approx([cost.at(rows) for rows in range(1, 13)])


def test_nothing_observed_leaves_the_profile():
    times = StepTimes(PROFILE)
    assert times.table.seconds == pytest.approx(PROFILE.from_to(0, KNOTS[-1])[list(KNOTS)])


def test_steps_of_a_machine_with_another_curve_are_learned():
    times, truth = StepTimes(PROFILE), StepCost(rows=(1, 8, 128), seconds=(0.020, 0.022, 0.200))
    rng = np.random.default_rng(3)
    for _ in range(2000):
        rows = int(rng.integers(1, 129))
        times.observe(rows=rows, guesses=0, seconds=truth.at(rows) * float(np.exp(0.08 * rng.standard_normal())))
    for rows in (1, 8, 32, 100):
        assert times.table.at(rows) == pytest.approx(truth.at(rows), rel=0.1)


def test_a_slower_machine_moves_points_that_were_not_visited():
    times = StepTimes(PROFILE)
    for _ in range(100):
        times.observe(rows=4, guesses=0, seconds=1.5 * PROFILE.at(4))
    assert times.table.at(4) == pytest.approx(1.5 * PROFILE.at(4), rel=0.03)
    assert times.table.at(64) > 1.3 * PROFILE.at(64)


def test_one_accident_hardly_counts():
    times = StepTimes(PROFILE)
    for _ in range(200):
        times.observe(rows=8, guesses=0, seconds=PROFILE.at(8))
    times.observe(rows=8, guesses=0, seconds=100.0)
    assert times.table.at(8) < 1.25 * PROFILE.at(8)


def test_tables_never_decrease_whatever_was_observed():
    times, rng = StepTimes(PROFILE), np.random.default_rng(5)
    for _ in range(500):
        times.observe(rows=int(rng.integers(1, 129)), guesses=0, seconds=float(rng.uniform(1e-4, 1.0)))
        assert all(low <= high for low, high in itertools.pairwise(times.table.seconds))


def test_rows_beyond_the_table_are_left_out():
    times = StepTimes(PROFILE)
    times.observe(rows=MOST_ROWS + 1, guesses=0, seconds=9.0)
    assert times.table.at(128) == pytest.approx(PROFILE.at(128))
    times.observe(rows=MOST_ROWS, guesses=0, seconds=9.0)
    assert times.table.at(MOST_ROWS) > PROFILE.at(MOST_ROWS)


def test_what_was_not_seen_for_long_is_learned_faster():
    def after_one_slow_step(num_others: int) -> float:
        times = StepTimes(PROFILE)
        for rows, count in ((8, 300), (256, num_others)):
            for _ in range(count):
                times.observe(rows=rows, guesses=0, seconds=PROFILE.at(rows))
        times.observe(rows=8, guesses=0, seconds=1.2 * PROFILE.at(8))
        return times.table.at(8) / PROFILE.at(8)

    assert 1.0 < after_one_slow_step(8) < after_one_slow_step(300) < 1.2


def test_a_model_that_rounds_up_is_charged_for_what_it_computes():
    computed = np.array([0, *(4 * -(-rows // 4) for rows in range(1, 65))])
    cost = StepCost(rows=(1, 101), seconds=(1.0, 101.0), computed=computed)
    assert [cost.at(rows) for rows in (1, 4, 5, 63, 64, 70)] == [4.0, 4.0, 8.0, 64.0, 64.0, 70.0]
    assert cost.from_to(1, 70).tolist() == [cost.at(rows) for rows in range(1, 71)]
    assert cost.slope(2) == pytest.approx(1.0)
    times = StepTimes(cost)
    for _ in range(200):
        times.observe(rows=5, guesses=0, seconds=16.0)
    table = times.table
    assert table.at(5) == table.at(8) == pytest.approx(16.0, rel=0.02)
    assert table.at(4) < table.at(5)


def test_steps_that_scatter_do_not_shake_the_table():
    times, rng = StepTimes(PROFILE), np.random.default_rng(5)
    ratios = []
    for number in range(1500):
        rows = int(rng.choice([8, 8, 8, 12]))
        times.observe(rows=rows, guesses=0, seconds=PROFILE.at(rows) * float(np.exp(0.35 * rng.standard_normal())))
        if number >= 300:
            ratios.append(times.table.at(12) / times.table.at(8))
    truth = PROFILE.at(12) / PROFILE.at(8)
    assert np.std(ratios) < 0.03 * truth
    assert np.mean(ratios) == pytest.approx(truth, rel=0.1)


def test_what_a_guess_costs_besides_its_row_is_told_from_the_row():
    times, rng = StepTimes(PROFILE), np.random.default_rng(5)
    for _ in range(2000):
        roots, guesses = int(rng.integers(1, 40)), int(rng.integers(0, 2)) * int(rng.integers(1, 40))
        seconds = PROFILE.at(roots + guesses) + 0.0002 * guesses
        times.observe(rows=roots + guesses, guesses=guesses, seconds=seconds)
    table = times.table
    assert table.node_s == pytest.approx(0.0002, rel=0.2)
    assert table.at(40) == pytest.approx(PROFILE.at(40), rel=0.05)
    assert table.with_guesses(8, 4).tolist() == pytest.approx([table.at(8 + n) + n * table.node_s for n in range(5)])
    assert table.slope(8) == pytest.approx(table.at(9) - table.at(8) + table.node_s)
    assert table.scaled(2.0).slope(8) == pytest.approx(2.0 * table.slope(8))

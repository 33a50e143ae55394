"""Step times: a table measured at start, and two factors that follow the machine."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.step_time import StepCost, StepTimes

TABLE = np.array([0.010, 0.011, 0.014, 0.020])


def learned_from(times: StepTimes, *, roots: float, guesses: float, spread: float = 0.0, count: int = 300) -> StepTimes:
    """Steps of 0 to 3 guesses whose roots and guesses take so many times as long as the table says."""
    rng = np.random.default_rng(3)
    for _ in range(count):
        guesses_s = float(TABLE[rng.integers(0, 4)] - TABLE[0])
        seconds = (roots * TABLE[0] + guesses * guesses_s) * float(np.exp(spread * rng.standard_normal()))
        times.observe(roots_s=TABLE[0], guesses_s=guesses_s, seconds=seconds)
    return times


def test_a_table_is_read_between_and_beyond_its_points():
    cost = StepCost(rows=(1, 5, 10), seconds=(1.0, 2.0, 4.5))
    assert cost.from_to(1, 12).tolist() == pytest.approx([cost.at(rows) for rows in range(1, 13)])


def test_nothing_observed_leaves_the_table():
    assert StepTimes().seconds(TABLE).tolist() == TABLE.tolist()


@pytest.mark.parametrize(("roots", "guesses"), [(1.5, 1.5), (0.7, 2.0), (1.2, 0.3)])
def test_what_roots_take_is_told_from_what_guesses_take(roots: float, guesses: float):
    times = learned_from(StepTimes(), roots=roots, guesses=guesses, spread=0.1)
    expected = roots * TABLE[0] + guesses * (TABLE - TABLE[0])
    assert times.seconds(TABLE).tolist() == pytest.approx(expected.tolist(), rel=0.08)


def test_a_slower_machine_shows_before_any_guess_was_verified():
    times = StepTimes()
    for _ in range(50):
        times.observe(roots_s=0.010, guesses_s=0.0, seconds=0.015)
    assert times.seconds(TABLE)[0] == pytest.approx(0.015, rel=0.03)
    assert times.guess > 1.3


def test_one_accident_hardly_counts():
    times = learned_from(StepTimes(), roots=1.0, guesses=1.0)
    times.observe(roots_s=0.010, guesses_s=0.001, seconds=100.0)
    assert times.seconds(TABLE)[1] < 1.1 * TABLE[1]


def test_a_model_that_rounds_up_is_charged_for_what_it_computes():
    computed = np.array([0, *(4 * -(-rows // 4) for rows in range(1, 65))])
    cost = StepCost(rows=(1, 101), seconds=(1.0, 101.0), computed=computed)
    assert [cost.at(rows) for rows in (1, 4, 5, 63, 64, 70)] == [4.0, 4.0, 8.0, 64.0, 64.0, 70.0]
    assert cost.from_to(1, 70).tolist() == [cost.at(rows) for rows in range(1, 71)]
    assert cost.slope(2) == pytest.approx(1.0)


def test_a_successor_begins_with_the_factors_and_nothing_else_is_taken_for_them():
    before, after = learned_from(StepTimes(), roots=1.3, guesses=0.8), StepTimes()
    after.resume(before.learned())
    assert after.seconds(TABLE).tolist() == before.seconds(TABLE).tolist()
    for broken in ([1.0], [1.0, float("nan")], [1.0] * 3):
        with pytest.raises(ValueError, match="needs 2 finite factors"):
            after.resume(broken)

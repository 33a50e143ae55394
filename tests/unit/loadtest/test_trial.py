"""Sides take turns, and their ratio is met within its standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from loadtest.trial import Trial, rounded_error, take_turns


def test_ratios_are_made_within_a_round() -> None:
    # A machine that gets slower changes no ratio.
    assert Trial.of([200.0, 100.0, 20.0], [100.0, 50.0, 10.0]) == Trial((2.0, 2.0, 2.0))
    with pytest.raises(ValueError, match="shorter"):
        Trial.of([1.0, 2.0], [1.0])


def test_one_round_says_nothing_of_its_error() -> None:
    one = Trial((1.0,))
    assert one.error is None
    assert not one.is_known()
    assert not one.is_known(5.0)
    assert not one.meets(least=1.01)


def test_the_error_shrinks_with_the_root_of_the_rounds() -> None:
    few, many = Trial((0.9, 1.1) * 2), Trial((0.9, 1.1) * 50)
    assert few.error is not None
    assert many.error == pytest.approx(few.error / math.sqrt(99 / 3))
    assert rounded_error(few, many, Trial((1.0,))) == round(few.error, 3)
    assert rounded_error(Trial((1.0,))) is None


@pytest.mark.parametrize("goal", [0.2, 5.0])
def test_what_lies_far_from_its_goal_on_either_side_is_known_however_rough(goal: float) -> None:
    assert Trial((0.9, 1.0, 1.1)).is_known(goal)
    assert not Trial((0.9, 1.0, 1.1)).is_known()


def test_what_lies_near_is_known_once_it_is_precise() -> None:
    assert not Trial((0.9, 1.0, 1.1)).is_known(0.98)
    assert Trial((0.995, 1.0, 1.005)).is_known(0.999)


def test_a_goal_met_within_the_standard_error_is_met_on_either_side() -> None:
    trial = Trial((0.9, 1.0, 1.1))  # its error is 0.0577
    assert trial.meets(least=1.05)
    assert trial.meets(most=0.95)
    assert not trial.meets(least=1.06)
    assert not trial.meets(most=0.94)
    assert trial.meets()


async def measured(rounds: int, most_rounds: int, enough: int) -> tuple[str, dict[str, list[int]]]:
    """The order in which three sides were measured, and the results: the number of the turn."""
    order: list[str] = []

    async def measure(side: str) -> int:
        order.append(side)
        return len(order)

    def is_known(results: Mapping[str, Sequence[int]]) -> bool:
        return len(results["a"]) >= enough

    results = await take_turns("abc", measure, rounds=rounds, most_rounds=most_rounds, is_known=is_known, title="test")
    return "".join(order), results


async def test_every_other_round_is_in_the_opposite_order() -> None:
    order, results = await measured(3, 0, 99)
    assert order == "abccbaabc"
    assert results == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


@pytest.mark.parametrize(("enough", "num_rounds"), [(0, 2), (3, 3), (99, 4)])
async def test_rounds_go_on_from_the_least_until_enough_is_known_or_to_the_most(enough: int, num_rounds: int) -> None:
    order, _ = await measured(2, 4, enough)
    assert len(order) == 3 * num_rounds

"""Benches stop when another round would say little."""

from __future__ import annotations

import math

import pytest
from loadtest.rounds import is_known, standard_error


def test_one_round_says_nothing_of_its_error():
    assert standard_error([1.0]) == math.inf
    assert not is_known([5.0], 1.0)


def test_the_error_shrinks_with_the_root_of_the_rounds():
    few, many = [0.9, 1.1] * 2, [0.9, 1.1] * 50
    assert standard_error(many) == pytest.approx(standard_error(few) / math.sqrt(99 / 3))


@pytest.mark.parametrize("asked", [0.2, 5.0])
def test_what_lies_far_from_what_is_asked_on_either_side_is_known_however_rough(asked):
    assert is_known([0.9, 1.0, 1.1], asked)


def test_what_lies_near_is_known_once_it_is_precise():
    assert not is_known([0.9, 1.0, 1.1], 0.98)
    assert is_known([0.995, 1.0, 1.005], 0.999)

"""The objective against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.goodput import best_prefix, is_worth

GAINS = st.lists(st.floats(0.0, 8.0), max_size=12).map(lambda gains: sorted(gains, reverse=True))
SECONDS = st.floats(1e-4, 1.0)


@given(GAINS, st.floats(0.5, 50.0), st.lists(SECONDS, min_size=13, max_size=13))
def test_no_other_number_of_options_has_a_higher_goodput_and_no_smaller_one_as_high(gains, expected, more):
    seconds = [sum(more[: count + 1]) for count in range(len(gains) + 1)]
    rates = [(expected + sum(gains[:count])) / seconds[count] for count in range(len(gains) + 1)]
    count, rate = best_prefix(expected, gains, seconds)
    assert rate == pytest.approx(max(rates))
    assert all(each < rate for each in rates[:count])


@given(GAINS, st.floats(0.5, 50.0), SECONDS, SECONDS, st.floats(1.01, 10.0))
def test_what_gets_dearer_is_taken_no_more_often(gains, expected, step_s, each_s, factor):
    def taken(times: float) -> int:
        return best_prefix(expected, gains, [step_s + times * each_s * count for count in range(len(gains) + 1)])[0]

    assert taken(factor) <= taken(1.0)


def test_what_costs_nothing_is_taken_wherever_it_gains_and_what_gains_nothing_nowhere():
    assert best_prefix(3.0, [2.0, 0.1, 0.0], [0.02] * 4)[0] == 2
    assert best_prefix(3.0, [0.0, 0.0], [0.02, 0.020001, 0.020002])[0] == 0


def test_an_option_that_does_not_pay_alone_is_taken_with_those_after_it():
    assert best_prefix(1.0, [0.8], [0.020, 0.038])[0] == 0
    assert best_prefix(8.0, [0.8] * 8, [0.020, *(0.030 + 1e-5 * count for count in range(8))])[0] == 8


@given(st.floats(0.0, 5.0), st.floats(0.5, 50.0), SECONDS, SECONDS)
def test_one_option_alone_is_the_same_question(gain, expected, cost_s, step_s):
    rates = expected / step_s, (expected + gain) / (step_s + cost_s)
    if abs(rates[1] - rates[0]) > 1e-9 * rates[0]:
        assert is_worth(gain, expected, cost_s=cost_s, step_s=step_s) == (rates[1] > rates[0])

"""The closed forms agree with sums, with simulation, and with what they say themselves in `docs/gains.md`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadtest.gains import best_gamma, expected_tokens, goodput, speed_up

from paceline.core.errors import ConfigError
from paceline.core.step_time import DEFAULT_STEP_COST

PAGE = Path(__file__).parents[3] / "docs" / "gains.md"
COST_RATIO = 0.07


@given(st.floats(0.0, 1.0), st.integers(0, 40))
def test_the_closed_form_is_the_sum_over_positions(acceptance, gamma):
    assert expected_tokens(acceptance, gamma) == pytest.approx(sum(acceptance**k for k in range(gamma + 1)))


def test_the_closed_form_is_what_a_walk_over_coin_tosses_commits():
    rng = np.random.default_rng(3)
    tosses = rng.random((200_000, 5)) < 0.7
    committed = 1 + np.cumprod(tosses, axis=1).sum(axis=1)
    assert expected_tokens(0.7, 5) == pytest.approx(committed.mean(), abs=0.02)


def test_without_drafts_a_step_is_a_plain_step():
    assert (expected_tokens(0.9, 0), speed_up(0.9, 0, COST_RATIO)) == (1.0, 1.0)


def test_a_drafter_that_is_never_right_is_not_asked():
    assert best_gamma(lambda gamma: speed_up(0.0, gamma, COST_RATIO)) == 0


def test_where_drafting_is_free_more_is_better_and_under_load_it_is_not():
    free = [best_gamma(lambda gamma: speed_up(0.8, gamma, 0.0), most=most) for most in (2, 9)]
    loaded = [
        best_gamma(lambda gamma, count=count: goodput(0.6, gamma, count, DEFAULT_STEP_COST.at), most=16)
        for count in (1, 8, 64)
    ]
    assert free == [2, 9]
    assert loaded == sorted(loaded, reverse=True)
    assert loaded[-1] == 0


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: expected_tokens(1.5, 2), "acceptance"),
        (lambda: expected_tokens(0.5, -1), "gamma"),
        (lambda: speed_up(0.5, 2, -0.1), "cost_ratio"),
    ],
)
def test_arguments_outside_their_limits_are_named(call, field):
    with pytest.raises(ConfigError, match=field):
        call()


def test_the_page_shows_what_the_functions_say():
    rows = re.findall(r"^\| (0\.\d) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [row[0] for row in rows] == [f"{tenth / 10:.1f}" for tenth in range(3, 10)]
    for name, cells in rows:
        acceptance = float(name)
        gamma = best_gamma(lambda count, rate=acceptance: speed_up(rate, count, COST_RATIO))
        expected = [f"{expected_tokens(acceptance, count):.2f}" for count in (1, 2, 3, 4, 5, 7)]
        assert cells.split(" | ") == [*expected, str(gamma), f"{speed_up(acceptance, gamma, COST_RATIO):.2f}"]


def test_the_page_shows_the_best_gamma_under_load():
    rows = re.findall(r"^\| a = (0\.\d) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [row[0] for row in rows] == [f"{tenth / 10:.1f}" for tenth in range(3, 10)]
    for name, cells in rows:
        expected = []
        for count in (1, 4, 8, 16, 32, 64):

            def worth(gamma: int, count: int = count, rate: float = float(name)) -> float:
                return goodput(rate, gamma, count, DEFAULT_STEP_COST.at)

            gamma = best_gamma(worth, most=16)
            expected.append(f"{gamma} ({worth(gamma) / worth(0):.2f})")
        assert cells.split(" | ") == expected

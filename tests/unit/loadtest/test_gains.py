"""The tables of `docs/gains.md` are what its formulas give, and the first formula is what a walk commits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from loadtest.literature import TOKEN_MS, VERIFY_MS, best_length, expected, formula
from loadtest.methods import expected_tokens

from paceline.core.step_time import DEFAULT_STEP_COST

PAGE = Path(__file__).parents[3] / "docs" / "gains.md"
COST_RATIO = 0.07


def speed_up(acceptance: float, gamma: int, cost_ratio: float) -> float:
    """Speed over plain decoding when every draft token is waited for (2211.17192, theorem 3.8)."""
    return expected_tokens(acceptance, gamma) / (1.0 + gamma * cost_ratio)


def goodput(acceptance: float, gamma: int, num_sessions: int) -> float:
    """Tokens/s of sessions that verify `gamma` draft tokens each, drafting hidden."""
    step_s = DEFAULT_STEP_COST.at(num_sessions * (1 + gamma))
    return num_sessions * expected_tokens(acceptance, gamma) / step_s


def best_gamma(worth: Callable[[int], float], *, most: int = 64) -> int:
    """The gamma at which `worth` is highest, the smallest of equals."""
    return max(range(most + 1), key=lambda gamma: (worth(gamma), -gamma))


def test_the_closed_form_is_the_sum_over_positions_and_what_a_walk_over_coin_tosses_commits():
    for acceptance in (0.0, 0.3, 0.95, 1.0):
        for gamma in (0, 1, 7, 40):
            assert expected_tokens(acceptance, gamma) == pytest.approx(sum(acceptance**k for k in range(gamma + 1)))
    tosses = np.random.default_rng(3).random((200_000, 5)) < 0.7
    committed = 1 + np.cumprod(tosses, axis=1).sum(axis=1)
    assert expected_tokens(0.7, 5) == pytest.approx(committed.mean(), abs=0.02)


def rows(first: str) -> list[tuple[str, str]]:
    found = re.findall(rf"^\| {first}(0\.\d) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [row[0] for row in found] == [f"{tenth / 10:.1f}" for tenth in range(3, 10)]
    return found


def test_the_page_shows_what_the_formulas_give():
    for name, cells in rows(""):
        acceptance = float(name)
        gamma = best_gamma(lambda count, rate=acceptance: speed_up(rate, count, COST_RATIO))
        expected = [f"{expected_tokens(acceptance, count):.2f}" for count in (1, 2, 3, 4, 5, 7)]
        assert cells.split(" | ") == [*expected, str(gamma), f"{speed_up(acceptance, gamma, COST_RATIO):.2f}"]


def test_the_page_shows_the_best_gamma_under_load():
    for name, cells in rows("a = "):
        expected = []
        for count in (1, 4, 8, 16, 32, 64):

            def worth(gamma: int, count: int = count, rate: float = float(name)) -> float:
                return goodput(rate, gamma, count)

            gamma = best_gamma(worth, most=16)
            expected.append(f"{gamma} ({worth(gamma) / worth(0):.2f})")
        assert cells.split(" | ") == expected


def test_the_page_shows_what_the_formula_gives_at_the_constants_of_the_literature():
    found = re.findall(
        r"^\| (\d+) \| (0\.\d) \| (\d\.\d\d) \|.* (\d\.\d\d) \| \d\.\d\d \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    assert len(found) == 5
    for k, acceptance, speed, overlapped in found:
        chance = float(acceptance)
        assert (int(k), speed) == (best_length(chance), f"{formula(chance, int(k)):.2f}")
        assert overlapped == f"{expected(chance, int(k)) * TOKEN_MS / VERIFY_MS:.2f}"

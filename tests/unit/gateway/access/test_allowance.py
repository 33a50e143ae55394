"""A caller may use its reserve at once, and then what is added each second; others have reserves of their own."""

from __future__ import annotations

import pytest

from paceline.gateway.access.allowance import Allowance


def test_a_reserve_is_used_up_goes_into_debt_once_and_fills_again() -> None:
    now_s = 50.0
    allowance = Allowance(burst=10.0, per_s=0.5, clock=lambda: now_s)
    allowance.use("a", 9.0)
    assert allowance.wait_s("a") == 0
    allowance.use("a", 3.0)
    assert allowance.wait_s("a") == pytest.approx(4.0)
    assert allowance.wait_s("b") == 0
    now_s += 5.0
    assert allowance.wait_s("a") == 0
    allowance.use("a", 1.5)
    assert allowance.wait_s("a") == pytest.approx(2.0)


def test_a_reserve_holds_no_more_than_the_burst_and_whoever_has_all_of_it_is_forgotten() -> None:
    now_s = 50.0
    allowance = Allowance(burst=10.0, per_s=0.5, clock=lambda: now_s)
    allowance.use("a", 4.0)
    now_s += 1000.0
    allowance.use("b", 1.0)
    assert list(allowance._full_at_s) == ["b"]
    allowance.use("a", 11.0)
    assert allowance.wait_s("a") == pytest.approx(2.0)

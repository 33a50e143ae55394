"""Verifiers that have just refused a session are not asked again at once."""

from __future__ import annotations

import pytest

from paceline.core.errors import OverloadedError
from paceline.gateway.fleet.full_verifiers import MOST_S, ToldFull
from tests.support.clock import Clock

FULL = OverloadedError("a place would be free in about 3.0 s", retry_after_s=1.0)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def told_full(clock: Clock) -> ToldFull:
    told_full = ToldFull(clock)
    told_full.told("a", FULL, 2.0)
    return told_full


def test_what_the_only_verifier_said_is_said_again_for_a_moment(told_full: ToldFull, clock: Clock) -> None:
    with pytest.raises(OverloadedError, match="about 3"):
        told_full.check(["a"], 2.0)
    clock.now_s += MOST_S
    told_full.check(["a"], 2.0)


def test_one_that_has_said_nothing_is_asked(told_full: ToldFull) -> None:
    told_full.check(["a", "b"], 2.0)
    told_full.told("b", FULL, 2.0)
    with pytest.raises(OverloadedError):
        told_full.check(["a", "b"], 2.0)


def test_a_session_that_may_wait_longer_is_not_meant(told_full: ToldFull) -> None:
    told_full.check(["a"], 2.5)
    told_full.check(["a"], None)
    with pytest.raises(OverloadedError):
        told_full.check(["a"], 1.0)


def test_a_word_holds_no_longer_than_the_verifier_says(clock: Clock) -> None:
    told_full = ToldFull(clock)
    told_full.told("a", OverloadedError("soon", retry_after_s=0.1), 2.0)
    clock.now_s += 0.1
    told_full.check(["a"], 2.0)


def test_nobody_is_refused_where_there_is_no_verifier_or_it_was_forgotten(told_full: ToldFull) -> None:
    told_full.check([], 2.0)
    told_full.keep_only(["b"])
    told_full.check(["a"], 2.0)

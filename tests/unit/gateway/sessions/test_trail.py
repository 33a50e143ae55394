"""A request is not run again once engines have died of it, and not because others died."""

from __future__ import annotations

import pytest

from paceline.core.errors import EngineDiedError, PacelineError, PeerLostError, UnavailableError
from paceline.gateway.sessions.trail import Suspicion

TOLD, LOST, AWAY = EngineDiedError("died"), PeerLostError("reset"), UnavailableError("shuts down")


@pytest.mark.parametrize("first", [TOLD, LOST])
@pytest.mark.parametrize("second", [TOLD, LOST])
def test_two_engines_that_died_while_they_ran_it_are_enough(first: PacelineError, second: PacelineError) -> None:
    once = Suspicion().after(first, ran=True, progressed=False)
    assert once.suspect
    assert not once.guilty
    assert once.after(second, ran=True, progressed=False).guilty


def test_a_process_that_vanished_before_its_first_message_makes_suspects_but_proves_nothing() -> None:
    assert Suspicion().after(LOST, ran=False, unheard=True) == Suspicion(1)
    suspect = Suspicion(1)
    for _ in range(5):
        suspect = suspect.after(LOST, ran=False, unheard=True)
    assert suspect == Suspicion(1)
    assert suspect.after(LOST, ran=True, progressed=False).guilty


def test_a_verifier_that_was_not_reached_or_goes_away_in_order_is_no_evidence() -> None:
    assert Suspicion().after(LOST, ran=False, unheard=False) == Suspicion()
    assert not Suspicion().after(AWAY, ran=True, progressed=False).suspect


def test_a_token_takes_back_what_was_before_it() -> None:
    assert Suspicion(1).after(LOST, ran=True, progressed=True) == Suspicion(1, has_tokens=True)
    assert Suspicion(1).after(AWAY, ran=True, progressed=True) == Suspicion(has_tokens=True)


def test_a_session_that_has_given_tokens_is_allowed_one_death_more() -> None:
    known = Suspicion(has_tokens=True)
    seen = []
    for _ in range(3):
        known = known.after(TOLD, ran=True)
        seen.append((known.suspect, known.guilty))
    assert seen == [(False, False), (True, False), (True, True)]

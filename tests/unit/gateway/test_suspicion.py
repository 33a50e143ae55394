"""A request is not run again once engines have died of it, and not because others died."""

from __future__ import annotations

from paceline.core.errors import EngineDiedError, PeerLostError, UnavailableError
from paceline.gateway.suspicion import MOST_LOST, MOST_TOLD, Suspicion

TOLD, LOST, AWAY = EngineDiedError("died"), PeerLostError("reset"), UnavailableError("shuts down")


def test_two_engines_that_name_it_are_enough() -> None:
    suspicion = Suspicion()
    for number in range(1, MOST_TOLD + 1):
        suspicion = suspicion.after(TOLD, ran=True, progressed=False)
        assert suspicion.suspect
        assert suspicion.guilty == (number == MOST_TOLD)


def test_engines_that_only_vanished_take_one_more() -> None:
    suspicion = Suspicion()
    for number in range(1, MOST_LOST + 1):
        suspicion = suspicion.after(LOST, ran=True, progressed=False)
        assert suspicion.guilty == (number == MOST_LOST)


def test_an_engine_that_died_before_it_ran_the_session_says_nothing() -> None:
    assert not Suspicion().after(LOST, ran=False, progressed=False).suspect


def test_a_verifier_that_goes_away_in_order_says_nothing() -> None:
    assert not Suspicion().after(AWAY, ran=True, progressed=False).suspect


def test_a_token_takes_back_what_was_before_it() -> None:
    suspicion = Suspicion(num_deaths=1, num_told=1).after(LOST, ran=True, progressed=True)
    assert suspicion == Suspicion(num_deaths=1, num_told=0)
    assert Suspicion(num_deaths=1, num_told=1).after(AWAY, ran=True, progressed=True) == Suspicion()


def test_an_engine_that_vanished_is_no_proof_beside_one_that_names_it() -> None:
    for first, second in ((TOLD, LOST), (LOST, TOLD)):
        suspicion = Suspicion().after(first, ran=True, progressed=False).after(second, ran=True, progressed=False)
        assert suspicion.suspect
        assert not suspicion.guilty
        assert suspicion.after(LOST, ran=True, progressed=False).guilty

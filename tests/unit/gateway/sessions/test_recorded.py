"""A request is not run again once engines have died of it, and not because others died."""

from __future__ import annotations

import pytest

from paceline.core.errors import EngineDiedError, PacelineError, PeerLostError, PeerSilentError, UnavailableError
from paceline.gateway.sessions.recorded import EngineDeaths

TOLD, LOST, AWAY = EngineDiedError("died"), PeerLostError("reset"), UnavailableError("shuts down")


@pytest.mark.parametrize("first", [TOLD, LOST])
@pytest.mark.parametrize("second", [TOLD, LOST])
def test_two_engines_that_died_while_they_ran_it_are_enough(first: PacelineError, second: PacelineError) -> None:
    once = EngineDeaths().after(first, ran=True)
    assert not once.too_many
    assert once.after(second, ran=True).too_many


def test_a_process_that_vanished_before_its_first_message_counts_since_it_cannot_say_any_more_what_it_ran() -> None:
    once = EngineDeaths().after(LOST, ran=False, unheard=True)
    assert once == EngineDeaths(1)
    assert once.after(LOST, ran=False, unheard=True).too_many


def test_a_verifier_that_was_not_reached_or_goes_away_in_order_is_no_evidence() -> None:
    assert EngineDeaths().after(LOST, ran=False, unheard=False) == EngineDeaths()
    assert EngineDeaths().after(AWAY, ran=True) == EngineDeaths()


def test_a_verifier_that_is_silent_is_not_known_to_have_died() -> None:
    silent = PeerSilentError("was silent for 15 s")
    assert EngineDeaths().after(silent, ran=True).count == 0
    assert EngineDeaths(1).after(silent, ran=True, unheard=True).count == 1
    assert EngineDeaths().after(silent, ran=False) == EngineDeaths()


def test_a_session_with_which_one_verifier_after_the_other_falls_silent_is_not_run_for_ever() -> None:
    silent, known, seen = PeerSilentError("was silent for 15 s"), EngineDeaths(), []
    for _ in range(3):
        known = known.after(silent, ran=True)
        seen.append((known.count, known.parts, known.too_many))
    assert seen == [(0, False, False), (1, True, False), (2, True, True)]
    # Tokens of it show that it can be computed.
    assert EngineDeaths(silent=1).after(silent, ran=True, progressed=True).count == 0


def test_a_token_takes_back_what_was_before_it() -> None:
    assert EngineDeaths(1).after(LOST, ran=True, progressed=True) == EngineDeaths(1, has_tokens=True)
    assert EngineDeaths(1).after(AWAY, ran=True, progressed=True) == EngineDeaths(has_tokens=True)


def test_a_session_that_has_given_tokens_is_allowed_one_death_more() -> None:
    known = EngineDeaths(has_tokens=True)
    seen = []
    for _ in range(3):
        known = known.after(TOLD, ran=True)
        seen.append(known.too_many)
    assert seen == [False, False, True]

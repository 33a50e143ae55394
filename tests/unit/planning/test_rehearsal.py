"""A rehearsal on simulated devices: it finds what drafting is worth, and leaves nothing else behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.core.drafting_mode import Mode
from paceline.core.target_events import Reason
from paceline.planning.engines import DrafterAtWork, JumpingLoop, Request, VerifierAtWork, simulate
from paceline.simulated.profile import Profile
from tests.unit.planning.facts import profile, sure_guesses

NOISE = 0.02


def rehearsed(
    facts: Profile, *, max_sessions: int = 4, colocated: bool = False, then: Sequence[Request] = ()
) -> VerifierAtWork:
    """A verifier that has rehearsed, and then has served some requests."""
    facts = replace(facts, target=replace(facts.target, max_sessions=max_sessions))

    async def rehearse(loop: JumpingLoop) -> VerifierAtWork:
        drafter = None if colocated else DrafterAtWork(facts, loop, 1)
        verifier = VerifierAtWork(facts, loop, colocated=colocated, drafter=drafter)
        tasks = [loop.create_task(each.run()) for each in (drafter, verifier) if each is not None]
        await verifier.rehearse()
        await asyncio.gather(*map(verifier.serve, then))
        # What drafters are told at last.
        await asyncio.sleep(1.0)
        assert not any(map(asyncio.Task.done, tasks))
        return verifier

    return simulate(rehearse)


@pytest.mark.parametrize(("right", "colocated"), [(True, False), (True, True), (False, False)])
def test_what_was_rehearsed_is_decided_by_at_every_load(right: bool, colocated: bool) -> None:
    mode = rehearsed(profile(sure_guesses(right=right), noise=NOISE), colocated=colocated).policy.mode
    assert sorted(mode.loads) == [0, 1, 2]
    assert all(load.rates[each].is_known for load in mode.loads.values() for each in (Mode.PLAIN, Mode.DRAFTING))
    for load in (1, 2, 3, 4):
        assert mode.enter(load) is (Mode.DRAFTING if right else Mode.PLAIN)
        assert mode.reason is (Reason.PAYS if right else Reason.DID_NOT_PAY)


def test_plain_steps_of_a_rehearsal_are_those_of_the_device_within_its_noise() -> None:
    for load in rehearsed(profile(noise=NOISE)).policy.mode.loads.values():
        assert load.rates[Mode.PLAIN].value == pytest.approx(1.0, rel=NOISE)


@pytest.mark.full
def test_a_rehearsal_leaves_no_session_or_page_behind_and_users_begin_with_what_it_knows_of_guesses() -> None:
    asked = Request(1, 0.0, 20, 64)
    verifier, never = (rehearsed(profile(sure_guesses(right=True)), then=then) for then in ([asked], []))
    for engine in (verifier.engine, never.engine):
        assert engine.num_sessions == engine.pool.num_used == 0
    assert not never.engine.pool._hash_of, "no page is found by the prompts of others"
    assert never.engine.learned()["calibrations"].keys() == verifier.engine.learned()["calibrations"].keys()
    assert asked.num_received == 64
    assert verifier.policy.rehearsed

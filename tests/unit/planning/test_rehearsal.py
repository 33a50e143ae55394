"""A rehearsal on simulated devices: it finds what drafting is worth, and leaves a profile behind and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from paceline.core.drafting_mode import Mode
from paceline.core.step_time import StepCost
from paceline.core.target_events import Reason
from paceline.engine.rehearsing import Take
from paceline.planning.engines import DrafterAtWork, JumpingLoop, Request, VerifierAtWork, simulate
from paceline.planning.promise import steady
from paceline.planning.simulation import Way
from paceline.simulated.guesses import DrawnGuesses, Guesses, drawn
from paceline.simulated.measured import measured_profile
from paceline.simulated.profile import Profile
from tests.unit.planning.facts import STEP_S, profile, sure_guesses

NOISE = 0.02


def rehearsed(
    facts: Profile, *, max_sessions: int = 4, colocated: bool = False, then: Sequence[Request] = ()
) -> VerifierAtWork:
    """A verifier that has rehearsed, and then has served some requests."""
    return with_takes(facts, max_sessions=max_sessions, colocated=colocated, then=then)[0]


def with_takes(
    facts: Profile, *, max_sessions: int, colocated: bool = False, then: Sequence[Request] = ()
) -> tuple[VerifierAtWork, Sequence[Take]]:
    facts = replace(facts, target=replace(facts.target, max_sessions=max_sessions))

    async def rehearse(loop: JumpingLoop) -> tuple[VerifierAtWork, Sequence[Take]]:
        drafters = [] if colocated else [DrafterAtWork("drafter", facts, loop, 1)]
        verifier = VerifierAtWork(facts, loop, colocated=colocated, drafters=drafters)
        tasks = [loop.create_task(each.run()) for each in (*drafters, verifier)]
        takes = await verifier.rehearse()
        await asyncio.gather(*map(verifier.serve, then))
        # What drafters are told at last.
        await asyncio.sleep(1.0)
        assert not any(map(asyncio.Task.done, tasks))
        return verifier, takes

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
    asked = Request(number=1, at_s=0.0, num_prompt_tokens=20, num_output_tokens=64)
    verifier, never = (rehearsed(profile(sure_guesses(right=True)), then=then) for then in ([asked], []))
    for engine in (verifier.engine, never.engine):
        assert engine.num_sessions == engine.pool.num_used == 0
    assert not never.engine.pool._hash_of, "no page is found by the prompts of others"
    assert never.engine.learned()["calibrations"].keys() == verifier.engine.learned()["calibrations"].keys()
    assert asked.num_received == 64
    assert verifier.policy.rehearsed


@pytest.mark.full
@pytest.mark.parametrize(("draft", "overhead"), [(0.1, 0.0), (0.4, 0.2)])
def test_a_rehearsed_profile_is_the_given_one_within_its_noise(draft: float, overhead: float) -> None:
    law = DrawnGuesses()
    costs = StepCost(rows=(1, 513), seconds=(draft * STEP_S, 5 * draft * STEP_S))
    given = replace(profile(law, noise=NOISE, draft_cost=costs), drafting_overhead=overhead)
    verifier, takes = with_takes(given, max_sessions=16)
    calibrations = verifier.engine.learned()["calibrations"]
    found = measured_profile(takes, calibrations, name="found", kv_tokens=given.target.kv_tokens, max_rows=512)
    assert found is not None
    for rows in (1, 6, 16, 64):
        assert found.target.cost.at(rows) == pytest.approx(given.target.cost.at(rows), rel=3 * NOISE)
    for rows in (4, 12):
        assert found.drafter.cost.at(rows) == pytest.approx(costs.at(rows), rel=0.15)
    assert found.target.noise == pytest.approx(NOISE, rel=0.3)
    assert found.drafting_overhead == pytest.approx(overhead, abs=0.03)
    # Some hundred guesses have shown it.
    assert chance(found.truth) == pytest.approx(chance(law), abs=0.08)
    for way in (Way.PLAIN, Way.TIER):
        rates = [steady(each, way, 8, seconds=32.0).tokens_per_s for each in (found, given)]
        assert rates[0] == pytest.approx(rates[1], rel=0.1)


def chance(law: Guesses) -> float:
    """Share of first guesses that are right."""
    assert isinstance(law, DrawnGuesses)
    return fmean(place.rank == 0 for place in drawn(law).texts[0])

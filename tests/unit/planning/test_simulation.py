"""The simulated fleet: what goes in comes out, closed forms where there are any, and the policy is that of core."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from loadtest.host_time import ChargedDevice

from paceline.core import draft_policy
from paceline.core.draft_policy import Goodput
from paceline.core.errors import ConfigError
from paceline.core.messages import OpenSession
from paceline.core.params import SamplingParams
from paceline.core.step_time import StepCost
from paceline.engine.target import TargetEngine
from paceline.planning.arrivals import Arrival
from paceline.planning.engines import DeviceAtWork, DrafterAtWork, JumpingLoop, Link, VerifierAtWork, simulate
from paceline.planning.simulation import Outcome, PlannedFleet, Way, run_closed, run_open
from paceline.simulated.profile import Profile
from tests.unit.planning.facts import ROW_S, STEP_S, equal, profile, sure_guesses

PLAIN, TIER, COLOCATED = map(PlannedFleet.around, (Way.PLAIN, Way.TIER, Way.COLOCATED))
WAYS = pytest.mark.parametrize("cell", [PLAIN, TIER, COLOCATED], ids=lambda cell: cell.way.name)
MIXED = [Arrival(0.02 * index, 5 + 37 * index % 200, 1 + 13 * index % 40) for index in range(20)]


def closed(facts: Profile, cell: PlannedFleet, lengths: Sequence[tuple[int, int]], *, streams: int) -> Outcome:
    """A load of streams on one verifier."""
    [outcome] = run_closed([facts], cell.way, lengths, streams=[streams])
    return outcome


def received(outcome: Outcome) -> list[int]:
    return [each.num_received for each in outcome.requests]


@WAYS
@pytest.mark.parametrize("kv_tokens", [32_768, 320], ids=["room for all", "room for few, so sessions lose their pages"])
def test_every_token_asked_for_comes_out_once(cell: PlannedFleet, kv_tokens: int) -> None:
    outcome = run_open(profile(kv_tokens=kv_tokens, noise=0.05), cell, MIXED)
    assert received(outcome) == [each.num_output_tokens for each in MIXED]
    assert outcome.num_unfinished == 0


@WAYS
def test_the_seed_decides_everything(cell: PlannedFleet) -> None:
    first, again, other = (run_open(profile(noise=0.1), cell, MIXED, seed=seed) for seed in (1, 1, 2))
    assert first.requests == again.requests
    assert first.requests != other.requests


def test_on_a_device_with_a_core_of_its_own_code_takes_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time goes on by a millisecond whenever somebody looks at it."""
    looks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: 1e-3 * next(looks))
    free, charged = (
        run_closed([profile()], Way.TIER, equal(2), streams=[2], device=device)[0]
        for device in (DeviceAtWork, ChargedDevice)
    )
    assert received(charged) == received(free)
    plain = run_closed([profile()], Way.PLAIN, equal(1, num_prompt_tokens=1), streams=[1], device=ChargedDevice)[0]
    looks_a_step = (plain.itl_s()[0] - STEP_S) / 1e-3
    assert looks_a_step >= 1
    assert looks_a_step == pytest.approx(round(looks_a_step))


@pytest.mark.parametrize("streams", [1, 4, 16])
def test_without_speculation_every_step_takes_what_its_rows_take(streams: int) -> None:
    outcome = closed(profile(), PLAIN, equal(streams, num_prompt_tokens=1), streams=streams)
    step_s = STEP_S + (streams - 1) * ROW_S
    assert outcome.itl_s()[0] == pytest.approx(step_s)
    assert outcome.requests[0].num_steps == 23
    assert outcome.requests[0].pieces[-1][0] == pytest.approx(24 * step_s)
    assert outcome.gamma == 0.0


def test_prompts_are_computed_in_chunks_of_what_a_step_holds() -> None:
    outcome = run_open(profile(), PLAIN, [Arrival(0.0, 1100, 1)])
    # 512 rows a step: two full ones and one of 76.
    expected = 3 * STEP_S + (511 + 511 + 75) * ROW_S
    assert outcome.ttft_s()[0] == pytest.approx(expected + profile().door_s)


def test_pages_bound_the_sessions_of_a_step() -> None:
    # Three pages each, and six pages in all.
    outcome = closed(profile(kv_tokens=96), PLAIN, equal(8, 33, 14), streams=8)
    assert outcome.itl_s()[0] == pytest.approx(STEP_S + ROW_S)
    assert received(outcome) == [14] * 8


def test_guesses_that_are_always_wrong_commit_nothing() -> None:
    outcome = closed(profile(sure_guesses(right=False)), TIER, equal(2, 1, 150), streams=1)
    assert outcome.tokens_per_step == 1.0
    assert received(outcome) == [150] * 2
    assert outcome.gamma < 0.5, "the controller has drafters rest"


def test_guesses_that_are_always_right_save_most_steps() -> None:
    plain, tier, colocated = (
        closed(profile(sure_guesses(right=True)), cell, equal(2, 1, 150), streams=1)
        for cell in (PLAIN, TIER, COLOCATED)
    )
    assert tier.tokens_per_step > 4.0
    assert tier.tokens_per_s > 3.0 * plain.tokens_per_s
    # Co-located, the same guesses cost the verifier's time.
    assert plain.tokens_per_s < colocated.tokens_per_s < tier.tokens_per_s


def test_where_every_row_costs_a_step_speculation_stops_by_itself() -> None:
    dear = StepCost(rows=(1, 2, 513), seconds=(0.010, 0.020, 5.13))
    plain, tier = (closed(profile(cost=dear), cell, equal(8, 1, 100), streams=4) for cell in (PLAIN, TIER))
    assert tier.tokens_per_s > 0.95 * plain.tokens_per_s
    assert tier.gamma < 0.2


def test_a_distant_drafter_is_of_less_use() -> None:
    rates = [
        closed(profile(link_s=link_s), TIER, equal(2, 1, 100), streams=1).tokens_per_s
        for link_s in (0.0001, 0.005, 0.05)
    ]
    assert rates == sorted(rates, reverse=True)


def test_a_drafter_that_reads_a_prompt_for_ten_steps_drafts_in_the_first_text() -> None:
    slow = StepCost(rows=(1, 1025), seconds=(0.001, 0.201))
    facts = profile(sure_guesses(right=True), draft_cost=slow)
    plain, tier = (closed(facts, cell, equal(1, 500, 400), streams=1) for cell in (PLAIN, TIER))
    assert tier.tokens_per_s > 1.5 * plain.tokens_per_s


@pytest.mark.parametrize("streams", [1, 8])
def test_a_drafter_that_never_responds_costs_nothing(streams: int) -> None:
    distant = profile(sure_guesses(right=True), link_s=1e6)
    plain, tier = (closed(distant, cell, equal(streams, 1, 700), streams=streams) for cell in (PLAIN, TIER))
    assert tier.gamma == 0.0
    assert tier.tokens_per_s > 0.999 * plain.tokens_per_s


def test_what_is_simulated_is_the_engine_that_serves() -> None:
    async def made(loop: JumpingLoop) -> VerifierAtWork:
        return VerifierAtWork(profile(), loop, colocated=False)

    verifier = simulate(made)
    assert type(verifier.engine) is TargetEngine
    assert type(verifier.policy) is Goodput


def test_a_simulated_verifier_tries_drafting_at_once_however_many_sessions_it_has() -> None:
    outcome = closed(profile(sure_guesses(right=True)), TIER, equal(16, 1, 60), streams=16)
    assert outcome.gamma > 1.0


def test_drafters_at_work_lengthen_the_steps_of_their_target() -> None:
    rates = [
        closed(replace(profile(sure_guesses(right=True)), drafting_overhead=share), TIER, equal(2, 1, 100), streams=1)
        for share in (0.0, 1.0)
    ]
    assert rates[0].tokens_per_s > 1.2 * rates[1].tokens_per_s


def test_messages_take_their_time_to_a_drafter_and_back() -> None:
    facts = profile(sure_guesses(right=True), link_s=0.2)
    opened = OpenSession(
        session_id="0",
        epoch=1,
        number=1,
        token_ids=(1, 2, 3),
        prompt_len=3,
        sampling=SamplingParams(max_tokens=50),
        price=0.1,
        # For one guess, so that it is drafted in one step of the model.
        room=1,
    )

    async def first_answer_s(loop: JumpingLoop) -> float:
        answered = loop.create_future()
        drafter = DrafterAtWork(facts, loop, 0)
        running = loop.create_task(drafter.run())
        drafter.connect(answered.set_result).send([opened])
        await answered
        running.cancel()
        return loop.time()

    step_s = facts.drafter.step_s(3, num_sessions=1)
    assert simulate(first_answer_s) == pytest.approx(2 * 0.2 + step_s)


def test_what_is_sent_at_once_arrives_in_its_order() -> None:
    async def received_of(loop: JumpingLoop) -> list[int]:
        arrived = list[int]()
        link = Link(loop, 0.5, arrived.append)
        for number in range(20):
            link.send(number)
        await asyncio.sleep(0.5)
        await asyncio.sleep(0.0)
        return arrived

    assert simulate(received_of) == [*range(20)]


def test_the_clock_jumps_and_what_never_happens_is_not_waited_for() -> None:
    async def waits(loop: JumpingLoop) -> None:
        await asyncio.sleep(1e6)
        assert loop.time() == 1e6
        await loop.create_future()

    with pytest.raises(RuntimeError, match="never happen"):
        simulate(waits)


@WAYS
def test_an_engine_that_raises_ends_the_simulation(cell: PlannedFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetEngine, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_open(profile(), cell, MIXED)


def test_the_policy_decides_what_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_policy, "best_prefix", lambda *_: (0, 1.0))
    outcome = closed(profile(sure_guesses(right=True)), TIER, equal(2, 1, 150), streams=1)
    assert outcome.gamma == 0.0


def test_a_request_longer_than_the_kv_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"request 0 of the load has 1,?0?\d* tokens.*target.kv_tokens"):
        run_open(profile(kv_tokens=512), PLAIN, [Arrival(0.0, 600, 500)])


def test_what_never_keeps_up_is_given_up_and_counted() -> None:
    flood = [Arrival(0.001 * index, 400, 50) for index in range(300)]
    outcome = run_open(profile(), PLAIN, flood, give_up_s=8.0)
    assert 0 < outcome.num_unfinished < 300
    assert math.isfinite(outcome.e2e_s()[0])

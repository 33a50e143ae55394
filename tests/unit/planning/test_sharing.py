"""Verifiers that share a drafter: none takes another's drafts, on simulated devices whose code costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from paceline.core.messages import CloseSession, OpenSession
from paceline.core.params import SamplingParams
from paceline.planning import report
from paceline.planning.engines import DrafterAtWork, JumpingLoop, VerifierAtWork, simulate
from paceline.planning.simulation import Outcome, Request, Way, run_closed
from paceline.simulated.model import find_profile

PROFILE = find_profile("70b+1b@4xh100+h100")
STREAMS, UNTIL_S, WARM_UP_S = 8, 6.4, 0.8
# What others may cost at most.
KEPT = 0.9
# Prompts of a burst, and tokens of each.
BURST, PROMPT_TOKENS, EVERY_S = 64, 1000, 0.5

Disturb = Callable[[JumpingLoop, DrafterAtWork], Awaitable[None]]


def beside(streams: Sequence[int]) -> list[Outcome]:
    """Verifiers with so many streams, all with one drafter."""
    profiles, lengths = [PROFILE] * len(streams), report.lengths(report.MEAN_TOKENS)
    return run_closed(profiles, Way.TIER, lengths, streams=streams, until_s=UNTIL_S, warm_up_s=WARM_UP_S)


@pytest.fixture(scope="module")
def alone() -> Outcome:
    """A verifier with a drafter of its own."""
    return beside([STREAMS])[0]


@pytest.mark.full
def test_a_busy_verifier_leaves_three_others_nine_tenths_of_what_they_have_with_drafters_of_their_own(
    alone: Outcome,
) -> None:
    shared = beside([16 * STREAMS, *[STREAMS] * 3])
    for other in shared[1:]:
        assert other.gamma > KEPT * alone.gamma
        assert other.tokens_per_s > KEPT * alone.tokens_per_s
    busy = beside([16 * STREAMS])[0]
    assert shared[0].tokens_per_s > KEPT * busy.tokens_per_s
    drafting_s = [each.drafting_s for each in shared]
    assert sum(drafting_s) == pytest.approx(UNTIL_S, rel=0.1), "the device is never idle"
    assert min(drafting_s[1:]) > 0.15 * UNTIL_S, "a quarter of the rows is each one's"


async def burst(loop: JumpingLoop, drafter: DrafterAtWork) -> None:
    """Many sessions with long prompts, again and again."""
    link = drafter.connect(lambda messages: None)
    for wave in range(int(UNTIL_S / EVERY_S)):
        numbers = range(1 + BURST * wave, 1 + BURST * (wave + 1))
        link.send([opened(number) for number in numbers])
        await asyncio.sleep(EVERY_S)
        link.send([CloseSession(number=number) for number in numbers])


async def stalled(loop: JumpingLoop, drafter: DrafterAtWork) -> None:
    """Sessions whose verifier never commits anything."""
    drafter.connect(lambda messages: None).send([opened(number) for number in range(1, 1 + BURST)])


async def rehearsal(loop: JumpingLoop, drafter: DrafterAtWork) -> None:
    """A verifier that finds out what drafting is worth."""
    other = VerifierAtWork(PROFILE, loop, colocated=False, drafter=drafter, seed=1)
    running = loop.create_task(other.run())
    await asyncio.wait({running, loop.create_task(other.rehearse())}, timeout=UNTIL_S)


def opened(number: int) -> OpenSession:
    return OpenSession(
        session_id=f"other {number}",
        epoch=1,
        number=number,
        token_ids=(number,) * PROMPT_TOKENS,
        prompt_len=PROMPT_TOKENS,
        sampling=SamplingParams(max_tokens=64, temperature=0.0),
        price=0.0,
        room=12,
        cache_salt=str(number),
    )


@pytest.mark.full
@pytest.mark.parametrize("disturb", [burst, stalled, rehearsal], ids=lambda each: each.__name__)
def test_what_another_verifier_does_costs_one_a_tenth_at_most(disturb: Disturb, alone: Outcome) -> None:
    assert disturbed(disturb).tokens_per_s > KEPT * alone.tokens_per_s


def disturbed(disturb: Disturb) -> Outcome:
    """A verifier whose drafter has something else to do, too."""
    load = list[Request]()

    async def main(loop: JumpingLoop) -> None:
        drafter = DrafterAtWork(PROFILE, loop, 0)
        verifier = VerifierAtWork(PROFILE, loop, colocated=False, drafter=drafter)

        async def stream(first: int) -> None:
            for number in range(first, 10_000, STREAMS):
                length = report.tokens_of(number, report.MEAN_TOKENS)
                load.append(Request(number, loop.time(), report.PROMPT_TOKENS, length))
                await verifier.serve(load[-1])

        others = [drafter.run(), verifier.run(), disturb(loop, drafter), *map(stream, range(STREAMS))]
        tasks = [loop.create_task(each) for each in others]
        await asyncio.wait(tasks, timeout=UNTIL_S, return_when=asyncio.FIRST_EXCEPTION)

    simulate(main)
    return Outcome(requests=load, door_s=0.0, since_s=WARM_UP_S, until_s=UNTIL_S)

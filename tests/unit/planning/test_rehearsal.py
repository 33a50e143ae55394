"""A rehearsal on simulated devices: it finds what drafting is worth, stops at any step, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from paceline.core.drafting_mode import Mode
from paceline.core.rehearsal import LEAST_STEPS, MOST_STEPS, Rehearsal
from paceline.core.target_events import Cancel, Rehearse, StepReport, Submit, TargetEvent, TargetOutput
from paceline.planning.engines import DrafterAtWork, JumpingLoop, VerifierAtWork, simulate
from paceline.simulated.profile import Profile
from tests.unit.planning.facts import profile, sure_guesses

NOISE = 0.02


def rehearsed(facts: Profile, max_sessions: int) -> VerifierAtWork:
    async def rehearse(loop: JumpingLoop) -> VerifierAtWork:
        drafter = DrafterAtWork("drafter", facts, loop, 1)
        verifier = VerifierAtWork(facts, loop, colocated=False, drafters=[drafter])
        tasks = [loop.create_task(each.run()) for each in (drafter, verifier)]
        verifier.rehearse(max_sessions)
        while verifier.rehearses and not any(map(asyncio.Task.done, tasks)):  # noqa: ASYNC110 - a clock that jumps
            await asyncio.sleep(1.0)
        await asyncio.sleep(1.0)
        return verifier

    return simulate(rehearse)


def test_what_was_rehearsed_is_decided_by_at_every_load() -> None:
    for right in (True, False):
        mode = rehearsed(profile(sure_guesses(right=right), noise=NOISE), 4).policy.mode
        assert sorted(mode.loads) == [0, 1, 2]
        assert all(load.tried(each) for load in mode.loads.values() for each in Mode)
        wanted = Mode.DRAFTING if right else Mode.PLAIN
        assert [mode.enter(load) for load in (1, 2, 4)] == [wanted] * 3


def test_plain_steps_of_a_rehearsal_are_those_of_the_device_within_its_noise() -> None:
    verifier = rehearsed(profile(noise=NOISE), 4)
    for load in verifier.policy.mode.loads.values():
        assert load.rates[Mode.PLAIN].value == pytest.approx(1.0, rel=NOISE)


def test_a_rehearsal_leaves_no_session_page_or_calibration_behind() -> None:
    verifier = rehearsed(profile(), 1)
    engine = verifier.engine
    assert engine.num_sessions == engine.pool.num_used == 0
    assert engine.learned()["calibrations"] == {}
    assert not engine.pool._hash_of, "no page is found by the prompts of others"
    assert verifier.policy.mode.rehearsing is None
    assert verifier.policy.rehearsed


class Engine:
    """Takes events as an engine does, and answers with steps."""

    def __init__(self) -> None:
        self.sessions: set[int] = set()
        self.drafts: bool | None = None
        self.over = False

    def handle(self, events: Sequence[TargetEvent]) -> None:
        for event in events:
            match event:
                case Submit():
                    self.sessions.add(event.serial)
                case Cancel():
                    self.sessions.remove(event.serial)
                case Rehearse():
                    self.drafts, self.over = event.drafts, event.over

    def step(self, seconds: float = 0.01) -> TargetOutput:
        assert self.drafts is not None
        report = StepReport(rehearsed=True, gammas=[0] * len(self.sessions), seconds=seconds)
        return TargetOutput(committed=[], to_drafters={}, broken_links={}, report=report)


@pytest.fixture
def play() -> Rehearsal:
    return Rehearsal(drafter="drafter", max_sessions=4, vocab_size=100, context_len=512)


def test_it_stops_at_any_step_and_goes_on_with_what_is_left(play: Rehearsal) -> None:
    engine = Engine()
    engine.handle(play.go_on())
    for _ in range(3 * MOST_STEPS - 1):
        engine.handle(play.saw(engine.step()))
    assert (len(engine.sessions), engine.drafts) == (2, False)
    engine.handle(play.stop())
    assert not engine.sessions
    assert (engine.drafts, engine.over) == (None, False)
    engine.handle(play.go_on())
    steps = 0
    while not play.is_over:
        assert len(engine.sessions) == (2 if steps < 2 * MOST_STEPS else 4)
        engine.handle(play.saw(engine.step()))
        steps += 1
    assert steps == 4 * MOST_STEPS, "steps of the one that was cut off do not count"
    assert not engine.sessions
    assert (engine.drafts, engine.over) == (None, True)


def test_slow_steps_are_fewer_and_those_that_read_prompts_do_not_count(play: Rehearsal) -> None:
    engine = Engine()
    engine.handle(play.go_on())
    reading = engine.step()
    reading.report.num_prefill_rows = 8
    for _ in range(MOST_STEPS):
        engine.handle(play.saw(reading))
    for _ in range(LEAST_STEPS):
        assert engine.drafts is False
        engine.handle(play.saw(engine.step(seconds=0.1)))
    assert engine.drafts is True

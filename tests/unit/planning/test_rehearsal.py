"""A rehearsal on simulated devices: it finds what they take, stops at any step, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.drafting_mode import Mode
from paceline.core.errors import ConfigError
from paceline.core.rehearsal import Rehearsal
from paceline.core.step_profile import StepProfile, Take, step_profile_from
from paceline.core.target_events import Cancel, Rehearse, StepReport, Submit, TargetEvent, TargetOutput
from paceline.planning.engines import DrafterAtWork, Events, VerifierAtWork
from paceline.simulated.profile import Profile
from tests.unit.planning.facts import STEP_S, TARGET_COST, profile, sure_guesses

NOISE = 0.02


def rehearsed(facts: Profile, max_sessions: int) -> VerifierAtWork:
    events = Events()
    drafter = DrafterAtWork("drafter", facts, events, 1)
    verifier = VerifierAtWork(facts, events, colocated=False, drafters=[drafter], on_end=lambda _: None)
    verifier.rehearse(max_sessions)
    while verifier.rehearses:
        events.run(events.now_s + 1.0)
    events.run()
    return verifier


def test_a_rehearsed_profile_is_that_of_the_device_within_its_noise() -> None:
    facts = profile(sure_guesses(right=True), noise=NOISE)
    verifier = rehearsed(facts, 4)
    found = verifier.policy.mode.profile
    assert found.loads == (1.0, 4.0)
    for load in (1, 4):
        assert found.at(load).plain_s == pytest.approx(facts.target.step_s(load, num_sessions=load), rel=NOISE)
    for sessions, guesses, seconds, tokens in zip(
        found.loads, found.guesses, found.drafting, found.tokens, strict=True
    ):
        assert guesses[:2] == pytest.approx((0.0, 1.0), abs=0.2)
        assert tokens == pytest.approx([1.0 + each for each in guesses], rel=0.1), "the drafter is always right"
        bare = [TARGET_COST.at(round(sessions * (1.0 + each))) for each in guesses]
        assert all(0.97 * least < each < 2.0 * least for each, least in zip(seconds, bare, strict=True)), "with waits"
    assert all(0.0 < each < STEP_S for each in found.delay)


def test_what_was_rehearsed_is_decided_by_and_a_drafter_that_is_always_wrong_is_not_asked() -> None:
    for right in (True, False):
        verifier = rehearsed(profile(sure_guesses(right=right)), 1)
        assert verifier.policy.mode.enter(1) is (Mode.DRAFTING if right else Mode.PLAIN)


def test_a_rehearsal_leaves_no_session_page_or_calibration_behind() -> None:
    verifier = rehearsed(profile(), 1)
    engine = verifier.engine
    assert engine.num_sessions == engine.pool.num_used == 0
    assert engine.learned()["calibrations"] == {}
    assert not engine.pool._hash_of, "no page is found by the prompts of others"
    assert engine.learned()["policy"]["loads"] == []
    assert verifier.policy.take is None


class Engine:
    """Takes events as an engine does, and answers takes with steps."""

    def __init__(self) -> None:
        self.sessions: set[int] = set()
        self.take: Take | None = None

    def handle(self, events: Sequence[TargetEvent]) -> None:
        for event in events:
            match event:
                case Submit():
                    self.sessions.add(event.serial)
                case Cancel():
                    self.sessions.remove(event.serial)
                case Rehearse():
                    self.take = event.take

    def step(self) -> TargetOutput:
        assert self.take is not None
        assert len(self.sessions) == self.take.num_sessions
        count = self.take.num_sessions
        guesses = (self.take.gamma or 0) * count
        self.take.add(guesses=guesses, tokens=count + guesses // 2, seconds=0.01)
        return TargetOutput(committed=[], to_drafters={}, broken_links={}, report=StepReport(rehearsed=True))


def rehearsal(max_sessions: int = 4) -> Rehearsal:
    return Rehearsal(drafter="drafter", max_sessions=max_sessions, vocab_size=100, context_len=512)


def test_it_stops_at_any_step_and_goes_on_with_what_it_has_not_seen() -> None:
    play, engine = rehearsal(), Engine()
    engine.handle(play.go_on())
    for _ in range(130):
        engine.handle(play.saw(engine.step()))
    done = sum(take.is_done for take in play.takes)
    engine.handle(play.stop())
    assert not engine.sessions
    assert engine.take is None
    engine.handle(play.go_on())
    take = engine.take
    assert take is play.takes[done]
    assert not take.steps, "a take that was cut off begins anew"
    steps = 0
    while not play.is_done:
        engine.handle(play.saw(engine.step()))
        steps += 1
    assert not engine.sessions
    assert play.profile().tokens[0] == pytest.approx((1.0, 1.0, 2.0, 5.0))


def test_one_accident_in_a_take_counts_as_a_slow_step() -> None:
    take = Take(num_sessions=1, gamma=2)
    for number in range(40):
        take.add(guesses=2, tokens=2, seconds=5.0 if number == 20 else 0.01)
    assert take.means()[2] < 0.011


def test_a_profile_comes_back_from_what_is_kept_of_it_and_nothing_else_is_taken_for_one() -> None:
    found = rehearsed(profile(), 2).policy.mode.profile
    assert step_profile_from(found.learned()) == found
    columns = found.learned()
    broken = [{}, {**columns, "plain": []}, {**columns, "plain": ["x", 1]}, {**columns, "loads": [4.0, 1.0]}]
    broken += [{**columns, "drafting": [[0.0] * 3] * 2}, {**columns, "tokens": [[1.0]] * 2}]
    for each in broken:
        with pytest.raises(ConfigError, match="step profile"):
            step_profile_from(each)


def test_loads_between_those_of_a_profile_lie_between_them() -> None:
    found = StepProfile(
        loads=(1.0, 4.0), plain=(0.01, 0.03), guesses=((0.0,), (0.0,)), drafting=((0.01,), (0.03,)),
        tokens=((1.0,), (1.0,)), delay=(0.001, 0.001),
    )  # fmt: skip
    assert [found.at(load).plain_s for load in (1, 2, 4, 9)] == pytest.approx([0.01, 0.02, 0.03, 0.03])

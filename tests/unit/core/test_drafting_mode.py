"""A profile's promise decides, traffic corrects it, and mistakes cost no more than the account holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.core.drafting_mode import (
    BEGIN_DRAFTING,
    BETTER_STEPS,
    EXPECTED_STEPS,
    LOOK_AGAIN,
    MOST_SAVED,
    PAID_IN,
    DraftingMode,
    Mode,
)
from paceline.core.step_profile import StepProfile
from paceline.core.step_time import StepCost

PLAIN, DRAFTING = Mode.PLAIN, Mode.DRAFTING
PLAIN_S = 0.020
FLAT = StepCost(rows=(1, 512), seconds=(PLAIN_S, PLAIN_S))
LOADS = (1, 4, 16, 64)


def promising(*ratios: float) -> StepProfile:
    """A rehearsed profile in which drafting is so many times as fast as plain decoding at each of the loads."""
    return StepProfile(
        loads=LOADS,
        plain=(PLAIN_S,) * 4,
        guesses=((0.0, 2.0),) * 4,
        drafting=((PLAIN_S, PLAIN_S),) * 4,
        tokens=tuple((0.5, ratio) for ratio in ratios),
        delay=(0.005,) * 4,
    )


@dataclass
class Verifier:
    """A verifier whose drafting is `speed_up(sessions)` times as fast as plain decoding.

    Attributes:
        profile: What is known of it; the default: nothing, so that drafting is taken to win at any load.
        spread: Of the tokens of a session and step, as a share.
        lag: Steps until drafters answer.
        modes: Of all steps.
        lost: Seconds lost to plain decoding up to each step.
    """

    speed_up: Callable[[int], float]
    profile: StepProfile = field(default_factory=lambda: StepProfile.assumed(FLAT, FLAT))
    spread: float = 0.3
    lag: int = 0
    slowness: float = 1.0
    modes: list[Mode] = field(default_factory=list)
    lost: list[float] = field(default_factory=lambda: [0.0])

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.switch = DraftingMode(self.profile, rehearsed=self.profile.delay[0] > 0.0)
        self._unanswered = 0

    def steps(self, count: int, num_sessions: int = 8, *, reads: bool = False) -> list[Mode]:
        """Runs steps; returns their modes."""
        modes = [self._step(num_sessions, reads) for _ in range(count)]
        self.modes += modes
        return modes

    def _step(self, num_sessions: int, reads: bool) -> Mode:
        mode = self.switch.enter(num_sessions)
        self._unanswered = self._unanswered + 1 if mode is DRAFTING else 0
        answered = mode is PLAIN or self._unanswered > self.lag
        seconds, tokens = self.slowness * PLAIN_S * float(self.rng.uniform(0.9, 1.1)), float(num_sessions)
        if mode is DRAFTING:
            # Half as many tokens again as plain decoding, in whatever time makes the ratio right.
            noise = self.spread * float(self.rng.standard_normal()) / num_sessions**0.5
            tokens *= (1.5 if answered else 1.0) * max(0.5, 1.0 + noise)
            seconds *= 1.5 / self.speed_up(num_sessions)
        self.lost.append(self.lost[-1] + seconds - tokens / num_sessions * self.slowness * PLAIN_S)
        self.switch.observe(
            num_sessions=num_sessions, tokens=round(tokens), seconds=seconds, reads=reads, answered=answered
        )
        return mode

    def worst(self, window: int) -> float:
        """The most that as many steps have lost to plain ones, as a share of their time."""
        window = min(window, len(self.lost) - 1)
        lost = max(after - before for before, after in zip(self.lost, self.lost[window:], strict=False))
        return lost / (window * PLAIN_S)


def always(ratio: float, **options) -> Verifier:
    return Verifier(lambda _: ratio, **options)


@pytest.mark.parametrize("num_sessions", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.2, 2.0])
@pytest.mark.parametrize("promised", [0.7, 1.5])
def test_the_faster_mode_wins_at_every_load_whatever_was_promised(
    num_sessions: int, ratio: float, promised: float
) -> None:
    verifier = always(ratio, profile=promising(*[promised] * 4))
    verifier.steps(1_300, num_sessions)
    wanted = DRAFTING if ratio > 1.0 else PLAIN
    assert verifier.steps(400, num_sessions).count(wanted) > 380


def test_what_a_rehearsal_has_found_is_done_from_the_first_step_on() -> None:
    verifier = always(1.5, profile=promising(2.0, 1.5, 1.2, 0.6))
    assert [verifier.steps(1, load)[0] for load in (64, 16, 1, 64)] == [PLAIN, DRAFTING, DRAFTING, PLAIN]


def test_before_a_rehearsal_drafting_is_tried_up_to_the_load_from_which_it_may_be_dear() -> None:
    verifier = always(1.5, profile=StepProfile.assumed(FLAT, FLAT, tried_up_to=4))
    assert verifier.steps(EXPECTED_STEPS + 1, 4) == [PLAIN] * EXPECTED_STEPS + [DRAFTING]
    assert verifier.steps(BETTER_STEPS + 1, 16)[-1] is PLAIN


def test_a_session_or_two_draft_at_once_and_more_begin_plainly() -> None:
    assert always(1.5).steps(1, BEGIN_DRAFTING) == [DRAFTING]
    assert always(1.5).steps(1, BEGIN_DRAFTING + 1) == [PLAIN]


def test_a_machine_whose_plain_steps_get_faster_is_found_out() -> None:
    verifier = always(1.5)
    verifier.slowness = 2.0
    verifier.steps(500)
    verifier.slowness, verifier.speed_up = 1.0, lambda _: 0.75
    verifier.steps(LOOK_AGAIN)
    assert verifier.steps(100).count(PLAIN) > 90


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("lag", [0, 5, 10**9])
@pytest.mark.parametrize("num_sessions", [1, 16])
def test_no_200_steps_lose_more_than_3_percent(ratio: float, lag: int, num_sessions: int) -> None:
    verifier = always(ratio, lag=lag)
    verifier.steps(5_000, num_sessions)
    dearest = 1.5 / ratio
    assert verifier.worst(200) < 0.03 + dearest / 200
    assert verifier.lost[-1] / (5_000 * PLAIN_S) < 2 * PAID_IN + 0.01 * 0.03 + dearest / 5_000


def test_texts_change_so_drafting_is_tried_again_and_again_and_a_better_drafter_is_found() -> None:
    verifier = always(0.7, profile=promising(0.7, 0.7, 0.7, 0.7))
    assert DRAFTING in verifier.steps(round(2 * MOST_SAVED / PAID_IN))
    verifier.speed_up = lambda _: 1.5
    verifier.steps(2_500)
    assert verifier.steps(100).count(DRAFTING) > 90


def test_a_drafter_that_gets_worse_is_dropped() -> None:
    verifier = always(1.5)
    verifier.steps(500)
    verifier.speed_up = lambda _: 0.6
    verifier.steps(3 * BETTER_STEPS)
    assert verifier.steps(100).count(PLAIN) > 90


def test_a_machine_that_gets_slow_does_not_change_the_mode_for_long() -> None:
    verifier = always(1.5)
    verifier.steps(500)
    verifier.slowness = 2.0
    verifier.steps(400)
    assert verifier.steps(100).count(DRAFTING) > 90


def test_a_pause_of_the_machine_is_an_accident() -> None:
    verifier = always(1.3)
    verifier.steps(300)
    verifier.slowness = 200.0
    verifier.steps(1)
    verifier.slowness = 1.0
    assert verifier.steps(50).count(DRAFTING) > 45


def test_a_new_load_begins_with_what_the_nearest_one_has_shown() -> None:
    verifier = always(0.5, profile=promising(1.5, 1.5, 1.5, 1.5))
    verifier.steps(500, 8)
    assert verifier.steps(1, 16) == [PLAIN]


def test_steps_that_read_prompts_say_nothing_of_either_mode() -> None:
    verifier = always(2.0)
    verifier.steps(50)
    known = verifier.switch.learned()
    verifier.slowness = 5.0
    assert set(verifier.steps(50, reads=True)) == {DRAFTING}
    assert verifier.switch.learned() == known


def test_without_a_session_that_may_speculate_steps_are_plain_and_teach_nothing() -> None:
    switch = DraftingMode(promising(2.0, 2.0, 2.0, 2.0), rehearsed=True)
    assert switch.enter(0) is PLAIN
    switch.observe(num_sessions=3, tokens=3, seconds=1.0, reads=False, answered=True)
    assert switch.learned() == []
    assert switch.enter(1) is DRAFTING
    assert switch.enter(0) is PLAIN


def test_a_load_is_the_same_within_a_factor_so_that_one_session_more_changes_no_mode() -> None:
    verifier = always(2.0, profile=promising(2.0, 2.0, 0.5, 0.5))
    verifier.steps(1, 4)
    assert set(verifier.steps(10, 3) + verifier.steps(10, 6)) == {DRAFTING}
    assert verifier.steps(1, 16) == [PLAIN]


def test_a_successor_begins_in_the_mode_that_was_better() -> None:
    verifier = Verifier(lambda sessions: 2.0 if sessions <= 8 else 0.5)
    for num_sessions in (8, 32):
        verifier.steps(1_000, num_sessions)
    switch = DraftingMode(verifier.profile)
    switch.resume(verifier.switch.learned())
    assert [switch.enter(8), switch.enter(32)] == [DRAFTING, PLAIN]
    assert switch.learned() == pytest.approx(verifier.switch.learned())


@pytest.mark.parametrize("learned", [[3.0, 1.0], [3.0, 1.0, 0.0], [3.0, float("nan"), 1.0], [-1.0, 1.0, 1.0]])
def test_what_was_not_learned_by_such_a_switch_is_refused(learned: list[float]) -> None:
    with pytest.raises(ValueError, match=r"needs loads of at least 0|shorter"):
        DraftingMode(promising(1.0, 1.0, 1.0, 1.0)).resume(learned)

"""Who drafts, as stories: a fleet that knows nothing, trials, drafters called in vain, and loads that change."""

from __future__ import annotations

import pytest

from paceline.core.drafting_switch import (
    CLEAR_GAIN,
    FIRST_REST,
    JUDGE_EVERY,
    LEAST_STEPS,
    MOST_UNANSWERED,
    OTHER_LOAD,
    REST_STEPS,
    WORTH_A_CALL,
    Drafting,
    DraftingSwitch,
)
from paceline.core.goodput import EXPLORATION

STEP_S = 0.02
# A trial is half as fast as plain decoding.
SLOWDOWN = 2.0
TRIAL_S = LEAST_STEPS * STEP_S * (1.0 - 1.0 / SLOWDOWN)


class Play:
    """Steps of a verifier whose drafters answer at once; remembers who drafted in each."""

    def __init__(
        self, gain: float, *, most_gain: float = 9.0, slowdown: float = SLOWDOWN, compared: bool = True
    ) -> None:
        self.switch = DraftingSwitch()
        self.switch.compared = set(range(8)) if compared else set()
        self.gain, self.most_gain, self.slowdown = gain, most_gain, slowdown
        self.drafting: list[Drafting] = []

    def steps(
        self, count: int, *, num_sessions: int = 8, gain: float | None = None, answers: bool = True
    ) -> list[Drafting]:
        self.gain = self.gain if gain is None else gain
        for _ in range(count):
            self.drafting.append(self.switch.drafting)
            self.switch.observe(STEP_S)
            if self.switch.is_due(num_sessions, answered=answers and self.switch.drafting is not Drafting.NOBODY):
                self.switch.judge(
                    self.gain,
                    most_gain=self.most_gain,
                    plain_s=STEP_S / self.slowdown,
                    drafting_s=STEP_S,
                    num_sessions=num_sessions,
                )
        return self.drafting[-count:]


def test_a_fleet_that_knows_nothing_goes_to_work_at_once_where_modest_guesses_are_worth_it():
    assert Play(1.5, compared=False).steps(3) == [Drafting.NOBODY, Drafting.ALL, Drafting.ALL]


def test_before_both_kinds_of_steps_were_seen_a_call_needs_a_clear_gain():
    gain = (WORTH_A_CALL + CLEAR_GAIN) / 2
    blind, knowing = Play(gain, compared=False), Play(gain)
    assert Drafting.ALL not in blind.steps(3)
    assert knowing.steps(3)[-1] is Drafting.ALL
    for play, drafting in ((blind, Drafting.NOBODY), (knowing, Drafting.ALL)):
        play.steps(3, num_sessions=1, gain=2.0)
        assert play.steps(3, num_sessions=8, gain=gain)[-1] is drafting, "a call for one stream was none for eight"


def test_under_load_a_new_fleet_decodes_plainly_until_a_trial_costs_a_small_share_of_its_time():
    play = Play(0.9, compared=False)
    steps = play.steps(int(TRIAL_S / EXPLORATION / STEP_S) - JUDGE_EVERY)
    assert set(steps) == {Drafting.NOBODY}
    after = play.steps(3 * JUDGE_EVERY)
    assert set(after) == {Drafting.NOBODY, Drafting.SOME}


def test_where_drafters_slow_nobody_down_a_trial_comes_at_once():
    assert Drafting.SOME in Play(0.9, slowdown=1.0).steps(3)


def test_a_trial_that_shows_a_gain_sends_all_to_work():
    play = Play(0.9, slowdown=1.0)
    play.steps(3)
    assert play.steps(LEAST_STEPS + 1, gain=1.2)[-1] is Drafting.ALL


def test_trials_that_show_none_take_no_more_than_their_share():
    play = Play(0.9)
    steps = play.steps(40_000)
    lost = steps.count(Drafting.SOME) * (1.0 - 1.0 / SLOWDOWN)
    assert Drafting.ALL not in steps
    assert 0.5 * EXPLORATION < lost / len(steps) < 1.2 * EXPLORATION


def test_what_could_not_pay_even_with_sure_guesses_is_not_tried():
    assert set(Play(0.5, most_gain=WORTH_A_CALL, slowdown=1.0).steps(5_000)) == {Drafting.NOBODY}


def test_work_that_gains_nothing_ends_and_is_called_again_at_once_for_a_clear_gain_only():
    def called_in_vain() -> Play:
        play = Play(1.1)
        play.steps(2)
        assert play.steps(2 * LEAST_STEPS, gain=0.8)[-1] is Drafting.NOBODY
        return play

    lost_s = LEAST_STEPS * STEP_S * 0.2
    blocked = int(lost_s / EXPLORATION / STEP_S) - 4 * LEAST_STEPS
    play = called_in_vain()
    assert Drafting.ALL not in play.steps(blocked, gain=1.1)
    assert Drafting.ALL in play.steps(6 * LEAST_STEPS)
    assert called_in_vain().steps(2 * JUDGE_EVERY, gain=1.01 * CLEAR_GAIN)[-1] is Drafting.ALL


def test_each_load_is_compared_for_itself():
    play = Play(2.0, compared=False)
    play.steps(FIRST_REST + 3 * JUDGE_EVERY, num_sessions=1)
    gain = (WORTH_A_CALL + CLEAR_GAIN) / 2
    assert play.steps(3, num_sessions=8, gain=gain)[-1] is Drafting.NOBODY
    assert play.steps(3, num_sessions=1, gain=gain)[-1] is Drafting.ALL


def test_what_was_in_vain_at_one_load_is_not_held_against_another():
    play = Play(1.1)
    play.steps(2)
    play.steps(2 * LEAST_STEPS, gain=0.8)
    assert play.switch.drafting is Drafting.NOBODY
    assert play.steps(2, num_sessions=1, gain=2.0)[-1] is Drafting.ALL


@pytest.mark.parametrize("gain", [1.05, 2.0])
def test_drafters_at_work_rest_for_a_comparison_now_and_then(gain):
    play = Play(gain)
    steps = play.steps(20_000)
    rests = [index for index in range(10, len(steps)) if steps[index] is Drafting.NOBODY]
    assert rests
    assert steps[rests[0] : rests[0] + REST_STEPS] == [Drafting.NOBODY] * REST_STEPS
    assert steps[rests[0] + REST_STEPS] is Drafting.ALL
    assert len(rests) / len(steps) * (1.0 - 1.0 / gain) < EXPLORATION


def test_the_first_comparison_comes_soon():
    play = Play(2.0, compared=False)
    steps = play.steps(FIRST_REST + 3 * JUDGE_EVERY)
    assert steps[3:].count(Drafting.NOBODY) == REST_STEPS
    assert play.switch.compared == {(8).bit_length()}
    assert Drafting.NOBODY not in play.steps(FIRST_REST + 3 * JUDGE_EVERY), "the next one follows the rule"


def test_drafters_that_work_for_few_are_judged_at_once_when_many_come():
    play = Play(1.5)
    play.steps(3, num_sessions=1)
    assert play.steps(2, num_sessions=OTHER_LOAD, gain=0.9)[-1] is Drafting.NOBODY
    assert play.steps(2, num_sessions=1, gain=1.5)[-1] is Drafting.ALL, "they were not called for the other load"


def test_a_load_is_another_one_from_twice_or_half_the_sessions_on():
    play = Play(2.0)
    play.steps(2)
    assert play.switch.drafting is Drafting.ALL
    due = [play.switch.is_due(count, answered=False) for count in (8, 5, 15, 4, 16)]
    assert due == [False, False, False, True, True]


@pytest.mark.parametrize("slowdown", [1.0, SLOWDOWN])
def test_drafters_that_never_answer_rest_and_cost_no_more_than_trials_may(slowdown):
    play = Play(2.0, slowdown=slowdown)
    steps = play.steps(3 * MOST_UNANSWERED, answers=False)
    assert steps[-1] is Drafting.NOBODY or slowdown == 1.0
    steps = play.steps(40_000, answers=False)
    lost = (len(steps) - steps.count(Drafting.NOBODY)) * (1.0 - 1.0 / slowdown)
    assert lost / len(steps) < 1.2 * EXPLORATION


def test_a_drafter_that_reads_a_long_prompt_is_waited_for():
    play = Play(2.0)
    play.steps(3)
    assert Drafting.NOBODY not in play.steps(MOST_UNANSWERED - 4, answers=False)
    assert Drafting.NOBODY not in play.steps(MOST_UNANSWERED - 4)
    assert Drafting.NOBODY not in play.steps(MOST_UNANSWERED - 4, answers=False)

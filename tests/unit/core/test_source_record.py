"""Sources that take time are asked where that pays, and next to never where it does not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.draft_policy import Goodput
from paceline.core.goodput import EXPLORATION, num_tried
from paceline.core.source_record import (
    FIRST_GAIN,
    LEFT_ALONE,
    UNCOUNTED_CALLS,
    CallCost,
    SourceRecord,
)


def learned(calls) -> CallCost:
    cost = CallCost()
    for _ in range(UNCOUNTED_CALLS):
        cost.observe(1, 1e6)
    for count, seconds in calls:
        cost.observe(count, seconds)
    return cost


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-5, 1.0)), max_size=30), st.integers(1, 63))
def test_more_sessions_never_cost_less_and_nothing_costs_less_than_nothing(calls, count):
    cost = learned(calls)
    assert 0.0 <= cost(count) <= cost(count + 1)


def test_the_line_of_a_call_is_found():
    rng = random.Random(4)
    counts = [rng.randrange(1, 17) for _ in range(400)]
    cost = learned([(count, 0.004 + 0.0005 * count) for count in counts])
    for count in (1, 4, 16):
        assert cost(count) == pytest.approx(0.004 + 0.0005 * count, rel=0.05)


def test_the_first_calls_and_one_that_was_held_up_are_not_taken_for_the_rule():
    cost = learned([(2, 0.01)] * 30)
    assert cost(2) == pytest.approx(0.01)
    cost.observe(2, 5.0)
    assert cost(2) < 0.02


class Play:
    """Steps of 20 ms over a few sessions that expect one token each, and a source that is asked as the engine does."""

    def __init__(self, gains, *, base_s=0.004, each_s=0.001) -> None:
        self.true_gains = gains
        self.call = lambda count: base_s + each_s * count
        self.record = SourceRecord()
        self.sessions = [self.record.new_session() for _ in gains]
        self.now_s = self.spent_s = 0.0
        self.asked = [0] * len(gains)
        self.num_weighed = 0

    def steps(self, count) -> None:
        for _ in range(count):
            self.now_s += 0.02
            if not self.record.begin_step():
                continue
            self.num_weighed += 1
            order = sorted(range(len(self.sessions)), key=lambda index: -self.sessions[index].of(0.0))
            gains = [self.sessions[index].of(0.0) for index in order]
            number = Goodput().num_asked(gains, expected=len(gains), step_s=0.02, call_s=self.record.call_s)
            if not number and self.record.is_due(num_tried(len(gains)), self.now_s):
                number = num_tried(len(gains))
            if number:
                self.now_s += self.call(number)
                self.spent_s += self.call(number)
                self.record.called(number, seconds=self.call(number), now_s=self.now_s)
            else:
                self.record.was_worth_none()
            for index in order[:number]:
                self.asked[index] += 1
                self.record.gained(self.sessions[index], 0.0, self.true_gains[index])
            for index in order[number:]:
                self.record.left_out(self.sessions[index], 0.0)

    def share(self, steps) -> float:
        """Share of the time of so many more steps that goes to the source."""
        before = self.now_s, self.spent_s
        self.steps(steps)
        return (self.spent_s - before[1]) / (self.now_s - before[0])


@pytest.mark.parametrize("num_sessions", [1, 4, 16])
@pytest.mark.parametrize("base_s", [0.001, 0.01, 0.1])
def test_a_useless_source_ends_up_with_less_than_a_hundredth_of_the_time(num_sessions, base_s):
    play = Play([0.0] * num_sessions, base_s=base_s)
    play.steps(100)
    share = play.share(20_000)
    assert 0.0 < share < 2 * EXPLORATION <= 0.01


@pytest.mark.parametrize("num_sessions", [1, 4, 16])
def test_a_good_source_is_always_asked(num_sessions):
    play = Play([1.5] * num_sessions)
    play.steps(500)
    assert play.asked == [500] * num_sessions


def test_where_sessions_cost_time_each_only_those_it_helps_are_asked_for():
    play = Play([2.0, 2.0, 0.0, 0.0], base_s=0.0005, each_s=0.004)
    play.steps(2000)
    assert min(play.asked[:2]) > 1900
    assert max(play.asked[2:]) < 200


def test_a_source_that_is_worth_none_is_left_alone_for_most_steps_and_a_good_one_for_none():
    useless, good = Play([0.0] * 4), Play([1.5] * 4)
    useless.steps(2000)
    good.steps(2000)
    assert useless.num_weighed < 2000 / LEFT_ALONE
    assert good.num_weighed == 2000


def test_a_source_that_gets_better_is_found_out():
    play = Play([0.0] * 4)
    play.steps(2000)
    play.true_gains = [2.0] * 4
    play.steps(3000)
    before = play.asked[0]
    play.steps(100)
    assert play.asked[0] == before + 100


def test_new_sessions_are_taken_to_be_like_the_others_and_sources_are_ranked_by_tokens_a_second():
    assert SourceRecord().new_session().of(0.0) == FIRST_GAIN
    dear, cheap, unknown = Play([1.0], base_s=0.02), Play([1.0], base_s=0.001), SourceRecord()
    for play in (dear, cheap):
        play.steps(300)
    assert dear.record.new_session().of(0.0) == pytest.approx(1.0, abs=0.05)
    assert unknown.merit > cheap.record.merit > dear.record.merit > 0

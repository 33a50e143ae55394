"""How long a session waits for drafts: by the delays that were seen, less those that are over by now."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.pace import FIRST_RESPONSES_S, LEAST_WAIT_S, MOST_DELAYS, OVERDUE, Delays, DraftClock, LinkPace

DELAYS = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=2 * MOST_DELAYS)


LONGEST_FIRST_S = FIRST_RESPONSES_S[-1]


def delays_of(*seconds: float) -> Delays:
    """Delays that were all seen, and nothing else."""
    delays = Delays(seconds[:1])
    for each in seconds[1:]:
        delays.observe(each)
    return delays


def cost_s(seconds: list[float], given_up_s: float) -> float:
    """Mean seconds waited for one arrival, by the definition."""
    arrived = sum(each <= given_up_s for each in seconds)
    return sum(min(each, given_up_s) for each in seconds) / arrived


@given(DELAYS, st.floats(0.0, 1.0))
def test_no_other_time_to_give_up_costs_less_for_an_arrival(seconds, elapsed_s):
    wait = delays_of(*seconds).wait(elapsed_s)
    left = [each - elapsed_s for each in seconds[-MOST_DELAYS:] if each > elapsed_s + LEAST_WAIT_S]
    if not left:
        assert wait is None
        return
    assert wait.expected_s == pytest.approx(min(cost_s(left, each) for each in left))
    assert wait.expected_s == pytest.approx(cost_s(left, max(each for each in left if each <= wait.longest_s + 1e-12)))


def test_drafts_on_their_way_are_waited_for_and_a_miss_is_recognised_by_the_time():
    # Half of the sessions left without drafts get them within 3 ms, the others when their drafter has heard of it.
    delays = delays_of(*[0.001, 0.002, 0.003, 0.025] * 6, *[0.026] * 6)
    at_once = delays.wait(0.0)
    assert at_once.longest_s == pytest.approx(0.003)
    assert at_once.expected_s < 0.007
    later = delays.wait(0.004)
    assert later.longest_s == pytest.approx(0.022)
    assert later.expected_s == pytest.approx(0.022, rel=0.1)
    assert delays.wait(0.030) is None


def test_a_response_counts_from_the_first_commit_without_drafts_not_from_the_last():
    clock, pace = DraftClock(), LinkPace()
    clock.told(10.0, has_drafts=False)
    # A plain step meanwhile: its commit asks for nothing that was not asked for before.
    clock.told(10.018, has_drafts=False)
    assert not clock.heard(10.020, pace, has_drafts=False)
    assert clock.heard(10.025, pace, has_drafts=True)
    assert pace.responses.longest_s == pytest.approx(0.025)
    clock.told(11.0, has_drafts=False)
    assert clock.wait(11.018, pace).longest_s == pytest.approx(0.007)


def test_a_session_whose_drafts_always_come_too_late_waits_on_for_the_answer_to_its_last_commit():
    clock, pace = DraftClock(), LinkPace(responses=delays_of(*[0.004] * MOST_DELAYS))
    for step in range(100):
        clock.told(10.0 + 0.001 * step, has_drafts=False)
        pace.heard(10.0 + 0.001 * step)
    assert clock.wait(10.0992, pace).longest_s == pytest.approx(0.0038)
    assert not clock.silences(10.0992, pace), "it is heard all the time"


def test_what_came_during_the_step_is_no_response():
    clock, pace = DraftClock(), LinkPace()
    clock.told(10.0, has_drafts=False)
    assert clock.heard(9.995, pace, has_drafts=True)
    assert pace.responses.longest_s == LONGEST_FIRST_S
    assert clock.wait(10.0, pace) is not None


def test_sessions_with_drafts_wait_by_the_pace_of_further_ones():
    clock, pace = DraftClock(), LinkPace(intervals=delays_of(*[0.001] * MOST_DELAYS))
    clock.told(10.0, has_drafts=True)
    assert clock.wait(10.0, pace).longest_s == pytest.approx(0.001)
    assert not clock.heard(10.002, pace, has_drafts=True)
    assert pace.intervals.longest_s == pytest.approx(0.002)
    assert clock.wait(10.005, pace) is None
    assert not clock.silences(99.0, pace)


def test_nobody_waits_for_a_drafter_that_rests_or_is_silent_and_an_overdue_one_is_noticed():
    clock, pace = DraftClock(), LinkPace()
    assert clock.wait(10.0, pace) is None
    clock.told(10.0, has_drafts=False)
    assert clock.wait(10.0, pace) is not None
    assert not clock.silences(10.0 + OVERDUE * LONGEST_FIRST_S - 1e-6, pace)
    assert not pace.silent
    assert clock.silences(10.0 + OVERDUE * LONGEST_FIRST_S + 1e-6, pace)
    assert not clock.silences(99.0, pace), "it is said once"
    assert clock.wait(10.0, pace) is None
    pace.silent = False
    clock.stop()
    assert clock.wait(10.0, pace) is None
    assert not clock.silences(99.0, pace)
    # Called back: the time at rest is no delay.
    clock.told(60.0, has_drafts=False)
    assert clock.heard(60.003, pace, has_drafts=True)
    assert pace.responses.longest_s == LONGEST_FIRST_S

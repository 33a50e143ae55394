"""How long a queue is, and who may join it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import OverloadedError
from paceline.engine.admission import LEAST_ENDS, OLDEST_PART, QueueClock, check_wait, num_ahead, prompt_rows


def busy_clock(interval_s: float, count: int = 20) -> QueueClock:
    """A clock of a queue that a session leaves every so many seconds; the last one at `count * interval_s`."""
    clock = QueueClock()
    for index in range(1, count + 1):
        clock.ended(index * interval_s, num_waiting=5)
    return clock


def test_a_queue_is_as_long_as_its_sessions_take_to_leave() -> None:
    clock = busy_clock(0.5)
    assert clock.wait_s(10.5, ahead=8) == pytest.approx(4.0)
    assert clock.wait_s(10.5, ahead=0) == 0.0


def test_without_experience_nobody_is_sent_away() -> None:
    assert QueueClock().wait_s(1.0, ahead=1000) == 0.0
    assert busy_clock(1.0, LEAST_ENDS - 1).wait_s(9.0, ahead=1000) == 0.0


def test_ends_while_nobody_waited_say_nothing_of_what_can_be_done() -> None:
    clock = busy_clock(0.5)
    clock.ended(100.0, num_waiting=0)
    assert clock.wait_s(101.0, ahead=8) == 0.0


def test_a_stall_makes_the_queue_longer() -> None:
    clock = busy_clock(0.5)
    assert clock.wait_s(60.0, ahead=8) > 4 * clock.wait_s(10.5, ahead=8)


def test_a_wait_beyond_what_is_asked_for_is_refused_with_the_time_to_come_again() -> None:
    check_wait(5.0, None)
    check_wait(5.0, 5.0)
    with pytest.raises(OverloadedError, match=r"free in about 7\.5 s, the request may wait 5\.0 s") as refused:
        check_wait(7.5, 5.0)
    assert refused.value.retry_after_s == 2.5


def test_whoever_finds_a_free_place_waits_for_nobody() -> None:
    assert num_ahead("", 9, [("", 0)] * 2, num_places=3) == 0


def test_the_more_important_wait_for_fewer_to_end_but_for_one_at_least() -> None:
    others = [("", 0)] * 10 + [("", 5)] * 10
    assert [num_ahead("", priority, others, num_places=4) for priority in (-1, 0, 5)] == [1, 7, 17]


def test_of_another_tenant_as_many_count_as_of_ones_own_and_one() -> None:
    others = [("greedy", -1)] * 100 + [("modest", 0)] * 3
    assert num_ahead("new", 0, others, num_places=4) == 1
    assert num_ahead("modest", 0, others, num_places=4) == 3 + 4 + 1 - 4
    assert num_ahead("greedy", 0, others, num_places=4) == 100 + 3 + 1 - 4


@dataclass
class Reading:
    """What `prompt_rows` looks at of a session."""

    number: int
    tenant: str
    num_missing: int

    @property
    def pages(self) -> Reading:
        return self

    @property
    def request(self) -> Any:
        return SimpleNamespace(priority=0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400)), min_size=1, max_size=20), st.integers(3, 300))
def test_each_tenant_gets_an_equal_share_of_the_rows_and_none_are_left(
    prompts: list[tuple[str, int]], room: int
) -> None:
    reading: list[Any] = [Reading(number, *each) for number, each in enumerate(prompts)]
    rows = prompt_rows(reading, room)
    assert sum(rows.values()) == min(room, sum(length for _, length in prompts))
    assert all(0 <= rows[each.number] <= each.num_missing for each in reading)
    tenants = {each.tenant for each in reading}
    for tenant in tenants:
        mine = [each for each in reading if each.tenant == tenant]
        share = min(room // len(tenants), sum(each.num_missing for each in mine))
        assert sum(rows[each.number] for each in mine) >= share
        assert rows[mine[0].number] >= min(mine[0].num_missing, share // OLDEST_PART)

"""How long the next nodes of a session may take, by what came before over its link."""

from __future__ import annotations

import pytest

from paceline.core.link import (
    MOST_STEPS_AHEAD,
    MOST_TRACKED,
    OVERDUE,
    ROOM_PER_NODE,
    Answers,
    ConnectedDrafter,
    price_ahead,
    tree_room,
)


def test_a_drafters_delays_follows_what_is_heard_and_overdue_nodes_are_not_expected():
    drafter = ConnectedDrafter(response_s=0.004)
    for _ in range(50):
        drafter.response.add(0.001)
    assert drafter.response.value == pytest.approx(0.001, rel=0.01)
    answers = Answers()
    answers.sent(10, 10.0)
    assert answers.wait_s(10.0, drafter) == pytest.approx(0.001, rel=0.01)
    assert not answers.mark_silent(10.0, drafter)
    overdue_s = 10.0 + 2 * OVERDUE * 0.001
    assert answers.wait_s(overdue_s, drafter) is None
    assert [answers.mark_silent(overdue_s, drafter) for _ in range(2)] == [True, False]
    answers.sent(11, 11.0)
    assert answers.wait_s(11.0, drafter) is None


def test_the_next_nodes_are_the_answer_to_the_oldest_commit_that_has_none():
    drafter, answers = ConnectedDrafter(response_s=0.020), Answers()
    answers.sent(10, 1.000)
    answers.sent(11, 1.015)
    assert answers.wait_s(1.015, drafter) == pytest.approx(0.005)
    # The answer to the first teaches what an answer takes, though another commit has gone out since.
    assert answers.received(10, 1.024, drafter) == pytest.approx(0.024)
    assert drafter.response.value == pytest.approx(0.0208)
    assert answers.wait_s(1.024, drafter) == pytest.approx(1.015 + 0.0208 - 1.024)
    assert answers.received(11, 1.036, drafter) == pytest.approx(0.021)
    # Then those that follow at the pace of messages; they answer no commit.
    assert answers.wait_s(1.036, drafter) == pytest.approx(drafter.interval.value)
    assert answers.received(11, 1.040, drafter) is None
    assert drafter.interval.value == pytest.approx(0.0024)


def test_one_answer_stands_for_the_commits_before_it():
    drafter, answers = ConnectedDrafter(response_s=0.010), Answers()
    for committed_len in (10, 11, 12):
        answers.sent(committed_len, committed_len / 100)
    assert answers.received(12, 0.130, drafter) == pytest.approx(0.010)
    assert answers.wait_s(0.130, drafter) == pytest.approx(drafter.interval.value)


def test_a_full_tree_leaves_a_commit_unanswered_and_that_silences_nobody():
    drafter, answers = ConnectedDrafter(response_s=0.004), Answers()
    answers.sent(10, 1.000)
    answers.sent(14, 1.030)
    assert not answers.mark_silent(1.030, drafter)
    assert answers.wait_s(1.030, drafter) == pytest.approx(0.004)


def test_a_drafter_at_rest_is_not_waited_for_and_what_it_was_told_before_is_forgotten():
    drafter, answers = ConnectedDrafter(), Answers()
    assert answers.wait_s(1.0, drafter) is None
    answers.sent(10, 1.0)
    answers.stop()
    assert answers.wait_s(1.001, drafter) is None
    assert not answers.mark_silent(9.0, drafter)
    assert answers.received(10, 9.0, drafter) is None
    for committed_len in range(11, 11 + 2 * MOST_TRACKED):
        answers.sent(committed_len, 9.0 + committed_len)
    assert answers.wait_s(9.0 + committed_len, drafter) == pytest.approx(drafter.response.value)


def test_a_drafter_keeps_as_much_ahead_as_steps_go_by_before_it_is_heard():
    near, far = (ConnectedDrafter(response_s=each).steps_ahead(0.020) for each in (0.0, 0.020))
    assert (near, far) == (1.0, 2.0)
    assert ConnectedDrafter(response_s=5.0).steps_ahead(0.020) == MOST_STEPS_AHEAD
    assert tree_room(12, near) == 12 * ROOM_PER_NODE
    assert tree_room(12, far) == 2 * 12 * ROOM_PER_NODE
    assert tree_room(0, far) == 0
    assert price_ahead(0.2, near) == pytest.approx(0.2)
    assert price_ahead(0.2, far) == pytest.approx(0.04)
    # At rest wherever they are; at work, however dear.
    assert price_ahead(1.0, far) == 1.0
    assert price_ahead(0.99, 1.0) < 1.0

"""How long the next nodes of a session may take, by what came before over its link."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from paceline.core.link import ConnectedDrafter
from paceline.core.params import METHODS
from paceline.forest import NONE, Forest, rows_of
from paceline.forest.linking import MOST_STEPS_AHEAD, OVERDUE, ROOM_PER_NODE
from paceline.forest.records import TRACKED


class Link:
    """One session's link to a drafter, at work unless the price is 1; `length` tokens are committed."""

    def __init__(self, *, response_s: float = 0.004, price: float = 0.1) -> None:
        self.forest = Forest(METHODS)
        self.links = self.forest.links
        self.row = self.forest.take_row()
        self.rows = rows_of([self.row])
        self.forest.open(self.row, range(5))
        self.links.begin(self.row, 1, price)
        self.links.bound(self.row, most_guesses=8, last_len=1000, waits_up_to=1000)
        self.drafter = ConnectedDrafter(self.links, response_s=response_s)
        self.links.connect(self.row, self.drafter.number)
        self.due(5, 0.0)

    def known(self, name: str) -> float:
        """What is known of the drafter."""
        return float(self.links.arrays.drafters[name][self.drafter.number])

    def due(self, length: int, now_s: float) -> int:
        """So many tokens are committed; how many the drafter knew, where it is told, or NONE."""
        self.forest.arrays.trees["committed_len"][self.row] = length
        (opens,), num_told = self.links.due(self.rows, now_s)
        _, unsent_from, _, _ = self.links.drain_commits(self.rows, self.drafter.number)
        assert len(unsent_from) == num_told
        return 0 if opens else next(iter(unsent_from.tolist()), NONE)

    def heard(self, base_len: int, now_s: float, first: float = 0.5) -> float | None:
        """A guess comes from a drafter that knew so many tokens; seconds since the commit that it answers, if any."""
        times = self.links.drafts_arrived(self.rows, rows_of([base_len]), rows_of([1]), *np.array([[first], [now_s]]))
        return times[0] if times else None

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next nodes."""
        (seconds,) = self.links.waits(self.rows, now_s).tolist()
        return None if np.isnan(seconds) else seconds

    def marked(self, now_s: float) -> int:
        """Whether the drafter has become silent."""
        return self.links.mark_silent(self.rows, now_s)


def test_overdue_nodes_are_not_expected_until_the_drafter_speaks_again():
    link = Link(response_s=0.001)
    link.due(10, 10.0)
    assert link.wait_s(10.0) == pytest.approx(0.001)
    assert not link.marked(10.0)
    overdue_s = 10.0 + 2 * OVERDUE * 0.001
    assert link.wait_s(overdue_s) is None
    assert [link.marked(overdue_s) for _ in range(2)] == [1, 0]
    link.due(11, 11.0)
    assert link.wait_s(11.0) is None
    link.drafter.speaks()
    assert link.wait_s(11.0) == pytest.approx(0.001)


def test_the_next_nodes_are_the_answer_to_the_oldest_commit_that_has_none():
    link = Link(response_s=0.020)
    link.heard(5, 0.020)
    link.due(10, 1.000)
    link.due(11, 1.015)
    assert link.wait_s(1.015) == pytest.approx(0.005)
    # The answer to the first teaches what an answer takes, though another commit has gone out since.
    assert link.heard(10, 1.024) == pytest.approx(0.024)
    assert link.known("response_s") == pytest.approx(0.0208)
    assert link.wait_s(1.024) == pytest.approx(1.015 + 0.0208 - 1.024)
    assert link.heard(11, 1.036) == pytest.approx(0.021)
    # Then those that follow at the pace of messages; they answer no commit.
    assert link.wait_s(1.036) == pytest.approx(link.known("interval_s"))
    assert link.heard(11, 1.040) is None
    assert link.known("interval_s") == pytest.approx(0.0024)


def test_one_answer_stands_for_the_commits_before_it():
    link = Link(response_s=0.010)
    for length in (10, 11, 12):
        link.due(length, length / 100)
    assert link.heard(12, 0.130) == pytest.approx(0.010)
    assert link.wait_s(0.130) == pytest.approx(link.known("interval_s"))


def test_a_message_without_guesses_teaches_nothing():
    link = Link()
    link.due(10, 1.0)
    nothing = link.links.drafts_arrived(link.rows, rows_of([10]), rows_of([0]), *np.array([[0.0], [1.5]]))
    assert nothing == []
    assert link.wait_s(1.0) == pytest.approx(0.004)


def test_a_full_tree_leaves_a_commit_unanswered_and_that_silences_nobody():
    link = Link()
    link.due(10, 1.000)
    link.due(14, 1.030)
    assert not link.marked(1.030)
    assert link.wait_s(1.030) == pytest.approx(0.004)


def test_a_drafter_at_rest_is_not_waited_for_and_what_it_was_told_before_is_forgotten():
    link = Link()
    link.due(10, 1.0)
    link.links.idle(link.rows)
    assert link.due(10, 1.001) == 10, "that it rests is the last that it is told"
    assert link.wait_s(1.001) is None
    assert not link.marked(9.0)
    assert link.due(11, 9.0) == NONE
    assert link.heard(10, 9.0) is None
    link.links.look_ahead(link.rows, rows_of([4]), prices=np.array([0.1]), step_s=0.02)
    assert link.due(12, 9.0) == 10, "all that it has missed, in one message"


def test_so_many_commits_are_kept_track_of_and_no_more():
    link = Link()
    last = 10 + 3 * TRACKED // 2
    for length in range(11, last + 1):
        link.due(length, float(length))
    oldest = last + 1 - TRACKED
    assert link.heard(oldest - 1, float(last)) is None, "it is forgotten"
    assert link.heard(oldest, float(last)) == pytest.approx(last - oldest)
    assert link.heard(last, last + 0.004) == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("base_len", "has_distributions", "chain", "doubtful"),
    [
        (5, False, False, NONE),
        (1, False, False, NONE),
        (0, False, False, 1),
        (6, False, False, 1),
        (5, False, True, 1),
        (5, True, True, NONE),
    ],
)
def test_a_drafter_knows_one_token_at_least_and_none_that_was_never_committed(
    base_len: int, has_distributions: bool, chain: bool, doubtful: int
):
    link = Link()
    row = link.forest.take_row()
    link.forest.open(row, range(5), chain=chain)
    rows, bases = rows_of([link.row, row]), rows_of([5, base_len])
    link.links.connect(row, link.drafter.number)
    serve = partial(link.links.serve, has_distributions=has_distributions)
    assert serve(rows, bases, link.drafter.number) == doubtful
    assert serve(rows, bases, link.links.new_drafter(1.0)) == NONE, "it drafts for neither"
    assert rows.tolist() == [NONE, NONE]


def test_a_drafter_that_is_lost_is_told_everything_when_it_is_back():
    link = Link()
    link.links.connect(link.row, NONE)
    assert link.due(10, 1.0) == NONE
    assert not link.links.standing(link.rows, 1).drafted.any()
    link.links.connect(link.row, link.drafter.number)
    assert link.due(11, 2.0) == 0
    assert link.due(12, 2.1) == 11


def test_what_is_not_sent_yet_is_told_in_one_message():
    link = Link()
    for length in (10, 11):
        link.forest.arrays.trees["committed_len"][link.row] = length
        link.links.due(link.rows, float(length))
    link.links.resend_from(link.row, 3)
    assert [column.tolist() for column in link.links.drain_commits(link.rows, link.drafter.number)] == [
        [1],
        [3],
        [pytest.approx(0.1)],
        [0],
    ]
    assert all(len(column) == 0 for column in link.links.drain_commits(link.rows, link.drafter.number))


def test_the_share_of_a_first_guess_follows_what_is_heard_of_the_last_commit():
    link = Link()
    shares = []
    for length in range(10, 30):
        link.due(length, float(length))
        link.heard(length, length + 0.001, first=0.01)
        shares += link.links.standing(link.rows, 0).shares.tolist()
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.05
    link.due(40, 40.0)
    link.heard(40, 40.001, first=-1.0)
    assert link.links.standing(link.rows, 0).shares.tolist() == shares[-1:]


def test_a_drafter_keeps_as_much_ahead_as_steps_go_by_before_it_is_heard():
    def ahead(response_s: float, price: float, cap: int = 12) -> tuple[float, int]:
        link = Link(response_s=response_s)
        link.links.look_ahead(link.rows, rows_of([cap]), prices=np.array([price]), step_s=0.020)
        return link.links.terms(link.row)

    assert ahead(0.0, 0.2) == (pytest.approx(0.2), 12 * ROOM_PER_NODE)
    assert ahead(0.020, 0.2) == (pytest.approx(0.04), 2 * 12 * ROOM_PER_NODE)
    assert ahead(5.0, 0.2)[1] == MOST_STEPS_AHEAD * 12 * ROOM_PER_NODE
    assert ahead(0.020, 0.2, cap=0) == (1.0, 0)
    # At rest wherever they are; at work, however dear.
    assert ahead(0.020, 1.0)[0] == 1.0
    assert ahead(0.0, 0.99)[0] < 1.0

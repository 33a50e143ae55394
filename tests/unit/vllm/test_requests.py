"""Requests by name: a helper holds of each what vLLM has, whatever happens to it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.vllm.requests import RequestSessions, RequestStep
from paceline.vllm.step_message import Observed
from tests.support.vllm_batch import HeldSessions

UNLIMITED = 1 << 40


class Story:
    """Requests with their tokens, and what a helper holds of them."""

    def __init__(self) -> None:
        self.sessions = RequestSessions()
        self.held = HeldSessions()
        self.texts: dict[str, list[int]] = {}
        self.most: dict[str, int] = {}

    def step(self, *, most_opened: int = UNLIMITED, verified: int = 0, **sampled: Sequence[int]) -> Observed:
        """A step over these requests, each of which commits some tokens."""
        for name, tokens in sampled.items():
            self.texts[name] += tokens
        names = [*sampled]
        observed = self.sessions.observe(
            RequestStep(
                names=names,
                lengths=[len(self.texts[name]) for name in names],
                sampled=[*sampled.values()],
                verified=[verified] * len(names),
                text=lambda place: self.texts[names[place]],
                live=self.texts,
                most_guesses=lambda name: self.most.get(name, UNLIMITED),
            ),
            most_opened,
        )
        self.held.take(observed.rows, observed.closed)
        for place, row in zip(observed.places, observed.rows, strict=True):
            assert self.held.tokens[row.session] == self.texts[names[place]]
            assert row.length == len(self.texts[names[place]])
            assert row.reads is not bool(sampled[names[place]])
        return observed


def test_a_request_is_opened_whole_and_goes_on_with_what_it_commits() -> None:
    story = Story()
    story.texts["a"] = [5, 6, 7]
    (read,) = story.step(a=[]).rows
    (opened,) = story.step(a=[8]).rows
    (went_on,) = story.step(a=[9, 10], verified=3).rows
    assert (read.base_len, read.reads) == (0, True)
    assert (opened.base_len, [*opened.token_ids]) == (3, [8])
    assert (went_on.base_len, [*went_on.token_ids], went_on.num_verified) == (4, [9, 10], 3)
    assert story.sessions.since(went_on.session, 4) == [9, 10]


def test_rows_that_change_places_keep_their_sessions() -> None:
    story = Story()
    story.texts |= {"a": [1], "b": [1]}
    before = story.step(a=[2], b=[2])
    after = story.step(b=[3], a=[4])
    assert [row.session for row in after.rows] == [row.session for row in before.rows][::-1]


def test_a_request_that_is_over_is_closed_at_the_next_step() -> None:
    story = Story()
    story.texts |= {"a": [1], "b": [2]}
    first = story.step(a=[3], b=[3]).rows[0].session
    del story.texts["a"]
    assert [*story.step(b=[4]).closed] == [first]
    assert len(story.held.tokens) == 1


def test_a_request_that_sits_out_steps_or_was_missed_goes_on_and_one_with_another_text_is_opened_anew() -> None:
    story = Story()
    story.texts |= {"a": [1], "b": [2]}
    story.step(a=[3], b=[3])
    story.step(a=[4])
    assert story.step(a=[5], b=[6]).rows[1].base_len == 2
    story.texts["b"] += [7, 8]
    (row,) = story.step(b=[9]).rows
    assert (row.base_len, [*row.token_ids], row.reads) == (3, [7, 8, 9], False)
    story.texts["b"] = [2, 3, 6, 5, 5, 5, 5]
    observed = story.step(b=[9])
    assert observed.rows[0].base_len == 0
    assert len(observed.closed) == 1


def test_each_row_says_how_many_guesses_its_request_takes() -> None:
    story = Story()
    story.texts |= {"a": [1], "b": [2]}
    story.most = {"a": 0, "b": 3}
    assert [row.most_guesses for row in story.step(a=[3], b=[3]).rows] == [0, 3]
    # It is asked for once: a request does not change its mind.
    story.most = {}
    rows = story.step(a=[4], b=[]).rows
    assert [(row.most_guesses, row.takes_guesses) for row in rows] == [(0, False), (3, False)]


def test_rows_beyond_the_room_for_new_sessions_get_theirs_later() -> None:
    story = Story()
    story.texts |= {"a": [1] * 50, "b": [2] * 50}
    assert [*story.step(most_opened=60, a=[3], b=[3]).places] == [0]
    assert [*story.step(most_opened=60, a=[4], b=[4]).places] == [0, 1]


def test_after_another_helper_has_come_all_is_told_anew() -> None:
    story = Story()
    story.texts["a"] = [1, 2]
    old = story.step(a=[3]).rows[0].session
    story.sessions.forget()
    (row,) = story.step(a=[4]).rows
    assert (row.base_len, row.session) == (0, old + 1)

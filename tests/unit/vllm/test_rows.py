"""Rows of vLLM's batch find their sessions by content, whatever happens to them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.vllm.rows import KEPT_S, Observed, RowSessions
from tests.support.vllm_batch import HeldSessions, VllmBatch


class Story:
    """A batch, the sessions of its rows, and what a helper holds of them."""

    def __init__(self) -> None:
        self.batch = VllmBatch()
        self.sessions = RowSessions()
        self.held = HeldSessions()
        self.now_s = 100.0
        # The session of each row in the last step.
        self.of: dict[str, int] = {}

    def step(self, **sampled: list[int]) -> Observed:
        """A step in which rows sample these tokens, others any one."""
        tokens = self.batch.step(lambda name: sampled.get(name) or [len(self.batch.texts[name])])
        self.now_s += 0.01
        observed = self.sessions.observe(tokens, self.batch.lengths, self.batch.token_ids, self.now_s)
        self.held.take(observed.rows, observed.closed)
        assert len({row.session for row in observed.rows}) == len(observed.rows)
        for place, row in zip(observed.places, observed.rows, strict=True):
            assert self.held.tokens[row.session] == self.batch.texts[self.batch.rows[place]]
            assert row.reads is not bool(tokens[place])
        self.of = {
            self.batch.rows[place]: row.session for place, row in zip(observed.places, observed.rows, strict=True)
        }
        return observed


def test_a_row_is_opened_whole_and_goes_on_with_what_it_samples() -> None:
    story = Story()
    story.batch.admit("a", [5, 6, 7])
    (opened,) = story.step(a=[8]).rows
    (went_on,) = story.step(a=[9, 10, 11]).rows
    assert (opened.base_len, list(opened.token_ids)) == (0, [5, 6, 7, 8])
    assert (went_on.base_len, list(went_on.token_ids)) == (4, [9, 10, 11])
    assert went_on.session == opened.session


def test_a_prompt_that_is_still_being_read_is_opened_early_and_takes_no_guesses_until_it_has_been_read() -> None:
    story = Story()
    story.batch.admit("a", list(range(300)), reading=2)
    first, second, third = (story.step().rows[0] for _ in range(3))
    assert (first.reads, len(first.token_ids)) == (True, 300)
    assert (second.reads, second.base_len, len(second.token_ids)) == (True, 300, 0)
    assert (third.reads, third.base_len, list(third.token_ids)) == (False, 300, [300])


def test_the_last_row_keeps_its_session_when_it_takes_the_place_of_one_that_is_over() -> None:
    story = Story()
    for name in "abc":
        story.batch.admit(name, [ord(name)] * 3)
    story.step()
    before = story.of
    story.batch.remove("a")
    story.step()
    assert story.of == {name: before[name] for name in "cb"}


def test_rows_that_swap_keep_their_sessions() -> None:
    story = Story()
    story.batch.admit("a", [1, 2])
    story.batch.admit("b", [3, 4])
    story.step()
    before = story.of
    story.batch.swap(0, 1)
    story.step()
    assert story.of == before


def test_a_preempted_row_finds_its_session_again_while_it_is_read_anew() -> None:
    story = Story()
    story.batch.admit("a", [1, 2])
    story.batch.admit("b", [3, 4])
    story.step()
    before = story.of
    story.batch.remove("a")
    story.step()
    story.batch.readmit("a", reading=1)
    again = story.step().rows[1]
    assert (again.session, again.reads, len(again.token_ids)) == (before["a"], True, 0)


def test_two_rows_of_the_same_prompt_have_sessions_of_their_own() -> None:
    story = Story()
    story.batch.admit("a", [1, 2, 3])
    story.batch.admit("b", [1, 2, 3])
    for _ in range(3):
        assert len({row.session for row in story.step(a=[4], b=[4]).rows}) == 2
    story.batch.swap(0, 1)
    assert all(row.base_len for row in story.step(a=[5], b=[6]).rows)


def test_a_row_that_vllm_did_not_tell_of_for_some_steps_goes_on_where_its_session_ended() -> None:
    story = Story()
    story.batch.admit("a", [1, 2, 3])
    opened = story.step(a=[4]).rows[0]
    story.batch.step(lambda _: [5, 6])
    (row,) = story.step(a=[7]).rows
    assert (row.session, row.base_len, list(row.token_ids)) == (opened.session, 4, [5, 6, 7])


def test_a_row_that_lost_tokens_is_opened_anew() -> None:
    story = Story()
    story.batch.admit("a", [1, 2, 3])
    opened = story.step(a=[4, 5, 6]).rows[0]
    story.batch.texts["a"] = [1, 2, 3, 4]
    (row,) = story.step(a=[9]).rows
    assert row.session != opened.session
    assert row.base_len == 0


def test_rows_of_equal_length_and_tail_are_told_apart_when_they_are_searched() -> None:
    story = Story()
    story.batch.admit("a", [1] + [5] * 100)
    story.step(a=[5])
    before = story.of
    story.batch.remove("a")
    story.batch.admit("x", [9])
    story.step()
    story.batch.remove("x")
    story.batch.admit("b", [2] + [5] * 101)
    story.step(b=[5])
    assert story.of["b"] != before["a"]


def test_a_session_that_no_row_has_for_five_seconds_closes_and_its_row_is_opened_anew() -> None:
    story = Story()
    story.batch.admit("a", [1, 2])
    story.batch.admit("b", [3, 4])
    story.step()
    before = story.of
    story.batch.remove("a")
    story.now_s += KEPT_S - 1
    assert story.step().closed == []
    story.now_s += 2
    assert story.step().closed == [before["a"]]
    story.batch.readmit("a")
    assert story.step().rows[1].base_len == 0


def test_of_too_many_sessions_without_a_row_the_oldest_close_at_once() -> None:
    story = Story()
    closed: list[int] = []
    for number in range(70):
        story.batch.admit("a", [number, number])
        closed += story.step().closed
        story.batch.remove("a")
    assert closed == [1, 2, 3, 4, 5]
    assert len(story.sessions) == 65


def test_a_new_helper_is_told_everything_again_under_numbers_it_never_saw() -> None:
    story = Story()
    story.batch.admit("a", [1, 2])
    before = story.step().rows[0]
    story.sessions.forget()
    (after,) = story.step().rows
    assert after.base_len == 0
    assert after.session != before.session
    assert list(after.token_ids) == story.batch.texts["a"]


def test_guesses_count_as_verified_in_the_very_next_step_only() -> None:
    story = Story()
    story.batch.admit("a", [1, 2])
    story.batch.admit("b", [3, 4])
    observed = story.step()
    story.sessions.handed_out(observed.rows, [3, 0])
    observed = story.step()
    assert [row.num_verified for row in observed.rows] == [3, 0]
    story.sessions.handed_out(observed.rows, [2, 2])
    story.batch.remove("a")
    assert [row.num_verified for row in story.step().rows] == [2]
    story.batch.readmit("a")
    assert [row.num_verified for row in story.step().rows] == [0, 0]


def test_sessions_are_opened_for_so_many_tokens_only_and_the_others_in_later_calls() -> None:
    batch, sessions = VllmBatch(), RowSessions()
    for name in "abc":
        batch.admit(name, [ord(name)] * 10)
    told = [
        [list(call.places), [row.base_len for row in call.rows]]
        for call in (sessions.observe(batch.step(), batch.lengths, batch.token_ids, 1.0, 25) for _ in range(2))
    ]
    assert told == [[[0, 1], [0, 0]], [[0, 1, 2], [11, 11, 0]]]


@settings(max_examples=60)
@given(st.data())
def test_whatever_rows_do_the_helper_holds_the_tokens_of_each(data: st.DataObject) -> None:
    story = Story()
    waiting: list[str] = []
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=4)
    for count in range(data.draw(st.integers(5, 25))):
        batch = story.batch
        deed = data.draw(
            st.sampled_from(["admit", "remove", "preempt", "readmit", "swap", "silence", "forget", "none"])
        )
        if deed == "admit" and len(batch.rows) < 6:
            batch.admit(f"r{count}", data.draw(tokens), data.draw(st.integers(0, 2)))
        elif deed in ("remove", "preempt") and batch.rows:
            batch.remove(name := data.draw(st.sampled_from(batch.rows)))
            waiting += [name] if deed == "preempt" else []
        elif deed == "readmit" and waiting and len(batch.rows) < 6:
            batch.readmit(waiting.pop(), data.draw(st.integers(0, 2)))
        elif deed == "swap" and len(batch.rows) > 1:
            batch.swap(0, len(batch.rows) - 1)
        elif deed == "silence":
            batch.step(lambda _: data.draw(tokens))
        elif deed == "forget":
            story.sessions.forget()
        story.now_s += data.draw(st.sampled_from([0.0, 0.0, 3.0]))
        story.step(**{name: data.draw(tokens) for name in batch.rows})


def test_what_lies_behind_the_end_of_a_row_is_never_looked_at() -> None:
    story = Story()
    story.batch.admit("a", [1, 2])
    story.batch.token_ids[0, 3:] = np.iinfo(np.int32).max
    assert list(story.step(a=[3]).rows[0].token_ids) == [1, 2, 3]


def test_many_tokens_that_are_no_sample_are_taken_from_the_row() -> None:
    story = Story()
    story.batch.admit("a", range(200))
    story.step()
    story.batch.step(lambda _: range(150))
    row = story.step(a=[1, 2]).rows[0]
    assert (row.base_len, list(row.token_ids)) == (201, [*range(150), 1, 2])

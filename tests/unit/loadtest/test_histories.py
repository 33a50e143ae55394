"""Histories that are as they should be are cleared, and every way in which one can be wrong is found guilty."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from loadtest.histories import HTTP, History, Kind, Verdict, in_order, judge

TOKENS = (1, 2, 3, 4, 5, 6)
TEXT = "abcdef"


def begun() -> History:
    history = History(clock=itertools.count().__next__)
    history.note(Kind.ASKED)
    return history


def told(*token_ids: int, end: str = "length", text: str | None = None) -> History:
    """A client that got these tokens, two a piece."""
    history = begun()
    text = "".join(chr(96 + token_id) for token_id in token_ids) if text is None else text
    for at in range(0, len(token_ids), 2):
        history.note(Kind.PIECE, token_ids=token_ids[at : at + 2], text=text[at : at + 2])
    if end:
        history.note(Kind.ENDED, end)
    return history


def told_text(text: str) -> History:
    """A client of a door that brings text alone."""
    history = begun()
    history.door = HTTP
    history.note(Kind.PIECE, text=text)
    history.note(Kind.ENDED, "length")
    return history


REFERENCE = [told(*TOKENS)]


def failed(*token_ids: int) -> History:
    history = told(*token_ids, end="")
    history.note(Kind.FAILED, "UnavailableError: gone")
    return history


def test_whole_answers_over_either_door_and_however_they_were_cut_are_clean() -> None:
    interrupted = told(1, 2, end="")
    interrupted.note(Kind.PIECE, token_ids=(3, 4, 5, 6), text="cdef")
    interrupted.note(Kind.ENDED, "length")
    assert judge([told(*TOKENS), told_text(TEXT), interrupted], REFERENCE) == Verdict()


def test_a_request_that_was_never_begun_is_owed_nothing_and_one_that_came_again_is_answered() -> None:
    refused = begun()
    refused.note(Kind.REFUSED, "come again")
    again = begun()
    again.note(Kind.REFUSED, "come again")
    again.note(Kind.ASKED)
    again.note(Kind.PIECE, token_ids=TOKENS, text=TEXT)
    again.note(Kind.ENDED, "length")
    assert judge([refused, again], REFERENCE).clean


@pytest.mark.parametrize(
    ("history", "found"),
    [
        (told(1, 2, 3, 4, 5), Verdict(lost=1)),
        (told(1, 2, 4, 5, 6), Verdict(lost=1)),
        (told(1, 2, 3, 3, 4, 5, 6), Verdict(doubled=1)),
        (told(1, 2, 1, 2, 3, 4, 5, 6), Verdict(doubled=2)),
        (told(*TOKENS, 7), Verdict(doubled=1)),
        (told(1, 2, 9, 4, 5, 6), Verdict(changed=1)),
        (told(1, 3, 2, 4, 5, 6), Verdict(changed=2)),
        (told(9, 8, 3, 4, 5), Verdict(changed=5, lost=1)),
        (told(*TOKENS, text="abcxef"), Verdict(changed=1)),
        (told_text("abdef"), Verdict(lost=1)),
        (told_text("abccdef"), Verdict(doubled=1)),
        (told_text("abXdef"), Verdict(changed=1)),
        (told_text(""), Verdict(lost=6)),
        (failed(1, 2), Verdict(unanswered=1)),
        (failed(), Verdict(unanswered=1)),
        (failed(1, 9), Verdict(unanswered=1, changed=1)),
        (told(1, 2, end=""), Verdict(unanswered=1)),
    ],
)
def test_what_is_lost_doubled_changed_or_left_without_an_answer_is_counted(history: History, found: Verdict) -> None:
    assert judge([history], REFERENCE) == found
    assert not found.clean


def test_a_request_that_was_taken_and_then_refused_is_left_without_an_answer() -> None:
    history = told(1, 2, end="")
    history.note(Kind.REFUSED, "no place")
    assert judge([history], REFERENCE).unanswered == 1


def after_its_end(history: History) -> None:
    history.note(Kind.ENDED, "length")
    history.note(Kind.PIECE, token_ids=(7,), text="g")


def ended_twice(history: History) -> None:
    history.note(Kind.ENDED, "length")
    history.note(Kind.ENDED, "length")


def without_being_asked_again(history: History) -> None:
    history.note(Kind.REFUSED, "no place")
    history.note(Kind.PIECE, token_ids=(1,), text="a")


@pytest.mark.parametrize("disorder", [after_its_end, ended_twice, without_being_asked_again])
def test_events_out_of_their_order_are_found(disorder: Callable[[History], None]) -> None:
    history = begun()
    disorder(history)
    assert not in_order(history)
    assert judge([history], REFERENCE).disordered == 1


def test_an_answer_before_the_question_and_a_clock_that_runs_backwards_are_found() -> None:
    unasked = History(clock=itertools.count().__next__)
    unasked.note(Kind.PIECE, token_ids=(1,), text="a")
    assert not in_order(unasked)
    backwards = History(clock=itertools.count(0, -1).__next__)
    backwards.note(Kind.ASKED)
    backwards.note(Kind.PIECE, token_ids=(1,), text="a")
    assert not in_order(backwards)

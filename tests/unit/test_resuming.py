"""What a client has of a stream, through resumptions and new beginnings in any order: each token once, none missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.client.resuming import Progress
from paceline.core.errors import EndsEnginesError, OverloadedError, ResumeMismatchError, UnavailableError
from paceline.rpc.v1 import gateway_pb2

TEXT = "abcdefghijklmnopqrstuvwxyz"


def piece(start: int, stop: int) -> gateway_pb2.GatewayGenerateResponse:
    tokens = range(start, stop)
    return gateway_pb2.GatewayGenerateResponse(session_id="s", text=TEXT[start:stop], token_ids=tokens, offset=start)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 5), max_size=4)), max_size=8))
def test_streams_that_break_off_anywhere_join_to_the_whole(attempts: list[tuple[bool, list[int]]]) -> None:
    """Each attempt resumes or begins anew, brings pieces of some lengths, and breaks off; the last one does not."""
    progress = Progress()
    got: list[int] = []
    text = ""
    for resumes, lengths in [*attempts, (True, [26])]:
        at = 0
        if resumes and progress.session_id:
            at = progress.resume().offset
        else:
            progress.begin_anew()
        for length in lengths:
            stop = min(at + length, len(TEXT))
            new = progress.take(piece(at, stop))
            at = stop
            if new is not None:
                got += new.token_ids
                text += new.text
    assert got == list(range(26))
    assert text == TEXT


def test_a_gap_ends_the_stream_so_that_it_is_asked_for_again() -> None:
    progress = Progress()
    progress.take(piece(0, 3))
    with pytest.raises(UnavailableError, match="token 5 where 3 was to come"):
        progress.take(piece(5, 7))
    assert progress.resume().offset == 3


def test_a_new_beginning_that_brings_another_text_is_never_joined_to_the_first() -> None:
    progress = Progress()
    progress.take(piece(0, 3))
    progress.begin_anew()
    progress.take(piece(0, 2))
    other = piece(2, 5)
    other.token_ids[0] = 99
    with pytest.raises(ResumeMismatchError):
        progress.take(other)


def test_a_session_that_has_begun_waits_for_its_place_and_a_new_one_is_the_callers_to_send_again() -> None:
    progress, full = Progress(), OverloadedError("full", retry_after_s=2.5)
    with pytest.raises(OverloadedError):
        progress.wait_s(full)
    progress.take(piece(0, 3))
    assert progress.wait_s(full) == 2.5
    with pytest.raises(EndsEnginesError):
        progress.wait_s(EndsEnginesError("engines died of it"))

"""What a client has of a stream, through resumptions and new beginnings in any order: each token once, none missing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.resuming import _Progress
from paceline.rpc.v1 import gateway_pb2

TEXT = "abcdefghijklmnopqrstuvwxyz"


def piece(start: int, stop: int) -> gateway_pb2.GatewayGenerateResponse:
    return gateway_pb2.GatewayGenerateResponse(session_id="s", text=TEXT[start:stop], token_ids=range(start, stop))


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 5), max_size=4)), max_size=8))
def test_streams_that_break_off_anywhere_join_to_the_whole(attempts: list[tuple[bool, list[int]]]) -> None:
    """Each attempt resumes or begins anew, brings pieces of some lengths, and breaks off; the last one does not."""
    progress = _Progress()
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

"""The proposer's end of a socket to a helper that reads late, little or nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from paceline.vllm import helper_socket
from paceline.vllm.helper_socket import HelperLostError, HelperSocket
from paceline.vllm.step_message import (
    BrokenMessageError,
    ChainsMessage,
    Frames,
    RowTokens,
    StepMessage,
    chains_bytes,
    step_bytes,
    step_from,
)
from tests.support.clock import Clock

LARGE = bytes(range(256)) * 8192


@pytest.fixture
def clock() -> Clock:
    return Clock(50.0)


@pytest.fixture
def peer(clock: Clock) -> Iterator[tuple[HelperSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    stream = HelperSocket(ours, most_unread_bytes=4 * len(LARGE), most_answer_bytes=4096, clock=clock)
    with theirs:
        yield stream, theirs
    stream.close()


def test_what_does_not_fit_is_sent_on_later_and_in_order(peer: tuple[HelperSocket, socket.socket]) -> None:
    stream, theirs = peer
    stream.send(LARGE)
    assert stream.unsent_bytes > 0
    stream.send(b"and more")
    got = bytearray()
    while len(got) < len(LARGE) + 8:
        got += theirs.recv(1 << 20)
        stream.flush()
    assert bytes(got) == LARGE + b"and more"
    assert stream.unsent_bytes == 0


def test_a_helper_that_leaves_too_much_unread_is_lost(peer: tuple[HelperSocket, socket.socket]) -> None:
    stream, _ = peer
    for _ in range(4):
        stream.send(LARGE)
    with pytest.raises(HelperLostError, match="bytes unread"):
        stream.send(LARGE)


def test_a_helper_that_reads_nothing_for_half_a_minute_is_lost(
    peer: tuple[HelperSocket, socket.socket], clock: Clock
) -> None:
    stream, theirs = peer
    stream.send(LARGE)
    clock.now_s += 29
    theirs.recv(1 << 20)
    stream.send(b"more")
    clock.now_s += 29
    stream.send(b"more")
    clock.now_s += 2
    with pytest.raises(HelperLostError, match="read nothing for 30 s"):
        stream.send(b"more")


def test_messages_are_given_out_however_they_are_cut(peer: tuple[HelperSocket, socket.socket]) -> None:
    stream, theirs = peer
    content = chains_bytes(ChainsMessage(3, True, [[1, 2], []])) + chains_bytes(ChainsMessage(4, False))
    got = []
    for at in range(0, len(content), 7):
        theirs.sendall(content[at : at + 7])
        got += [
            (message.step, message.awaits, [list(chain) for chain in message.chains]) for message in stream.received()
        ]
    assert got == [(3, True, [[1, 2], []]), (4, False, [])]


def test_a_message_longer_than_any_answer_is_none(peer: tuple[HelperSocket, socket.socket]) -> None:
    stream, theirs = peer
    theirs.sendall(chains_bytes(ChainsMessage(1, True, [[0] * 4096])))
    with pytest.raises(BrokenMessageError):
        list(stream.received())


def test_a_closed_end_is_a_lost_helper(peer: tuple[HelperSocket, socket.socket]) -> None:
    stream, theirs = peer
    assert list(stream.received()) == []
    theirs.close()
    with pytest.raises(HelperLostError, match="closed"):
        list(stream.received())


@pytest.mark.parametrize("most_files", [0, 1024])
def test_a_wait_ends_with_what_comes_or_at_its_deadline(
    peer: tuple[HelperSocket, socket.socket], clock: Clock, monkeypatch: pytest.MonkeyPatch, most_files: int
) -> None:
    monkeypatch.setattr(helper_socket, "MOST_SELECT_FILES", most_files)
    stream, theirs = peer
    assert not stream.wait(clock.now_s)
    assert not stream.wait(clock.now_s + 0.0005)
    theirs.sendall(b"x")
    assert stream.wait(clock.now_s + 60)


def test_a_step_arrives_as_it_was_told_and_guesses_for_other_rows_than_it_has_are_refused() -> None:
    rows = [RowTokens(3, 0, [1, 2, 3], True), RowTokens(4, 7, [8], False, 2)]
    for taken in ([], [[], [9, 10]]):
        (content,) = Frames().feed(step_bytes(StepMessage(5, 1.5, False, rows, [2], taken)))
        told = step_from(content)
        assert (told.step, told.began_s, [*told.closed]) == (5, 1.5, [2])
        assert [[*chain] for chain in told.taken] == taken
        assert [(row.session, row.length, row.reads) for row in told.rows] == [(3, 3, True), (4, 8, False)]
    (content,) = Frames().feed(step_bytes(StepMessage(5, 1.5, False, rows, [2], [[9]])))
    with pytest.raises(BrokenMessageError, match="guesses of 1 rows out of 2"):
        step_from(content)

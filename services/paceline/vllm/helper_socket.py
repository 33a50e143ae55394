"""The proposer's end of the socket to its helper; no call blocks longer than the caller allows."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator

from paceline.vllm.step_message import ChainsMessage, Frames, chains_from

# Enough for the answer to a large step; also bounds what a call reads from a helper that floods us.
READ_BYTES = 1 << 14
# A helper that starts on a busy machine may take some seconds.
MOST_STANDSTILL_S = 30.0
# select has exact timeouts, but takes file numbers below this only.
MOST_SELECT_FILES = 1024


class HelperLostError(Exception):
    """The helper has ended, or misbehaves."""


class HelperSocket:
    """Sends what fits, keeps the rest for later, and reads what has come.

    Args:
        stream: A connected socket, which this object closes.
        most_unread_bytes: A helper that leaves more unread counts as lost.
        most_answer_bytes: Longer messages are broken.
    """

    def __init__(
        self,
        stream: socket.socket,
        most_unread_bytes: int,
        most_answer_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._most_unread_bytes = most_unread_bytes
        self._frames = Frames(most_answer_bytes)
        self._unsent = bytearray()
        self._clock = clock
        # When the helper last took bytes, while some are left.
        self._took_s = 0.0

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the helper has not taken yet."""
        return len(self._unsent)

    def send(self, content: bytes) -> None:
        """Sends as much as the helper takes at once; the rest goes with later calls.

        Raises:
            HelperLostError: It has left too much unread, or has read nothing for 30 s.
            OSError: It has ended.
        """
        if self._unsent:
            self._unsent += content
            self.flush()
        elif (sent := self._sent(content)) < len(content):
            self._unsent += content[sent:]
            self._took_s = self._clock()
        if len(self._unsent) > self._most_unread_bytes:
            raise HelperLostError(f"it left {len(self._unsent)} bytes unread")
        if self._unsent and self._clock() - self._took_s > MOST_STANDSTILL_S:
            raise HelperLostError(f"it read nothing for {MOST_STANDSTILL_S:.0f} s")

    def flush(self) -> None:
        """Sends what is left, as far as the helper takes it.

        Raises:
            OSError: It has ended.
        """
        while self._unsent:
            with memoryview(self._unsent) as view:
                sent = self._sent(view)
            if not sent:
                return
            self._took_s = self._clock()
            del self._unsent[:sent]

    def received(self) -> Iterator[ChainsMessage]:
        """Yields the messages in the next bytes that have come.

        Raises:
            BrokenMessageError: Something else came.
            HelperLostError: The helper has closed its end.
            OSError: It has ended.
        """
        try:
            content = self._stream.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not content:
            raise HelperLostError("it closed its end")
        for frame in self._frames.feed(content):
            yield chains_from(frame)

    def wait(self, deadline_s: float) -> bool:
        """Waits until something has come or there is room to send; false once the deadline has passed."""
        left_s = deadline_s - self._clock()
        if left_s <= 0:
            return False
        if self._stream.fileno() < MOST_SELECT_FILES:
            readable, writable, _ = select.select([self._stream], [self._stream] if self._unsent else [], [], left_s)
            return bool(readable or writable)
        poll = select.poll()
        poll.register(self._stream, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        return bool(poll.poll(left_s * 1e3))

    def close(self) -> None:
        """Closes the connection, which ends the helper."""
        self._stream.close()

    def _sent(self, content: bytes | memoryview) -> int:
        try:
            return self._stream.send(content)
        except BlockingIOError:
            return 0

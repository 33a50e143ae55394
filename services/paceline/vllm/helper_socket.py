"""The proposer's end of the socket to its helper: no call on it blocks beyond a time that the caller names."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator

from paceline.vllm.step_message import ChainsMessage, Frames, chains_from

# The answer of a large step; a helper that floods us costs no more than this at a call that does not wait.
READ_BYTES = 1 << 14
# A helper that starts on a busy machine may take some seconds.
MOST_STANDSTILL_S = 30.0
# select, whose time is exact, takes no higher number of a file.
MOST_SELECT_FILES = 1024


class HelperLostError(Exception):
    """The helper is gone, or is not to be trusted any more."""


class HelperSocket:
    """Sends what fits and keeps the rest; reads what has come.

    Args:
        stream: A connected socket; it is owned from now on.
        most_unread_bytes: A helper that leaves more unread counts as lost.
        most_answer_bytes: A longer message is none.
        clock: Monotonic seconds.
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
        # When the helper last took something, while something is left.
        self._took_s = 0.0

    @property
    def unsent_bytes(self) -> int:
        """What the helper has yet to take."""
        return len(self._unsent)

    def send(self, content: bytes) -> None:
        """Sends as much as the helper takes at once; the rest goes with later calls.

        Raises:
            HelperLostError: It has left too much unread, or has read nothing for 30 s.
            OSError: It is gone.
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
        """Sends on what is left, as far as the helper takes it.

        Raises:
            OSError: It is gone.
        """
        while self._unsent:
            with memoryview(self._unsent) as view:
                sent = self._sent(view)
            if not sent:
                return
            self._took_s = self._clock()
            del self._unsent[:sent]

    def received(self) -> Iterator[ChainsMessage]:
        """The messages in the next bytes that have come; none if there are no more.

        Raises:
            BrokenMessageError: Something else came.
            HelperLostError: The helper has closed its end.
            OSError: It is gone.
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
        """Waits until something has come, or there is room to send on; false once the deadline has passed.

        Args:
            deadline_s: Monotonic seconds.
        """
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
        """Ends the connection, which ends the helper."""
        self._stream.close()

    def _sent(self, content: bytes | memoryview) -> int:
        try:
            return self._stream.send(content)
        except BlockingIOError:
            return 0

"""The HTTP connections of clients: uvicorn's compiled protocol with bounds on their number and on what is not body.

uvicorn's parser takes in headers, chunk extensions and trailers without end, and waits for them for ever. Beyond its
own limit of connections it refuses whoever comes, so that idle ones without a key would keep health from answering.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline.gateway.http.errors import HttpError

# Head, trailers and the framing of chunks; a body in chunks of one byte brings five bytes of framing with each.
MAX_FRAMING_BYTES = 64 * 1024
FRAMING_PER_BODY_BYTE = 8
HEAD_TIMEOUT_S = 30.0
# Of a body whose request is answered already: most clients look at an answer only after sending everything.
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
# The same without a key: throwing away costs time, too.
MAX_KEYLESS_DISCARDED_BYTES = 256 * 1024
_HOLD = "paceline.hold"


class Connections:
    """The connections of a door, at most so many: one more closes the one that has been idle longest.

    Idle is what has no request under way that was let in: a request without a key makes nobody busy.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: set[BoundedConnection] = set()
        # In the order in which they came to be idle.
        self._idle: dict[BoundedConnection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: BoundedConnection) -> bool:
        """Makes room for a connection; False if all others are busy."""
        if len(self._all) >= self._limit:
            if not self._idle:
                return False
            eldest = next(iter(self._idle))
            self.remove(eldest)
            eldest.transport.abort()
        self._all.add(connection)
        self._idle[connection] = None
        return True

    def remove(self, connection: BoundedConnection) -> None:
        """Forgets a connection."""
        self._all.discard(connection)
        self._idle.pop(connection, None)

    def is_busy(self, connection: BoundedConnection) -> None:
        """A request of the connection was let in."""
        self._idle.pop(connection, None)

    def is_idle(self, connection: BoundedConnection) -> None:
        """The connection has nothing under way any more."""
        if connection in self._all:
            self._idle.pop(connection, None)
            self._idle[connection] = None


def hold_connection(scope: MutableMapping[str, Any]) -> None:
    """Keeps the connection of a request from being closed for others, until the request is answered."""
    hold = scope.get("state", {}).get(_HOLD)
    if hold is not None:
        hold()


class BoundedConnection(HttpToolsProtocol):
    """Refuses a request whose head is too long or comes too slowly, and closes the connection."""

    _num_framing_bytes = 0
    _num_discarded_bytes = 0
    _let_in = False
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, connections: Connections, **settings: Any) -> None:
        """Takes what uvicorn hands over, and the connections of the door."""
        super().__init__(*arguments, **settings)
        self._of_door = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts waiting for the first head."""
        super().connection_made(transport)
        if self._of_door.add(self):
            self._await_head()
        else:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "all connections have requests under way", "server_error")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        self._stop_waiting()
        self._of_door.remove(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """A request is answered; the next one, which may have come already, is let in or not by itself."""
        self._of_door.is_idle(self)
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Parses what has come, and counts what of it is no body."""
        self._num_framing_bytes += len(data)
        super().data_received(data)
        if self._num_framing_bytes > MAX_FRAMING_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"headers: take more than the limit of {MAX_FRAMING_BYTES} bytes",
            )

    def on_message_begin(self) -> None:
        """A request begins, maybe the next of its connection."""
        super().on_message_begin()
        self._num_discarded_bytes = 0
        self._let_in = False
        self.scope["state"][_HOLD] = self._hold
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """Its head is there; what follows has the body's own deadline."""
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of its body is there."""
        framing = self._num_framing_bytes - len(body) * (1 + FRAMING_PER_BODY_BYTE)
        # A long body earns no trailers without end.
        self._num_framing_bytes = max(framing, -MAX_FRAMING_BYTES)
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """It has come to its end; what is left of the data just read is not counted, which one read bounds."""
        self._num_framing_bytes = 0
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            # What came after the answer has ended uvicorn's own wait.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _hold(self) -> None:
        self._let_in = True
        self._of_door.is_busy(self)

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded_bytes += num_bytes
        if self._num_discarded_bytes > (MAX_DISCARDED_BYTES if self._let_in else MAX_KEYLESS_DISCARDED_BYTES):
            self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The head of a later request, maybe unread until this answer ends, which nothing may break off.
            self._await_head()
            return
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"headers: did not arrive within {HEAD_TIMEOUT_S:g} s")

    def _refuse(self, status: HTTPStatus, message: str, kind: str = "invalid_request_error") -> None:
        """Answers if no answer is under way, and closes."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = HttpError(status=status, type=kind, message=message, param="headers").to_bytes()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

"""The HTTP connections of clients: uvicorn's compiled protocol with bounds on number, on time, and on what is not body.

uvicorn's parser accepts headers, chunk extensions and trailers of any length, and waits for them without limit, as it
does for clients to read. Beyond its own limit of connections it refuses every new one, so that idle ones without a key
would block health checks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
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
# The same without a key, as discarding costs time, too.
MAX_KEYLESS_DISCARDED_BYTES = 256 * 1024
# A client that leaves more unread than the transport's high-water mark has to read so many bytes in this time:
# otherwise its answers would keep places, memory and KV pages from others.
SEND_TIMEOUT_S, MIN_READ_BYTES = 60.0, 32 * 1024
_CONNECTION = "paceline.connection"

_log = logging.getLogger(__name__)


class Connections:
    """The connections of a door, up to a limit: one more closes the one that has been idle longest.

    A connection is idle unless an admitted request is under way: a request without a key does not make it busy. The
    door admits fewer requests at once than this limit, so there is always an idle one.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: set[BoundedConnection] = set()
        # In the order in which they became idle.
        self._idle: dict[BoundedConnection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: BoundedConnection) -> None:
        """Makes room for a connection."""
        if len(self._all) >= self._limit:
            eldest = next(iter(self._idle))
            self.remove(eldest)
            eldest.transport.abort()
        self._all.add(connection)
        self._idle[connection] = None

    def remove(self, connection: BoundedConnection) -> None:
        """Forgets a connection."""
        self._all.discard(connection)
        self._idle.pop(connection, None)

    def is_busy(self, connection: BoundedConnection) -> None:
        """Notes that a request of the connection was admitted."""
        self._idle.pop(connection, None)

    def is_idle(self, connection: BoundedConnection) -> None:
        """Notes that the connection has nothing under way any more."""
        if connection in self._all:
            self._idle.pop(connection, None)
            self._idle[connection] = None


@contextmanager
def connection_held(scope: MutableMapping[str, Any]) -> Iterator[None]:
    """Keeps the connection of an admitted request from being closed for others while a block serves the request."""
    connection: BoundedConnection | None = scope.get("state", {}).get(_CONNECTION)
    if connection is None:
        yield
        return
    connection.hold()
    try:
        yield
    finally:
        connection.let_go()


class BoundedConnection(HttpToolsProtocol):
    """Refuses a request whose head is too long or comes too slowly, and drops a client that does not read."""

    _num_framing_bytes = 0
    _num_discarded_bytes = 0
    # Of the request whose body comes; those under way may be several, as a next one begins before the last has cleaned
    # up.
    _admitted = False
    _num_held = 0
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, connections: Connections, **settings: Any) -> None:
        """Takes uvicorn's arguments, and the connections of the door."""
        super().__init__(*arguments, **settings)
        self._of_door = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts waiting for the first head."""
        super().connection_made(transport)
        self._of_door.add(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        self._stop_waiting()
        self._stop_watching()
        self._of_door.remove(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Marks the connection idle; a next request, which may have arrived already, is admitted by itself."""
        if not self._num_held:
            self._of_door.is_idle(self)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """More waits for the client than it may leave unread: from now on it has to read."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        """The client has read nearly all."""
        self._stop_watching()
        super().resume_writing()

    def hold(self) -> None:
        """Notes that a request of the connection was admitted, and is under way."""
        self._admitted = True
        self._num_held += 1
        self._of_door.is_busy(self)

    def let_go(self) -> None:
        """Notes that it is not any more."""
        self._num_held -= 1
        if not self._num_held:
            self._of_door.is_idle(self)

    def data_received(self, data: bytes) -> None:
        """Parses data, and counts the bytes that belong to no body."""
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
        self._admitted = False
        self.scope["state"][_CONNECTION] = self
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """Its head is there; what follows has the body's own deadline."""
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of its body is there."""
        framing = self._num_framing_bytes - len(body) * (1 + FRAMING_PER_BODY_BYTE)
        # A long body must not allow endless trailers.
        self._num_framing_bytes = max(framing, -MAX_FRAMING_BYTES)
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Its end is there; the rest of the data just read, at most one read, is not counted."""
        self._num_framing_bytes = 0
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            # Data after the answer has ended uvicorn's own timer.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded_bytes += num_bytes
        if self._num_discarded_bytes > (MAX_DISCARDED_BYTES if self._admitted else MAX_KEYLESS_DISCARDED_BYTES):
            self.transport.close()

    def _watch_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(SEND_TIMEOUT_S, self._judge_reading, unread)

    def _judge_reading(self, unread_before: int) -> None:
        if self.transport.get_write_buffer_size() <= unread_before - MIN_READ_BYTES:
            self._watch_reading()
            return
        _log.info("a client does not read its answer", extra={"timeout_s": SEND_TIMEOUT_S})
        # Closing would wait for the client to read the rest. The answer under way ends as if the client had left.
        self.transport.abort()

    def _stop_watching(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The head of a later request, maybe unread until this answer ends: the answer must not be cut off.
            self._await_head()
            return
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"headers: did not arrive within {HEAD_TIMEOUT_S:g} s")

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answers if no answer is under way, and closes."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = HttpError(status=status, type="invalid_request_error", message=message, param="headers").to_bytes()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

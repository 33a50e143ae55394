"""One HTTP connection of a client: uvicorn's compiled protocol with bounds on what is not body.

uvicorn's parser takes in headers, chunk extensions and trailers without end, and waits for them for ever.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline.gateway.errors import HttpError

# Head, trailers and the framing of chunks; a body in chunks of one byte brings five bytes of framing with each.
MAX_FRAMING_BYTES = 64 * 1024
FRAMING_PER_BODY_BYTE = 8
HEAD_TIMEOUT_S = 30.0


class BoundedConnection(HttpToolsProtocol):
    """Refuses a request whose head is too long or comes too slowly, and closes the connection."""

    _num_framing_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts waiting for the first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

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
        super().on_body(body)

    def on_message_complete(self) -> None:
        """It has come to its end; what is left of the data just read is not counted, which one read bounds."""
        self._num_framing_bytes = 0
        super().on_message_complete()

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

"""The HTTP connections of clients: uvicorn's compiled protocol with bounds on number, on time, and on what is not body.

uvicorn's parser accepts headers, chunk extensions and trailers of any length, and waits for them without limit, as it
does for clients to read. Beyond its own limit of connections it refuses every new one, so that idle ones without a key
would block health checks. It skips the body of a request that offers another protocol, takes a request without a host,
and sends chunks to clients of HTTP/1.0.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from http import HTTPStatus
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from paceline.gateway.http.errors import HttpError
from paceline.service.fair_shares import EvictingLimit

# Head, trailers and the framing of chunks; a body in chunks of one byte brings five bytes of framing with each.
MAX_FRAMING_BYTES = 64 * 1024
FRAMING_PER_BODY_BYTE = 8
HEAD_TIMEOUT_S = 30.0
# Bytes discarded of a body whose request is answered: most clients look at an answer only after sending everything.
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
# A client that leaves more unread than the transport's high-water mark has to read so many bytes in this time:
# otherwise its answers would keep places, memory and KV pages from others.
SEND_TIMEOUT_S, MIN_READ_BYTES = 60.0, 32 * 1024

# Extension of ASGI: what writes a part of an answer without waiting, where it is a stream whose client keeps up.
WRITE_NOW, WRITE = "paceline.write_now", "write"

_log = logging.getLogger(__name__)


class BoundedConnection(HttpToolsProtocol):
    """Refuses a request whose head is too long or comes too slowly, and drops a client that does not read."""

    _num_framing_bytes = 0
    _num_discarded_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, connections: EvictingLimit[BoundedConnection], **settings: Any) -> None:
        """Takes uvicorn's arguments, and the connections of the door.

        The door admits fewer requests at once than connections, so there is nearly always an idle one to end: 800 that
        never sent a request kept health checks from a gateway without it.
        """
        super().__init__(*arguments, **settings)
        self._of_door = connections

    @property
    def is_idle(self) -> bool:
        """Whether no answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    def end(self) -> None:
        """Makes room for another connection."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts waiting for the first head."""
        super().connection_made(transport)
        self._of_door.add(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        self._of_door.remove(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._of_door.note_use(self)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """More waits for the client than it may leave unread: from now on it has to read."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        """The client has read nearly all."""
        self._stop_watching()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parses data, and counts the bytes that belong to no body."""
        self._unset_keepalive_if_required()
        self._num_framing_bytes += len(data)
        try:
            self._parse(memoryview(data))
        except HttpParserError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"headers: are not HTTP: {error.__context__ or error}")
        if self._num_framing_bytes > MAX_FRAMING_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"headers: take more than the limit of {MAX_FRAMING_BYTES} bytes",
            )

    def _parse(self, data: memoryview) -> None:
        """Parses data; who offers another protocol, as Java's client does with `Upgrade: h2c`, is served in this one.

        The parser takes what follows such a head for the other protocol. So it gets the head anew, without the offer.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    raise HttpParserError("this is no proxy") from None
                head, data = self._head_without_offer(), data[offer.args[0] :]
                # The old parser is done where the connection ends with this answer.
                self.parser = HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def on_message_begin(self) -> None:
        """A request begins, maybe the next of its connection."""
        super().on_message_begin()
        self._num_discarded_bytes = 0
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """Its head is there; what follows has the body's own deadline."""
        if self.parser.should_upgrade():
            return
        self._stop_waiting()
        is_old = self.parser.get_http_version() == "1.0"
        if sum(name == b"host" for name, _ in self.headers) != 1 and not is_old:
            raise HttpParserError("a request needs one Host")
        self.expect_100_continue &= not is_old
        super().on_headers_complete()
        self.scope["extensions"] = {WRITE_NOW: {WRITE: partial(_write_now, self.cycle)}}
        if is_old:
            _end_by_closing(self.cycle)

    def on_body(self, body: bytes) -> None:
        """A piece of its body is there."""
        framing = self._num_framing_bytes - len(body) * (1 + FRAMING_PER_BODY_BYTE)
        # A long body must not allow endless trailers.
        self._num_framing_bytes = max(framing, -MAX_FRAMING_BYTES)
        if self.cycle.response_complete:
            self._num_discarded_bytes += len(body)
            if self._num_discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Its end is there; the rest of the data just read, at most one read, is not counted."""
        if not self.parser.should_upgrade():
            self._num_framing_bytes = 0
            super().on_message_complete()
            if self.cycle.response_complete and not self.transport.is_closing():
                # Data after the answer has ended uvicorn's own timer.
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

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
        if not self.is_idle:
            # The head of a later request, maybe unread until this answer ends: the answer must not be cut off.
            self._await_head()
            return
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"headers: did not arrive within {HEAD_TIMEOUT_S:g} s")

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answers if no answer is under way, and closes."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.is_idle or not self.cycle.response_started:
            body = HttpError(status=status, type="invalid_request_error", message=message, param="headers").to_bytes()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()


def _write_now(cycle: RequestResponseCycle, part: bytes) -> bool:
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
    return True


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """Ends an answer by closing the connection, as HTTP/1.0 knows no chunks (RFC 9112, 6.1)."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_plain(message: Any) -> None:
        # Any body has its expected length.
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]

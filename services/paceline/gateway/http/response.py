"""A running HTTP response, as raw ASGI: status before the first byte, server-sent events, errors after it.

It knows no request and no answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send

from paceline.gateway.http.errors import ClientStalledError, HttpError, to_http
from paceline.service.outbox import Outbox

REQUEST_ID = "x-request-id"
IGNORED_FIELDS = "x-paceline-ignored-fields"
IGNORED_TOOLS = "x-paceline-ignored-tools"
LAST_EVENT_ID = "Last-Event-ID"
MAX_REQUEST_ID_CHARACTERS = 128
DONE = b"data: [DONE]\n\n"
JSON_HEADERS = {"content-type": "application/json"}
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

# Other streams get the event loop after so long, in the middle of an answer. The third audit waited 5 s for one of
# 400,000 log probabilities.
SLICE_S = 0.005
# Entries of an iterator that are written at once: with 20 alternatives each, 2 ms.
ENTRIES_AT_ONCE = 32
# Bytes of each session of a stream that may wait for a client which does not read.
CLIENT_BYTES = 16 * 1024 * 1024
# Assumed size of an event's unmade part: how much of it is made at once depends on the machine.
REST_BYTES = 64 * 1024
UNREAD = "the client does not read its tokens"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
# Broken text of a request, which is not UTF-8; and what some clients take for the end of a line of a stream.
_UNFIT = re.compile("[\ud800-\udfff\x85\u2028\u2029]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorForm:
    """How an API reports errors, and names requests and events.

    Attributes:
        shape: Makes the error object, of the error and the name of the request.
        named: Whether the events of a stream have their types as names, and the last one ends it.
        id_headers: Headers that hold the name of the request.
        ping: Bytes that a stream sends while it is silent.
    """

    shape: Callable[[HttpError, str], Any] = lambda error, _: error.to_json()
    named: bool = False
    id_headers: Sequence[str] = (REQUEST_ID,)
    ping: bytes = b": ping\n\n"


OPENAI_ERRORS = ErrorForm()


class Exchange:
    """A running response: knows whether it has begun.

    Events of a stream are written in the turn of the event loop in which their tokens come, and no task is woken for
    them. They wait while the client is behind; then a task sends them.

    Attributes:
        own_id: Our name of the request; empty: none.
        num_sessions: Sessions of the request; as many times `CLIENT_BYTES` may wait for the client.
        headers: Sent with whatever it begins with.
    """

    def __init__(
        self,
        send: Send,
        on_error: Callable[[Exception], None] = lambda _: None,
        *,
        given_id: str = "",
        own_id: str = "",
        form: ErrorForm = OPENAI_ERRORS,
        write_now: Callable[[bytes], bool] = lambda _: False,
        ping_s: float = 0.0,
    ) -> None:
        """Sends nothing yet.

        Args:
            on_error: Called with the error that ends the response.
            given_id: The client's name of the request; empty: none.
            own_id: Ours, used if the client gives none.
            form: How the API reports errors and names events.
            write_now: Writes a part of a stream without waiting; False: it did not.
            ping_s: Longest silence of a stream; 0: any.
        """
        self._send = send
        self._write_now = write_now
        # Parts of a stream that wait, each with what is yet to be made of it.
        self._unsent: Outbox[tuple[bytes, Iterator[bytes] | None]] = Outbox(CLIENT_BYTES)
        self._sending: asyncio.Task[None] | None = None
        self._on_error = on_error
        self._ping_s = ping_s
        self._pinging: asyncio.TimerHandle | None = None
        # When a part of a stream last came; monotonic seconds.
        self._written_s = 0.0
        self._begun = False
        self._given_id = given_id
        self._form = form
        self.own_id = own_id
        self.num_sessions = 1
        self.headers: dict[str, str] = {}

    async def begin(self, status: int, headers: dict[str, str]) -> None:
        self._begun = True
        headers = headers | self.headers
        if self._request_id:
            headers |= dict.fromkeys(self._form.id_headers, self._request_id)
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, body: bytes, *, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def whole(self, answer: Any) -> None:
        """Sends an answer in one piece."""
        rest = _json_parts(answer)
        made = [_some(rest)]
        for pending in rest:
            await asyncio.sleep(0)
            made.append(pending + _some(rest))
        await self.begin(200, {**JSON_HEADERS, "content-length": str(sum(map(len, made)))})
        for part in made:
            await self.write(part)
        await self.write(b"", last=True)

    def ping_while_silent(self) -> None:
        """The answer is a stream: from now on silence is filled, or proxies would end it.

        Until then nothing is sent, its head neither, so that a refusal has its own status.
        """
        if self._ping_s:
            self._written_s = time.monotonic()
            self._look_for_silence()

    def _look_for_silence(self) -> None:
        if self._written_s + self._ping_s <= time.monotonic() and (self._sending is None or self._sending.done()):
            # Its errors are those of the next event.
            with suppress(Exception):
                self._put(self._form.ping)
        left_s = max(self._written_s + self._ping_s - time.monotonic(), SLICE_S)
        self._pinging = asyncio.get_running_loop().call_later(left_s, self._look_for_silence)

    def _stop_pinging(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()

    def event(self, data: Any, event_id: object = None) -> None:
        """Adds a server-sent event to a stream, with an id if it has one; an iterator in its data is a list.

        Raises:
            ClientStalledError: The client does not read.
            ClientDisconnect: It has left.
        """
        named = f"event: {data['type']}\n".encode() if self._form.named else b""
        rest = chain([_id_line(event_id) + named + b"data: "], _json_parts(data), [b"\n\n"])
        part, pending = _some(rest), next(rest, None)
        self._put(part, None if pending is None else chain([pending], rest))

    def json_event(self, data: bytes, event_id: object = None) -> None:
        """Adds an event without a name whose data is JSON already; see `event`."""
        self._put(b"".join((_id_line(event_id), b"data: ", data, b"\n\n")))

    def _put(self, part: bytes, rest: Iterator[bytes] | None = None) -> None:
        self._written_s = time.monotonic()
        if self._sending is not None and self._sending.done():
            if self._sending.cancelled():
                # Its own error would end the writer, and with it the streams of others.
                raise ClientDisconnect
            # Raises what it has failed with.
            self._sending.result()
            self._sending = None
        if self._sending is None and rest is None and self._write_now(part):
            return
        self._unsent.waiting.most_bytes = CLIENT_BYTES * self.num_sessions
        try:
            self._unsent.put([((part, rest), len(part) + (0 if rest is None else REST_BYTES))])
        except asyncio.QueueFull:
            self._unsent.clear()
            raise ClientStalledError(UNREAD) from None
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_waiting(), name="answer")

    async def _send_waiting(self) -> None:
        """Sends what waits, as fast as the client reads."""
        while self._unsent:
            part, rest = self._unsent.take()
            if not self._begun:
                await self.begin(200, STREAM_HEADERS)
            await self.write(part)
            while rest is not None and (pending := next(rest, None)) is not None:
                await asyncio.sleep(0)
                await self.write(pending + _some(rest))

    async def flushed(self) -> None:
        """Returns when nothing waits for the client any more."""
        if self._sending is not None:
            await self._sending

    async def end(self, last: bytes = b"") -> None:
        """Ends a stream; one without events has a head alone."""
        self._stop_pinging()
        await self.flushed()
        if not self._begun:
            await self.begin(200, STREAM_HEADERS)
        await self.write(last, last=True)

    def close(self) -> None:
        """Nothing more is sent; what waits is dropped."""
        self._stop_pinging()
        if self._sending is not None:
            self._sending.cancel()

    async def fail(self, error: Exception) -> None:
        """Reports an error to the client: by status before the first byte, by an event after it."""
        self._on_error(error)
        self._stop_pinging()
        if self._sending is not None:
            await asyncio.wait([self._sending])
        told = to_http(error, self._request_id)
        # Escapes keep broken text of the request out of the answer.
        body = json.dumps(self._form.shape(told, self._request_id)).encode()
        if self._begun:
            event = b"data: " + body + b"\n\n"
            await self.write(b"event: error\n" + event if self._form.named else event + DONE, last=True)
            return
        await self.begin(told.status, {**JSON_HEADERS, **told.headers(), "content-length": str(len(body))})
        await self.write(body, last=True)

    @property
    def _request_id(self) -> str:
        return self._given_id or self.own_id


def request_id(headers: Headers) -> str:
    """Returns the client's name of a request; empty: none, or none that is fit for a header or a log."""
    given = headers.get(REQUEST_ID, "")
    return given if given.isascii() and given.isprintable() and len(given) <= MAX_REQUEST_ID_CHARACTERS else ""


def _id_line(event_id: object) -> bytes:
    return b"" if event_id is None else f"id: {event_id}\n".encode()


def _json_parts(value: Any) -> Iterator[bytes]:
    """Returns the JSON of a value in parts, which are made as they are taken; an iterator in it is a list."""
    try:
        return iter((to_json(value),))
    except TypeError:
        # An iterator is no JSON, and none was begun.
        return map(_encoded, _texts(value))


def _some(parts: Iterator[bytes]) -> bytes:
    """Joins the next parts, as many as are made before it is another stream's turn."""
    made: list[bytes] = []
    until_s = time.monotonic() + SLICE_S
    for part in parts:
        made.append(part)
        if time.monotonic() > until_s:
            break
    return b"".join(made)


def _texts(value: Any) -> Iterator[str]:
    """Yields the JSON of a value that holds iterators, some entries at a time."""
    if isinstance(value, Iterator):
        opening = "["
        while entries := list(islice(value, ENTRIES_AT_ONCE)):
            yield opening + _ENCODER.encode(entries)[1:-1]
            opening = ","
        yield "[]" if opening == "[" else "]"
    elif isinstance(value, dict) and value:
        for at, (name, each) in enumerate(value.items()):
            yield f"{',' if at else '{'}{_ENCODER.encode(name)}:"
            yield from _texts(each)
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for at, each in enumerate(value):
            yield "," if at else "["
            yield from _texts(each)
        yield "]"
    else:
        yield _ENCODER.encode(value)


def to_json(value: Any) -> bytes:
    """Returns a value as JSON without spaces; nearly all characters stand for themselves, so texts do not grow."""
    return _encoded(_ENCODER.encode(value))


def _encoded(text: str) -> bytes:
    return (text if text.isascii() else _UNFIT.sub(_escaped, text)).encode()


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end, or until the HTTP client has left; waits for its cleanup and raises what that raises."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue

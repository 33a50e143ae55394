"""Streams completions over HTTP from any of several gateways, and goes on at another one when a stream breaks off.

Gateways name events of a stream by an `id:` line; `Last-Event-ID` with the last one brings what follows, at any
gateway. A session that nobody knows any more begins anew with the same seed, and what is known of it is passed over.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from paceline.core.errors import OverloadedError, PacelineError, SessionNotFoundError, UnavailableError

PATH = "/v1/completions"
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
CONNECT_S = 3.0
# Gateways name events where they are asked to: widely used clients take every line of a stream for data.
_STREAMED = {"stream": True, "stream_options": {"include_event_ids": True}}


class RefusedError(PacelineError):
    """A gateway refuses the request, as any other would."""


@dataclass(slots=True)
class _Progress:
    """What a client has of one completion."""

    last_id: str = ""
    num_chars: int = 0
    # What a stream that begins anew is yet to send again.
    skip_chars: int = 0

    def begin_anew(self) -> None:
        self.last_id = ""
        self.skip_chars = self.num_chars

    def take(self, text: str) -> str:
        """Returns what is new of a piece."""
        new = text[self.skip_chars :]
        self.skip_chars -= len(text) - len(new)
        self.num_chars += len(new)
        return new


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """New text of a completion, and why it ended if it has."""

    text: str
    finish_reason: str = ""


class ResumingHttpClient:
    """Calls gateways; an async context manager.

    Args:
        urls: Of gateways, `http://host:port`.
        patience_s: How long to go on trying without new text, in seconds.
        silence_s: Longest wait for the next event of a stream, in seconds.
        clock: Monotonic seconds.
        chance: Spreads the tries of many clients.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        patience_s: float = 60.0,
        silence_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        self._urls = list(urls)
        self._turns = itertools.count()
        self._patience_s = patience_s
        self._clock = clock
        self._chance = random.Random() if chance is None else chance
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def __aenter__(self) -> ResumingHttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def stream(
        self, body: dict[str, Any], on_resume: Callable[[str], None] = lambda _: None
    ) -> AsyncGenerator[TextPiece, None]:
        """Yields the pieces of a completion of one choice, its finish reason in the last.

        Args:
            body: With a seed, and the rule coupled: a lost session begins anew, and must bring the same text.
            on_resume: Told why a stream that had begun is asked to go on.

        Raises:
            OverloadedError: No gateway has a place for a new session now; says when to come again.
            RefusedError: A gateway refused the request.
            UnavailableError: No gateway brought new text for `patience_s` seconds.
        """
        progress = _Progress()
        until_s = self._clock() + self._patience_s
        pause_s = FIRST_PAUSE_S
        for turn in itertools.count(next(self._turns)):
            try:
                async with aclosing(self._attempt(body, progress, turn)) as pieces:
                    async for piece in pieces:
                        until_s, pause_s = self._clock() + self._patience_s, FIRST_PAUSE_S
                        yield piece
                return
            except SessionNotFoundError as error:
                progress.begin_anew()
                on_resume(str(error))
            except (OverloadedError, UnavailableError) as error:
                overloaded = isinstance(error, OverloadedError)
                begun = bool(progress.last_id or progress.num_chars)
                if overloaded and not begun:
                    raise
                if self._clock() >= until_s:
                    raise UnavailableError(f"no gateway has brought text in time; the last said: {error}") from error
                if not progress.last_id:
                    progress.begin_anew()
                if begun:
                    on_resume(str(error))
                pause_s = max(pause_s, error.retry_after_s) if isinstance(error, OverloadedError) else pause_s
            # Clients that lost the same gateway must not all come back at the same moment.
            await asyncio.sleep(pause_s * self._chance.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _attempt(self, body: dict[str, Any], progress: _Progress, turn: int) -> AsyncGenerator[TextPiece, None]:
        """Yields what one gateway has to say."""
        headers = {"Last-Event-ID": progress.last_id} if progress.last_id else {}
        url = self._urls[turn % len(self._urls)] + PATH
        try:
            async with self._http.post(url, json={**body, **_STREAMED}, headers=headers) as response:
                await _check(response)
                async for event_id, data in _events(response.content):
                    piece = _piece(data, progress)
                    # What has an id has been taken in; asked for what follows, nobody sends it again.
                    progress.last_id = event_id or progress.last_id
                    if piece is not None:
                        yield piece
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise UnavailableError(f"{url}: {type(error).__name__}: {error}") from error


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raises what a status other than 200 says."""
    if response.status == HTTPStatus.OK:
        return
    said = await response.text(errors="replace")
    try:
        raise _error(json.loads(said)["error"], float(response.headers.get("Retry-After", 1)))
    except (ValueError, LookupError, TypeError):
        raise UnavailableError(f"{response.status}: {said}") from None


def _error(error: dict[str, Any], retry_after_s: float) -> PacelineError:
    """Returns what an error object of a gateway means: whether it is worth another try."""
    said = json.dumps(error)
    match error["code"]:
        case "overloaded":
            return OverloadedError(said, retry_after_s=retry_after_s)
        case "unavailable" | "session_taken_over":
            return UnavailableError(said)
        case "session_not_found":
            return SessionNotFoundError(said)
        case _:
            return RefusedError(said)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, str]]:
    """Yields ids and data of server-sent events up to the last one.

    Raises:
        UnavailableError: The stream ended before.
    """
    event_id = ""
    async for raw in content:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("id:"):
            event_id = line[3:].strip()
        elif line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield event_id, data
        elif not line:
            event_id = ""
    raise UnavailableError("the gateway ended the stream in the middle")


def _piece(data: str, progress: _Progress) -> TextPiece | None:
    """Reads an event; None if it brings nothing new.

    Raises:
        PacelineError: It says that the stream has failed.
    """
    event = json.loads(data)
    if "error" in event:
        raise _error(event["error"], retry_after_s=1.0)
    if not event.get("choices"):
        return None
    [choice] = event["choices"]
    text, reason = progress.take(choice["text"]), choice["finish_reason"] or ""
    return TextPiece(text=text, finish_reason=reason) if text or reason else None

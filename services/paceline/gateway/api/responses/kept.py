"""Keeps responses in the store for a time, so that later requests at any gateway can continue them.

They are written in the background, never on the path of tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paceline.core.errors import InvalidRequestError, OverloadedError, SessionNotFoundError, UnavailableError
from paceline.gateway.api.endpoints.endpoint import MAX_INLINE_BYTES, Workers
from paceline.gateway.http.response import to_json
from paceline.gateway.sessions.take_over import Resumption
from paceline.service.fair_shares import Lease, Shares, current_caller
from paceline.store.base import EPOCHS_PER_OWNER, FINAL, Document, Keeping, Store

Json = dict[str, Any]

IN_PROGRESS, INCOMPLETE, FAILED, CANCELLED = "in_progress", "incomplete", "failed", "cancelled"
# Why a response is incomplete: its client or its gateway left. It can still be streamed to its end for a while.
INTERRUPTED = "interrupted"
# Request fields that a response repeats, and that may make it long.
ECHOED = ("instructions", "metadata", "text", "tool_choice", "tools")
# The part of the room for all responses that one may take with its request.
LARGEST_PART = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """A response as it is kept.

    Attributes:
        api_key: Name of the key of its request; empty without keys.
        response: As clients see it.
        messages: The conversation before it, without instructions.
        request: The fixed part as written: messages, and the fields that `ECHOED` names.
        rank: See `running_rank`.
    """

    api_key: str
    response: Json
    messages: Sequence[Json]
    request: bytes = field(repr=False)
    rank: int

    @property
    def response_id(self) -> str:
        return str(self.response["id"])

    @property
    def name(self) -> tuple[str, str]:
        return self.api_key, self.response_id

    @property
    def session_id(self) -> str:
        return f"{self.response_id}-0"

    @property
    def in_progress(self) -> bool:
        """Whether it says that a gateway runs it."""
        return bool(self.response["status"] == IN_PROGRESS)

    @property
    def final(self) -> bool:
        """Whether nothing about it will change; otherwise its session may be run to its end, if it is still known."""
        return self.rank == FINAL

    @property
    def size(self) -> int:
        """About how many bytes it has when it is written."""
        return len(self.request) + sum(map(_num_characters, self.response["output"]))

    def document(self) -> Document:
        rest = {**self.response, **dict.fromkeys(ECHOED)}
        body = b"\n".join((self.request, to_json(rest)))
        return Document(keeper=self.api_key, name=self.response_id, body=body, rank=self.rank)

    @classmethod
    def from_document(cls, document: Document) -> KeptResponse:
        """Reads what `document` has written.

        Raises:
            ValueError: It has not.
            LookupError: It has not.
        """
        request, rest = document.body.split(b"\n")
        fixed = json.loads(request)
        response = {**json.loads(rest), **{name: fixed[name] for name in ECHOED}}
        return cls(
            api_key=document.keeper,
            response=response,
            messages=fixed["messages"],
            request=request,
            rank=document.rank,
        )


def running_rank(epoch: int) -> int:
    """Returns the rank of a response whose session runs under an epoch; one that broke off there has one more.

    So a gateway that lost the session to another writes nothing over what that one has written.
    """
    return 2 * (epoch // EPOCHS_PER_OWNER)


def as_written(messages: Sequence[Json], echoed: Mapping[str, Any], room_bytes: int) -> bytes:
    """Returns what is kept of a request.

    Args:
        messages: The conversation, without instructions.
        echoed: Request fields that the response repeats.
        room_bytes: For all kept responses.

    Raises:
        InvalidRequestError: It is too long to be kept.
    """
    written = to_json({**echoed, "messages": messages})
    most = room_bytes // LARGEST_PART
    if len(written) > most:
        raise InvalidRequestError(
            "store", f"must be false: the conversation has {len(written)} bytes, and at most {most} are kept"
        )
    return written


def interrupted() -> Json:
    """Returns the fields of a response whose client or gateway has left."""
    return {"status": INCOMPLETE, "incomplete_details": {"reason": INTERRUPTED}}


def _num_characters(item: Json) -> int:
    texts = (each.get("text", "") for each in item.get("content", ()))
    return len(item.get("arguments", "")) + sum(map(len, texts))


# A store that failed is left alone for this long.
REST_S = 5.0
# The end of a response waits so long to be written, while the store is well: so any gateway can continue it at once.
END_WAIT_S = 0.25
MAX_WAITING_BYTES = 32 * 1024 * 1024
# Cost of a waiting response beside its texts.
_OVERHEAD_BYTES = 4096

# Ids that gateways make; the store is not asked for others.
_ID = re.compile(r"resp_[0-9a-f]{32}")

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A response that is not written yet, and its place among what waits."""

    kept: KeptResponse
    held: Lease
    over: asyncio.Event = field(default_factory=asyncio.Event)


class ResponseShelf:
    """Where responses are kept; they are written without being waited for.

    Args:
        store: Keeps them as documents.
        resumption: Knows which sessions run.
        workers: Read long ones.
        ttl_s: Life of a response after its last change, in seconds.
        room_bytes: Room in the store for all responses of all keys.
    """

    def __init__(
        self, store: Store, resumption: Resumption, workers: Workers, *, ttl_s: float, room_bytes: int
    ) -> None:
        self.room_bytes = room_bytes
        self._ttl_s = ttl_s
        self._store = store
        self._resumption = resumption
        self._workers = workers
        self._room = Shares(MAX_WAITING_BYTES, "bytes of responses that wait to be kept")
        # By names of responses: what is not written yet.
        self._waiting: dict[tuple[str, str], _Waiting] = {}
        # Responses that run here, and whether they were written before: deleted ones then do not come back.
        self._running: dict[tuple[str, str], bool] = {}
        self._came = asyncio.Event()
        self._failing = False

    def put(self, kept: KeptResponse, *, replaces: bool = False) -> None:
        """Writes a response soon, in place of what waits of it; not the end of one that does not run here any more.

        Args:
            kept: As it is now; if it is in progress, it counts as run here until its next state.
            replaces: Whether it was read from the store.
        """
        if kept.name not in self._running and not kept.in_progress:
            # Its call ends a moment after it was cancelled.
            return
        known = self._running.get(kept.name, replaces)
        self._drop(kept)
        try:
            held = self._room.take(kept.size + _OVERHEAD_BYTES, current_caller())
        except OverloadedError as error:
            _log.warning("a response is not kept", extra={"response_id": kept.response_id, "error": error})
            if not kept.in_progress:
                self._running.pop(kept.name, None)
            return
        self._running[kept.name] = known
        self._waiting[kept.name] = _Waiting(kept, held)
        self._came.set()

    def leave(self, kept: KeptResponse) -> None:
        """Writes no more of a response: it goes on elsewhere, or has ended."""
        self._drop(kept)
        self._running.pop(kept.name, None)

    async def written(self, kept: KeptResponse) -> None:
        """Returns when a response is written; soon in any case, and at once while the store does not answer."""
        entry = self._waiting.get(kept.name)
        if entry is None or self._failing:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(END_WAIT_S):
                await entry.over.wait()

    async def keep_writing(self) -> None:
        """Writes without end what comes, at once."""
        while True:
            await self._came.wait()
            self._came.clear()
            await self.flush()
            if self._failing:
                await asyncio.sleep(REST_S)
                self._came.set()

    async def flush(self) -> None:
        """Writes all that waits; what cannot be written now is written later."""
        try:
            while self._waiting:
                await self._write(next(iter(self._waiting.values())))
        except UnavailableError as error:
            if not self._failing:
                _log.warning("responses are not kept", extra={"error": error})
            self._failing = True
            for entry in self._waiting.values():
                entry.over.set()

    async def end(self, kept: KeptResponse) -> bool:
        """Writes a final response now.

        Returns:
            False if it has ended otherwise by now, or is deleted.

        Raises:
            UnavailableError: The store does not answer.
        """
        outcome = await self._keep(kept)
        self.leave(kept)
        return outcome is Keeping.DONE

    async def find(self, response_id: str, api_key: str, field: str = "response_id") -> KeptResponse:
        """Returns a response; one that nobody runs any more is incomplete.

        Raises:
            SessionNotFoundError: There is none for this key.
            UnavailableError: The store does not answer.
            OverloadedError: It is long, and too many requests are being read.
        """
        kept = await self._find(response_id, api_key)
        if kept is None:
            raise SessionNotFoundError(f"{field}: {response_id[:80]!r} is not known; it is not kept, or no longer")
        if not kept.in_progress or kept.name in self._running or await self._resumption.runs(kept.session_id, api_key):
            return kept
        return replace(kept, response={**kept.response, **interrupted()})

    async def forget(self, response_id: str, api_key: str) -> None:
        """Deletes a response; if it runs here, its end is not written either.

        Raises:
            SessionNotFoundError: There is none for this key.
            UnavailableError: The store does not answer.
        """
        kept = await self.find(response_id, api_key)
        self._drop(kept)
        if kept.name in self._running:
            self._running[kept.name] = True
        await self._store.forget(api_key, response_id)

    async def _write(self, entry: _Waiting) -> None:
        kept = entry.kept
        outcome = await self._keep(kept, replaces=self._running.get(kept.name, False))
        self._failing = False
        if outcome is Keeping.TOO_LARGE:
            _log.warning("a response is not kept, it is too large", extra={"response_id": kept.response_id})
        going_on = outcome is Keeping.DONE and kept.in_progress
        if self._waiting.get(kept.name) is entry:
            self._drop(kept)
            if not going_on:
                self._running.pop(kept.name, None)
        if going_on and kept.name in self._running:
            self._running[kept.name] = True

    async def _keep(self, kept: KeptResponse, *, replaces: bool = False) -> Keeping:
        document = kept.document() if kept.size <= MAX_INLINE_BYTES else await asyncio.to_thread(kept.document)
        return await self._store.keep(document, ttl_s=self._ttl_s, room_bytes=self.room_bytes, replaces=replaces)

    def _drop(self, kept: KeptResponse) -> None:
        entry = self._waiting.pop(kept.name, None)
        if entry is not None:
            entry.held.release()
            entry.over.set()

    async def _find(self, response_id: str, api_key: str) -> KeptResponse | None:
        if _ID.fullmatch(response_id) is None:
            return None
        if (waiting := self._waiting.get((api_key, response_id))) is not None:
            return waiting.kept
        document = await self._store.kept(api_key, response_id)
        if document is None:
            return None
        try:
            return await self._workers.run(
                partial(KeptResponse.from_document, document), small=len(document.body) <= MAX_INLINE_BYTES
            )
        except (ValueError, LookupError, TypeError):
            _log.warning("a kept response cannot be read", extra={"response_id": response_id})
            return None

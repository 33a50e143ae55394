"""Writes kept responses to the store in the background, never on the path of tokens.

Only the newest state of a response waits. A store that does not answer is left alone for a while; what waits meanwhile
has a bound that callers share. While responses run here, the store shows that somebody works on them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from paceline.core.errors import OverloadedError, UnavailableError
from paceline.gateway.access.fair_shares import Held, Shares, current_caller
from paceline.gateway.api.endpoints.reading import MAX_INLINE_BYTES
from paceline.gateway.api.responses.kept import KeptResponse
from paceline.store.documents import Documents, Keeping

# A response counts as run for this long after its gateway last said so, and it says so this often.
WORK_S, RENEWAL_S = 30.0, 10.0
# A store that failed is left alone for this long.
REST_S = 5.0
# The end of a response waits so long to be written, while the store is well: so any gateway can continue it at once.
END_WAIT_S = 0.25
MAX_WAITING_BYTES = 32 * 1024 * 1024
# What a response that waits costs beside its texts.
_OVERHEAD_BYTES = 4096

_Name = tuple[str, str]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A response that is not written yet, and its place among what waits."""

    kept: KeptResponse
    held: Held
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        """It is written, or nobody should wait for it."""
        self.held.release()
        self.over.set()


class KeepingWriter:
    """Writes without being waited for.

    Args:
        documents: Of the store.
        keep: Writes one, `documents.keep` with its limits.
    """

    def __init__(self, documents: Documents, keep: Callable[..., Awaitable[Keeping]]) -> None:
        self._documents = documents
        self._keep = keep
        self._room = Shares(MAX_WAITING_BYTES, "bytes of responses that wait to be kept")
        self._waiting: dict[_Name, _Waiting] = {}
        # Those that run here, and whether they were written before: then what is deleted does not come back.
        self._running: dict[_Name, bool] = {}
        self._came = asyncio.Event()
        self._failing = False

    def put(self, kept: KeptResponse, *, replaces: bool = False) -> None:
        """Writes a response soon, in place of what waits of it; not the end of one that does not run here any more.

        Args:
            kept: As it is now; if it is `at_work`, it counts as run here until its next state.
            replaces: Whether it was read from the store.
        """
        name = kept.api_key, kept.response_id
        if name not in self._running and not kept.at_work:
            # Its call ends a moment after it was cancelled.
            return
        known = self._running.get(name, replaces)
        self._drop(name)
        try:
            held = self._room.take(kept.size + _OVERHEAD_BYTES, current_caller())
        except OverloadedError as error:
            _log.warning("a response is not kept", extra={"response_id": kept.response_id, "error": error})
            if not kept.at_work:
                self._running.pop(name, None)
            return
        self._running[name] = known
        self._waiting[name] = _Waiting(kept, held)
        self._came.set()

    def waiting(self, api_key: str, response_id: str) -> KeptResponse | None:
        """Returns a response that is not written yet."""
        entry = self._waiting.get((api_key, response_id))
        return None if entry is None else entry.kept

    def leave(self, kept: KeptResponse) -> None:
        """Writes no more of a response: it goes on elsewhere, or has ended."""
        name = kept.api_key, kept.response_id
        self._drop(name)
        self._running.pop(name, None)

    def forget(self, kept: KeptResponse) -> None:
        """A response is being deleted; if it runs here, its end is not written either."""
        name = kept.api_key, kept.response_id
        self._drop(name)
        if name in self._running:
            self._running[name] = True

    async def written(self, kept: KeptResponse) -> None:
        """Returns when a response is written; soon in any case, and at once while the store does not answer."""
        entry = self._waiting.get((kept.api_key, kept.response_id))
        if entry is None or self._failing:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(END_WAIT_S):
                await entry.over.wait()

    async def keep_writing(self) -> None:
        """Writes without end: what comes at once, and regularly that responses are run."""
        loop = asyncio.get_running_loop()
        renew_s = loop.time() + RENEWAL_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(renew_s):
                    await self._came.wait()
            self._came.clear()
            await self.flush()
            if loop.time() >= renew_s:
                await self._trying(self._renew)
                renew_s = loop.time() + RENEWAL_S
            if self._failing:
                await asyncio.sleep(REST_S)
                self._came.set()

    async def flush(self) -> None:
        """Writes all that waits; what cannot be written now is written later."""
        await self._trying(self._write_all)

    async def _trying(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except UnavailableError as error:
            if not self._failing:
                _log.warning("responses are not kept", extra={"error": error})
            self._failing = True
            for entry in self._waiting.values():
                entry.over.set()

    async def _write_all(self) -> None:
        while self._waiting:
            name, entry = next(iter(self._waiting.items()))
            outcome = await self._write(entry.kept, replaces=self._running.get(name, False))
            self._failing = False
            if outcome is Keeping.TOO_LARGE:
                _log.warning("a response is not kept, it is too large", extra={"response_id": entry.kept.response_id})
            going_on = outcome is Keeping.DONE and entry.kept.at_work
            if self._waiting.get(name) is entry:
                self._drop(name)
                if not going_on:
                    self._running.pop(name, None)
            if going_on and name in self._running:
                self._running[name] = True

    async def _write(self, kept: KeptResponse, *, replaces: bool) -> Keeping:
        document = kept.document() if kept.size <= MAX_INLINE_BYTES else await asyncio.to_thread(kept.document)
        return await self._keep(document, work_s=WORK_S, replaces=replaces)

    async def _renew(self) -> None:
        running = [name for name, written in self._running.items() if written]
        if running:
            await self._documents.work_on(running, WORK_S)
            self._failing = False

    def _drop(self, name: _Name) -> None:
        entry = self._waiting.pop(name, None)
        if entry is not None:
            entry.end()

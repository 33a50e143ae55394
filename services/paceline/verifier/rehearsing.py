"""When a verifier rehearses, and who else need not: one of a kind does, the others read what it has learned.

That lies in the learned directory, and in the store for verifiers on other machines of the same kind. A rehearsal
begins once a drafter is linked and nobody has been there for a while; the step under way is the last one when a session
comes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import suppress

from paceline.core.draft_policy import REHEARSED
from paceline.core.errors import UnavailableError
from paceline.core.messages import ModelIdentity
from paceline.core.rehearsal import TEMPERATURES, Rehearsal
from paceline.core.target_events import TargetEvent, TargetOutput, Taught
from paceline.service.learned import Learned
from paceline.store.base import FINAL, Document, Keeping, Store
from paceline.verifier.config import OFF
from paceline.verifier.served import ServedEngine

logger = logging.getLogger(__name__)

# Time without a session after which a rehearsal begins or goes on: requests one after another leave less.
IDLE_S = 1.0
# Pauses between two looks for what another verifier has learned, and what our engine has.
LOOK_S, HANDLED_S = 2.0, 0.05
# Longest time that `before-ready` delays readiness, as where no drafter comes.
READY_S = 60.0
# In the store: whom documents are kept for, how long they live, and how long the mark of one that rehearses lasts. A
# document has some thousand bytes: no response of a user is to make room for it.
KEEPER, TTL_S, WORK_S, ROOM_BYTES = "rehearsals", 7 * 24 * 3600.0, 120.0, 1 << 50


def is_taught(learned: Learned) -> bool:
    """Whether that comes of a rehearsal that was not cut off."""
    return bool(learned["policy"][REHEARSED][0])


class Rehearser:
    """Rehearses for one verifier, in its event loop.

    Args:
        served: The engine, and where what it learns is kept.
        post: Hands the engine an event.
        learned: What the engine has learned up to now.
        empty: Set while no session is there.

    Attributes:
        done: Set once both modes are known, or nobody will find out.
    """

    def __init__(
        self,
        served: ServedEngine,
        *,
        post: Callable[[TargetEvent], None],
        learned: Callable[[], Learned],
        empty: asyncio.Event,
    ) -> None:
        self.done = asyncio.Event()
        self._served, self._post, self._learned, self._empty = served, post, learned, empty
        self._rehearsal: Rehearsal | None = None
        self._draft: ModelIdentity | None = None
        self._address = ""
        self._linked, self._changed = asyncio.Event(), asyncio.Event()

    def linked(self, address: str, draft: ModelIdentity | None) -> None:
        """A drafter was reached, or lost."""
        if draft is not None:
            self._address, self._draft = address, draft
            self._linked.set()
        elif address == self._address:
            self.interrupt()
            self._linked.clear()

    def interrupt(self) -> None:
        """A session comes: the step under way is the last one."""
        if self._rehearsal is not None:
            self._tell(self._rehearsal.stop())
            self._changed.set()

    def saw(self, output: TargetOutput) -> None:
        """Takes in what a step of the rehearsal has done."""
        if self._rehearsal is not None:
            self._tell(self._rehearsal.saw(output))
            self._changed.set()

    def _tell(self, events: list[TargetEvent]) -> None:
        with suppress(UnavailableError):
            for event in events:
                self._post(event)

    async def run(self, store: Store) -> None:
        """Teaches the engine what both modes are worth, by a rehearsal if need be; never returns."""
        if self._served.rehearsal != OFF:
            await self._teach(store)
        self.done.set()
        await asyncio.Event().wait()

    async def _teach(self, store: Store) -> None:
        if self._served.own_drafter:
            self.linked(self._served.own_drafter, self._served.identity)
        await self._linked.wait()
        assert self._draft is not None, "a drafter is linked with its identity"
        kind = f"{self._served.learned.kind} {self._served.max_num_seqs} {self._draft.weights_hash}"
        shelf = Shelf(store, hashlib.sha256(kind.encode()).hexdigest())
        while not is_taught(self._learned()):
            if known := await shelf.learned():
                self._tell([Taught(learned=known)])
                return
            if await shelf.claim():
                await self._rehearse(shelf)
                return
            await asyncio.sleep(LOOK_S)

    async def _rehearse(self, shelf: Shelf) -> None:
        """Rehearses while nobody waits, and hands on what was learned."""
        identity = self._served.identity
        rehearsal = self._rehearsal = Rehearsal(
            drafter=self._address,
            max_sessions=self._served.max_num_seqs,
            vocab_size=identity.vocab_size,
            context_len=identity.context_len,
            temperatures=(0.0,) if identity.simulated else TEMPERATURES,
        )
        logger.info("rehearses", extra={"drafter": self._address, "sessions": self._served.max_num_seqs})
        try:
            while not rehearsal.is_over:
                if not rehearsal.at_work and await self._idle():
                    self._tell(rehearsal.go_on())
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._tell(rehearsal.stop())
            self._rehearsal = None
        if rehearsal.failed:
            logger.warning("the engine takes no session for a rehearsal")
            return
        learned = self._learned()
        while not is_taught(learned):
            # The engine has not come to it.
            await asyncio.sleep(HANDLED_S)
            learned = self._learned()
        logger.info("has rehearsed", extra={"learned": json.dumps(learned["policy"])})
        await asyncio.to_thread(self._served.learned.write, learned)
        await shelf.put(learned)

    async def _idle(self) -> bool:
        """Waits until nobody has been there for a while, and a drafter is."""
        while True:
            await self._empty.wait()
            await self._linked.wait()
            await asyncio.sleep(IDLE_S)
            if self._empty.is_set() and self._linked.is_set():
                return True


class Shelf:
    """What one kind of verifiers has learned, in the store; without a store everyone rehearses.

    Args:
        kind: What such verifiers have in common.
    """

    def __init__(self, store: Store, kind: str) -> None:
        self._documents, self._kind = store.documents, kind

    async def claim(self) -> bool:
        """Whether this verifier is to rehearse: nobody of its kind has, or does so now."""
        try:
            if await self._keep(b"", 0) is Keeping.DONE:
                return True
            known = await self._documents.kept(KEEPER, self._kind)
            if known is None or known.body or known.at_work:
                return False
            # Whoever was at it is gone.
            await self._documents.forget(KEEPER, self._kind)
            return await self._keep(b"", 0) is Keeping.DONE
        except UnavailableError:
            return True

    async def learned(self) -> bytes:
        """What another one has learned, JSON; empty: nothing yet."""
        with suppress(UnavailableError):
            known = await self._documents.kept(KEEPER, self._kind)
            if known is not None:
                return known.body
        return b""

    async def put(self, learned: Learned) -> None:
        """Hands on what this verifier has learned."""
        with suppress(UnavailableError):
            await self._keep(json.dumps(learned).encode(), FINAL)

    async def _keep(self, body: bytes, rank: int) -> Keeping:
        document = Document(keeper=KEEPER, name=self._kind, body=body, rank=rank, at_work=not body)
        return await self._documents.keep(document, ttl_s=TTL_S, work_s=WORK_S, room_bytes=ROOM_BYTES)

"""When a verifier rehearses, and who else need not: one of a kind measures, the others read what it has found.

A profile lies in the learned directory, and in the store for verifiers on other machines of the same kind. Rehearsals
begin once a drafter is linked and nobody has been there for a while; the step under way is the last one when a session
comes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress

from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.messages import ModelIdentity
from paceline.core.rehearsal import TEMPERATURES, Rehearsal
from paceline.core.step_profile import StepProfile, step_profile_from
from paceline.core.target_events import Rehearsed, TargetEvent, TargetOutput
from paceline.service.learned import Learned
from paceline.store.base import Store
from paceline.store.documents import FINAL, Document, Keeping
from paceline.verifier.config import OFF
from paceline.verifier.served import ServedEngine

logger = logging.getLogger(__name__)

# Time without a session after which a rehearsal begins or goes on: requests one after another leave less.
IDLE_S = 1.0
# Pause between two looks for what another verifier has found.
LOOK_S = 2.0
# Longest time that `before-ready` delays readiness, as where no drafter comes.
READY_S = 60.0
# In the store: whom profiles are kept for, how long they live, and how long the mark of one that rehearses lasts. A
# profile has some thousand bytes: no response of a user is to make room for it.
KEEPER, TTL_S, WORK_S, ROOM_BYTES = "step-profiles", 7 * 24 * 3600.0, 120.0, 1 << 50


class Rehearser:
    """Rehearses for one verifier, in its event loop.

    Args:
        served: The engine, and where profiles of its steps are kept.
        post: Hands the engine an event.
        empty: Set while no session is there.

    Attributes:
        done: Set once steps are known, or nobody will find out.
    """

    def __init__(
        self,
        served: ServedEngine,
        *,
        post: Callable[[TargetEvent], None],
        empty: asyncio.Event,
    ) -> None:
        self.done = asyncio.Event()
        self._served, self._post, self._empty = served, post, empty
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
        """Finds a profile, by a rehearsal if need be, and hands it to the engine; never returns."""
        await self._find(store)
        self.done.set()
        await asyncio.Event().wait()

    async def _find(self, store: Store) -> None:
        if self._served.profile_of is None or self._served.rehearsal == OFF:
            return
        if self._served.own_drafter:
            self.linked(self._served.own_drafter, self._served.identity)
        await self._linked.wait()
        assert self._draft is not None, "a drafter is linked with its identity"
        file = self._served.profile_of(self._draft)
        profile, shelf = _read(file.read()), Shelf(store, file.kind)
        while profile is None:
            if await shelf.claim():
                profile = await self._rehearse()
                if profile is None:
                    return
                file.write(profile.learned())
                await shelf.put(profile)
            else:
                profile = await shelf.profile()
                if profile is None:
                    await asyncio.sleep(LOOK_S)
        self._tell([Rehearsed(profile=profile)])

    async def _rehearse(self) -> StepProfile | None:
        """Rehearses while nobody waits; None: the engine does not take the sessions."""
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
            while not (rehearsal.is_done or rehearsal.failed):
                if not rehearsal.at_work and await self._idle():
                    self._tell(rehearsal.go_on())
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._tell(rehearsal.stop())
            self._rehearsal = None
        if rehearsal.failed:
            logger.warning("the engine takes no session for a rehearsal")
            return None
        profile = rehearsal.profile()
        logger.info("has rehearsed", extra={"profile": json.dumps(profile.learned())})
        return profile

    async def _idle(self) -> bool:
        """Waits until nobody has been there for a while, and a drafter is."""
        while True:
            await self._empty.wait()
            await self._linked.wait()
            await asyncio.sleep(IDLE_S)
            if self._empty.is_set() and self._linked.is_set():
                return True


class Shelf:
    """The profile of one kind of verifiers in the store; without a store everyone rehearses.

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

    async def profile(self) -> StepProfile | None:
        """What another one has found; None: nothing yet."""
        with suppress(UnavailableError):
            known = await self._documents.kept(KEEPER, self._kind)
            if known is not None and known.body:
                return _read(json.loads(known.body))
        return None

    async def put(self, profile: StepProfile) -> None:
        """Hands on what this verifier has found."""
        with suppress(UnavailableError):
            await self._keep(json.dumps(profile.learned()).encode(), FINAL)

    async def _keep(self, body: bytes, rank: int) -> Keeping:
        document = Document(keeper=KEEPER, name=self._kind, body=body, rank=rank, at_work=not body)
        return await self._documents.keep(document, ttl_s=TTL_S, work_s=WORK_S, room_bytes=ROOM_BYTES)


def _read(found: Learned | None) -> StepProfile | None:
    """A profile from where it was kept; one of something else is like none."""
    if not found:
        return None
    try:
        return step_profile_from(found)
    except ConfigError as error:
        logger.warning("a kept profile cannot be used", extra={"error": str(error)})
        return None

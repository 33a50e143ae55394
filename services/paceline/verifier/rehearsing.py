"""Shares rehearsals: one verifier of a kind rehearses, and the others read the learned tuning.

The tuning lies in the learned directory, and in the store for verifiers on other machines of the same kind.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from paceline import __version__
from paceline.core.calibration import check
from paceline.core.draft_policy import REHEARSED, Goodput
from paceline.core.errors import UnavailableError
from paceline.core.target_events import TargetEvent, TuningLoaded
from paceline.engine.rehearsing import RehearsalClient
from paceline.service.learned import Learned
from paceline.store.base import Store
from paceline.verifier.served import ServedEngine

logger = logging.getLogger(__name__)

# Pause between two looks for what another verifier has learned.
LOOK_S = 2.0
# Longest time that `before-ready` delays readiness, as where no drafter comes.
READY_S = 60.0
# Lives in the store of a tuning, and of the empty one that a rehearsing verifier leaves there meanwhile.
TTL_S, WORK_S = 7 * 24 * 3600.0, 120.0
# Longest tuning that is read: 15 MiB took 1.7 s of the event loop.
MOST_BYTES = 64 * 1024


def is_taught(learned: Learned, draft: str) -> bool:
    """Whether that comes of a rehearsal with this draft model that was not cut off."""
    # A helper that does not answer has learned nothing.
    return bool(learned) and learned["policy"][REHEARSED] == draft


def is_usable(content: bytes, draft: str) -> bool:
    """Whether a tuning of the store holds what an engine can begin with that has this draft model."""
    try:
        if len(content) > MOST_BYTES:
            raise ValueError(f"{len(content)} bytes, at most {MOST_BYTES} are read")
        learned = json.loads(content)
        Goodput().resume(learned["policy"])
        for each in learned["calibrations"].values():
            check(each)
        return is_taught(learned, draft)
    # Nothing that it may hold is worth a start: deep nesting, numbers beyond any float, and what else there is.
    except Exception as error:  # noqa: BLE001
        logger.warning("what another verifier has learned cannot be used", extra={"error": repr(error)})
        return False


class Rehearser:
    """Has one verifier's engine rehearse if nobody of its kind has.

    Args:
        served: The engine, and where what it learns is kept.
        rehearsal: What is to be run.
        post: Hands the engine an event.
        learned: Tuning that the engine has learned so far.

    Attributes:
        done: Set once both modes are known, or nobody will find out.
    """

    def __init__(
        self,
        served: ServedEngine,
        rehearsal: RehearsalClient,
        *,
        post: Callable[[TargetEvent], None],
        learned: Callable[[], Awaitable[Learned]],
    ) -> None:
        self._served, self._rehearsal, self._post, self._learned = served, rehearsal, post, learned
        self.done = asyncio.Event()
        self._draft = ""
        self._linked = asyncio.Event()
        if served.own_drafter and served.helper is None:
            self.linked(served.own_drafter)

    def linked(self, draft: str) -> None:
        """A drafter was reached; it is known by the hash of its weights."""
        self._draft = self._draft or draft
        self._linked.set()

    async def run(self, store: Store) -> None:
        """Has the engine know what both modes are worth, by a rehearsal if need be; never returns."""
        await self._linked.wait()
        served = self._served
        facts = __version__, served.learned.kind, served.identity.arithmetic, served.max_num_seqs, served.max_rows
        kind = repr((*facts, self._draft))
        shelf = SharedTuning(store, hashlib.sha256(kind.encode()).hexdigest())
        while not is_taught(await self._learned(), self._draft):
            known = await shelf.learned()
            if known and is_usable(known, self._draft):
                self._post(TuningLoaded(learned=known))
                break
            if await shelf.claim(anew=bool(known)):
                await self._rehearse(shelf)
                break
            await asyncio.sleep(LOOK_S)
        self.done.set()
        await asyncio.Event().wait()

    async def _rehearse(self, shelf: SharedTuning) -> None:
        logger.info("rehearses while nobody waits", extra={"sessions": self._served.max_num_seqs})
        await self._rehearsal.run(self._draft)
        learned = await self._learned()
        if is_taught(learned, self._draft):
            logger.info("has rehearsed", extra={"learned": json.dumps(learned["policy"])})
            await shelf.put(learned)
            await asyncio.to_thread(self._served.learned.write, learned)
        else:
            logger.warning("has rehearsed to no end: the drafter did not answer, or the engine takes no such session")


class SharedTuning:
    """Tuning of a kind of verifiers, in the store; where the store does not answer, everyone rehearses.

    Args:
        kind: Kind of these verifiers.
    """

    def __init__(self, store: Store, kind: str) -> None:
        self._store, self._name = store, f"rehearsal:{kind}"

    async def learned(self) -> bytes:
        """Tuning that another verifier has learned, JSON; empty: nothing yet."""
        with suppress(UnavailableError):
            return await self._store.note(self._name) or b""
        return b""

    async def claim(self, *, anew: bool = False) -> bool:
        """Whether this verifier is to rehearse: nobody of its kind has, or does so now.

        Args:
            anew: The tuning in the store is of no use.
        """
        try:
            return await self._store.write_note(self._name, b"", ttl_s=WORK_S, new=not anew)
        except UnavailableError:
            return True

    async def put(self, learned: Learned) -> None:
        """Hands on what this verifier has learned."""
        with suppress(UnavailableError):
            await self._store.write_note(self._name, json.dumps(learned).encode(), ttl_s=TTL_S)

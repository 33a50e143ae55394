"""The verifier's line to the helper beside vLLM's worker, which learns of steps and drafts, and decides on drafting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.service.learned import Learned
from paceline.vllm.rehearsal import LINE_BYTES

logger = logging.getLogger(__name__)

# Pauses between two sends of the same mode to the helper in a rehearsal, and between two looks whether it has a
# drafter, or time for us; and the longest wait for its answer.
PULSE_S, LOOK_S, ANSWER_S = 0.1, 2.0, 5.0

Order = Mapping[str, Any]
AS_PAYS: Order = {"drafts": None, "over": False}


class HelperLine:
    """Tells the helper what a rehearsal needs, one order after another; what does not arrive costs only speed.

    A rehearsal keeps its connection. Any other order has one of its own, so that `paceline rehearse` gets its turn.

    Args:
        find: Returns the helper's socket; None: there is none yet.

    Attributes:
        responded: Whether drafters had responded in the helper's last step, as far as we know.
    """

    def __init__(self, find: Callable[[], Path | None]) -> None:
        self._find = find
        self._orders: asyncio.Queue[tuple[Order, asyncio.Future[Learned] | None]] = asyncio.Queue()
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.responded = True

    def rehearse(self, drafts: bool | None, *, over: bool = False) -> None:
        """Has the next steps draft or not; None: as pays.

        Args:
            over: All that was to be seen has been.
        """
        self._orders.put_nowait(({"drafts": drafts, "over": over, "unasked": drafts is not None}, None))

    def teach(self, learned: bytes) -> None:
        """Has the helper begin with what another one has learned, JSON."""
        self._orders.put_nowait(({**AS_PAYS, "learned": json.loads(learned)}, None))

    async def learned(self) -> Learned:
        """Tuning of the helper so far, after all earlier orders; nothing, if it does not answer."""
        known: asyncio.Future[Learned] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait((AS_PAYS, known))
        return await known

    async def run(self, linked: Callable[[str], None]) -> None:
        """Gives the helper its orders; never returns.

        Args:
            linked: Called once with the hash of the draft model's weights, when there is a drafter.
        """
        try:
            linked(await self._drafter())
            order = AS_PAYS
            while True:
                order = await self._next(order)
        finally:
            self._drop()

    async def _next(self, order: Order) -> Order:
        """Gives the next order, or the last one again: a rehearsal is over if the helper does not hear of it."""
        wants = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if order["drafts"] is None else PULSE_S):
                order, wants = await self._orders.get()
        state: Mapping[str, Any] = {}
        try:
            state = await self._told(order)
        finally:
            # The caller gets an answer, whatever ends this.
            if wants is not None and not wants.done():
                wants.set_result(state.get("learned", {}))
        self.responded = bool(state.get("responded", True))
        return order

    async def _drafter(self) -> str:
        while True:
            if drafter := (await self._told(AS_PAYS)).get("drafter"):
                return str(drafter)
            await asyncio.sleep(LOOK_S)

    async def _told(self, order: Order) -> Mapping[str, Any]:
        """Gives an order once nobody else rehearses; returns the helper's state, nothing if it does not answer."""
        while "error" in (said := await self._tried(order)):
            logger.info("vLLM's helper is told later", extra={"error": said["error"]})
            await asyncio.sleep(LOOK_S)
        return said

    async def _tried(self, order: Order) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(ANSWER_S):
                said = await self._said(order)
                if order["drafts"] is None or "error" in said:
                    await self._hang_up()
        except (OSError, TimeoutError, ValueError, ConfigError) as error:
            logger.info("vLLM's helper cannot be told", extra={"error": repr(error)})
            self._drop()
            return {}
        return said

    async def _said(self, order: Order) -> Mapping[str, Any]:
        if self._stream is None:
            path = self._find()
            if path is None:
                raise FileNotFoundError("no helper listens yet")
            self._stream = await asyncio.open_unix_connection(path, limit=LINE_BYTES)
        reader, writer = self._stream
        writer.write(json.dumps(order).encode() + b"\n")
        said: Mapping[str, Any] = json.loads(await reader.readline())
        return said

    async def _hang_up(self) -> None:
        """Ends a connection, and waits until the helper knows, so that it takes the next one."""
        assert self._stream is not None, "an order has just been answered"
        reader, writer = self._stream
        writer.write_eof()
        await reader.read()
        self._drop()

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream[1].close()
            self._stream = None

"""Joins the engine and the verifiers' streams, in the event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress

from paceline.core.errors import PacelineError, UnavailableError
from paceline.core.messages import ModelIdentity, ToDrafter, ToVerifier
from paceline.drafter.tracing import DraftTraces
from paceline.engine.draft_scheduler import DraftEvent, VerifierLeft, VerifierMessages
from paceline.engine.drafter import DraftEngine, DraftOutput
from paceline.engine.loop import Device, EngineLoop
from paceline.obs.metrics import DrafterMetrics
from paceline.obs.tracing import OFF, Tracer
from paceline.service.outbox import Outbox
from paceline.wire import in_parts, size_of

logger = logging.getLogger(__name__)

# A verifier that leaves more unread loses its stream; it will dial again.
OUTBOX_BYTES = 16 * 1024 * 1024

_Outbox = Outbox[Sequence[ToVerifier]]


class DraftHost:
    """All of a drafter that runs in the event loop, but for the gRPC server.

    Args:
        identity: The draft model.
        max_sessions: Most sessions that it drafts for at once.
        make_engine: Builds the engine; called in the device's thread.
        metrics: Where steps are counted.
        tracer: Records spans of sessions, if it does.
    """

    def __init__(
        self,
        *,
        identity: ModelIdentity,
        max_sessions: int,
        make_engine: Callable[[], DraftEngine],
        metrics: DrafterMetrics,
        tracer: Tracer = OFF,
    ) -> None:
        self.identity = identity
        self.max_sessions = max_sessions
        self._traces = DraftTraces(tracer)
        self._metrics = metrics
        self.engine: EngineLoop[DraftEvent, DraftOutput] = EngineLoop(make_engine, self._deliver, Device("draft"))
        self._outboxes: dict[int, _Outbox] = {}
        # Addresses of verifiers, by their streams.
        self._verifiers: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self.num_sessions = 0

    def announced_at(self, address: str) -> None:
        """Metrics have the address by which verifiers know this drafter."""
        self._metrics.tell_address(address)

    def engine_died(self, problem: str) -> None:
        """Ends the streams of all verifiers with a status; they go on without this drafter."""
        for outbox in self._outboxes.values():
            outbox.fail(UnavailableError(problem))

    async def wind_down(self) -> None:
        """Ends the streams of all verifiers, because the drafter shuts down."""
        self.engine_died("this drafter shuts down")

    async def close(self) -> None:
        await self.engine.close()

    async def converse(
        self, requests: AsyncIterator[Sequence[ToDrafter]], verifier: str = ""
    ) -> AsyncGenerator[Sequence[ToVerifier], None]:
        """A verifier's stream: its messages go in, the engine's answers come out, in parts.

        Args:
            requests: Its messages.
            verifier: Its address; empty: unknown.

        Raises:
            RemoteProtocolError: The verifier broke the protocol.
            UnavailableError: The drafter stops, or the verifier does not read.
        """
        link = next(self._numbers)
        outbox: _Outbox = Outbox(OUTBOX_BYTES)
        self._outboxes[link], self._verifiers[link] = outbox, verifier
        self._metrics.num_streams.set(len(self._outboxes))
        reader = asyncio.create_task(self._read(link, requests, outbox))
        try:
            while True:
                yield await outbox.get()
        finally:
            reader.cancel()
            self._traces.closed(link)
            del self._outboxes[link], self._verifiers[link]
            self._metrics.num_streams.set(len(self._outboxes))
            with suppress(UnavailableError):
                self.engine.post(VerifierLeft(link=link))

    async def _read(self, link: int, requests: AsyncIterator[Sequence[ToDrafter]], outbox: _Outbox) -> None:
        try:
            async for messages in requests:
                self._traces.received(link, messages)
                event = VerifierMessages(link=link, messages=messages)
                await self.engine.post_from(link, event, size_of(*messages))
            outbox.fail(UnavailableError("the verifier ended its side of the stream"))
        except PacelineError as error:
            outbox.fail(error)
        except Exception as error:
            logger.exception("reading a verifier's stream failed")
            outbox.fail(UnavailableError(f"the stream cannot be read ({type(error).__name__})"))

    def _deliver(self, output: DraftOutput) -> None:
        try:
            self._hand_on(output)
        except Exception:
            # Messages to these verifiers are lost: they dial again and open their sessions anew.
            logger.exception("drafts could not be handed on")
            for link in {*output.to_verifiers, *output.broken_links} & self._outboxes.keys():
                self._outboxes[link].fail(UnavailableError("the drafter could not hand on its drafts"))

    def _hand_on(self, output: DraftOutput) -> None:
        for link, messages in output.to_verifiers.items():
            outbox = self._outboxes.get(link)
            if outbox is None:
                continue
            self._traces.sent(link, messages)
            try:
                outbox.put([(part, size_of(*part)) for part in in_parts(messages)])
            except asyncio.QueueFull:
                outbox.fail(UnavailableError("the verifier does not read its drafts"))
        for link, error in output.broken_links.items():
            if link in self._outboxes:
                self._outboxes[link].fail(error)
        self._record(output)

    def _record(self, output: DraftOutput) -> None:
        report = output.report
        self.num_sessions = report.num_running
        self._metrics.steps.add(report)
        for link, seconds in output.device_s.items():
            self._metrics.took(self._verifiers.get(link, ""), seconds)

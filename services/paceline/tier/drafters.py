"""The drafters of a verifier: which there are, the streams to them, and who gets whom; it knows no session."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from paceline.core.messages import ModelIdentity, ToDrafter, ToVerifier
from paceline.core.pairing import DrafterCandidate, Pairing, expected_round_trip_s
from paceline.obs.metrics import VerifierMetrics
from paceline.obs.steps import record_served_by
from paceline.service.credentials import FleetTls
from paceline.store.base import Replica
from paceline.tier.links import DrafterLink

logger = logging.getLogger(__name__)

# A drafter that no session has had for one to two such periods is let go.
LINK_IDLE_S = 60.0
# Drafters beyond so many get no stream, and no session.
MAX_LINKS = 256


class Drafters:
    """Pairs by `paceline.core.pairing`, and dials whom it pairs.

    Args:
        target: Whom they draft for.
        own: What names a drafter inside the engine, which all sessions have then; empty: drafters of the tier draft.
        on_change: Called with a drafter's identity when its stream is up, with None when it is lost.
        on_messages: Called with what a drafter says.
        metrics: Where sessions are counted by drafter, and streams that are lost.
        zone: Where we run; empty: not known.
        tls: Certificate to show; None: plain text.
    """

    def __init__(
        self,
        target: ModelIdentity,
        *,
        own: str = "",
        on_change: Callable[[str, ModelIdentity | None], None],
        on_messages: Callable[[str, Sequence[ToVerifier]], None],
        metrics: VerifierMetrics,
        zone: str = "",
        tls: FleetTls | None = None,
    ) -> None:
        self._target = target
        self._own = own
        self._on_change = on_change
        self._on_messages = on_messages
        self._metrics = metrics
        self._zone = zone
        self._tls = tls
        self._links: dict[str, DrafterLink] = {}
        self._pairing = Pairing()
        self._spare = ""

    def know(self, replicas: Sequence[Replica]) -> None:
        """Takes in the drafters that the registry names; those that drain or cannot draft for the target are none."""
        self._know(
            DrafterCandidate(
                address=each.address,
                method=each.identity.draft_method,
                num_sessions=each.num_sessions,
                max_sessions=each.max_sessions,
                round_trip_s=expected_round_trip_s(self._zone, each.zone),
            )
            for each in replicas
            if not each.draining and each.identity is not None and each.identity.drafts_for(self._target)
        )

    def know_addresses(self, addresses: Sequence[str]) -> None:
        """Takes in drafters that no registry names; whether they can draft shows once they are dialled."""
        self._know(DrafterCandidate(address=address) for address in addresses)

    def _know(self, drafters: Iterable[DrafterCandidate]) -> None:
        self._pairing.know(self._as_measured(each) for each in drafters)
        self._spare = self._pairing.spare()
        self._dial(self._spare)

    def choose(self, methods: Collection[str], current: str = "") -> str:
        """See `Pairing.choose`; nobody waits for the stream that is dialled."""
        if self._own:
            return self._own if methods else ""
        address = self._pairing.choose(methods, current)
        self._dial(address)
        return address

    def count(self, address: str, change: int) -> None:
        """So many sessions more have this drafter; empty: none."""
        if address and address != self._own:
            self._pairing.count(address, change)
            record_served_by(self._metrics, address, self._pairing.num_own[address])

    def say(self, address: str, messages: Sequence[ToDrafter]) -> None:
        """Sends messages of one step, if there is a stream."""
        if address in self._links:
            self._links[address].send(messages)

    def reset(self, address: str, reason: str) -> None:
        """Ends the stream of a drafter that breaks the protocol, and dials anew."""
        self._metrics.fallbacks.labels("protocol_error").inc()
        if address in self._links:
            self._links[address].reset(reason)

    async def sweep(self) -> None:
        """Closes streams to drafters that no session has had for a while, for ever."""
        idle: set[str] = set()
        while True:
            await asyncio.sleep(LINK_IDLE_S)
            unused = {each for each in self._links if self._is_unused(each)}
            for address in filter(self._is_unused, idle & unused):
                logger.info("closing an unused stream", extra={"drafter": address})
                link = self._links.pop(address)
                self._on_change(address, None)
                await link.close()
            idle = unused

    async def close(self) -> None:
        """Ends all streams."""
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _is_unused(self, address: str) -> bool:
        return not self._pairing.num_own[address] and address != self._spare

    def _as_measured(self, drafter: DrafterCandidate) -> DrafterCandidate:
        link = self._links.get(drafter.address)
        if link is None:
            return drafter if len(self._links) < MAX_LINKS else replace(drafter, down_s=math.inf)
        measured_s = link.round_trip_s
        return replace(
            drafter,
            down_s=link.down_s,
            round_trip_s=drafter.round_trip_s if measured_s is None else measured_s,
        )

    def _dial(self, address: str) -> None:
        if address and address not in self._links and len(self._links) < MAX_LINKS:
            self._links[address] = DrafterLink(address, self._target, self._link_changed, self._on_messages, self._tls)

    def _link_changed(self, address: str, draft: ModelIdentity | None) -> None:
        if draft is None:
            self._metrics.fallbacks.labels("link_lost").inc()
        self._on_change(address, draft)

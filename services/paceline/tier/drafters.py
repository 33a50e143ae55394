"""The drafters of a verifier: the known ones, the streams to them, and the pairing; it knows no session."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from paceline.core.messages import DRAFTER, ModelIdentity, ToDrafter, ToVerifier
from paceline.core.pairing import DrafterCandidate, Pairing, expected_round_trip_s
from paceline.obs.metrics import VerifierMetrics
from paceline.service.credentials import FleetTls
from paceline.service.supervision import Work
from paceline.store.base import Replica, Store
from paceline.store.registry import RegistryView, serves
from paceline.tier.links import DrafterLink

logger = logging.getLogger(__name__)

# Pauses between two readings of the registry, and between two looks at the drafters of all sessions.
REFRESH_S, PAIRING_S = 1.0, 0.1
# The stream to a drafter closes after one to two of these periods without a session.
LINK_IDLE_S = 60.0
# Further drafters get no stream, and no session.
MAX_LINKS = 256


class Drafters:
    """Pairs by `paceline.core.pairing`, and dials the drafters that it pairs.

    Args:
        target: The model they draft for.
        own: Names a drafter inside the engine that serves all sessions; empty: drafters of the tier draft.
        on_change: Called with a drafter's identity when its stream is up, with None when it is lost.
        on_messages: Awaited with the messages of a drafter, before its next ones are read.
        metrics: Where sessions by drafter and lost streams are counted.
        zone: Where we run; empty: unknown.
        tls: Certificate to show; None: plain text.

    Attributes:
        verifier: Our address, by which drafters' metrics name us; empty: none.
    """

    def __init__(
        self,
        target: ModelIdentity,
        *,
        own: str = "",
        on_change: Callable[[str, ModelIdentity | None], None],
        on_messages: Callable[[str, Sequence[ToVerifier]], Awaitable[None]],
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
        self.verifier = ""
        # Names of drafters' models, by address.
        self._models: dict[str, str] = {}
        self._links: dict[str, DrafterLink] = {}
        self._pairing = Pairing()
        self._spare = ""

    def know(self, replicas: Sequence[Replica]) -> None:
        """Updates the drafters in the registry, except those that drain or cannot draft for the target."""
        self._models = {each.address: each.identity.name for each in replicas if each.identity is not None}
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

    def model_of(self, address: str) -> str:
        """Returns the name of a drafter's model; empty: unknown."""
        return self._models.get(address, "")

    def know_addresses(self, addresses: Sequence[str]) -> None:
        """Updates drafters that are not in a registry; whether they can draft shows once they are dialled."""
        self._know(DrafterCandidate(address=address) for address in addresses)

    def _know(self, drafters: Iterable[DrafterCandidate]) -> None:
        self._pairing.know(self._as_measured(each) for each in drafters)
        self._spare = self._pairing.spare()
        self._dial(self._spare)

    def choose(self, methods: Collection[str], current: str = "") -> str:
        """Chooses as `Pairing.choose`, and dials the drafter without waiting for its stream."""
        if self._own:
            return self._own if methods else ""
        address = self._pairing.choose(methods, current)
        self._dial(address)
        return address

    def count(self, address: str, change: int) -> None:
        """Adds to the number of sessions that have this drafter; empty: none."""
        if address and address != self._own:
            self._pairing.count(address, change)

    def say(self, address: str, messages: Sequence[ToDrafter]) -> None:
        """Sends messages of one step, if there is a stream."""
        if address in self._links:
            self._links[address].send(messages)

    def reset(self, address: str, reason: str) -> None:
        """Ends the stream of a drafter that breaks the protocol, and dials again."""
        self._metrics.fallbacks.labels("protocol_error").inc()
        if address in self._links:
            self._links[address].reset(reason)

    def background(
        self, pair: Callable[[], None], store: Store | None, addresses: Sequence[str] = ()
    ) -> Mapping[str, Work]:
        """Names the tasks that read the registry, pair sessions and close unused streams.

        Args:
            pair: Looks at the drafters of all sessions; called every 0.1 s.
            store: The registry of drafters; None: they are at `addresses`.
            addresses: Addresses of drafters that no registry names.
        """
        if store is None:
            return {"links": self.sweep, "pairing": partial(self._keep_paired, pair, addresses)}
        view = RegistryView(store, DRAFTER, answers=partial(serves, self._tls))
        return {
            "links": self.sweep,
            # Apart from pairing, which must not wait for a registry that does not answer.
            "registry": partial(view.keep_fresh, REFRESH_S),
            "pairing": partial(self._keep_paired, pair, view),
        }

    async def _keep_paired(self, pair: Callable[[], None], known: RegistryView | Sequence[str]) -> None:
        while True:
            if isinstance(known, RegistryView):
                self.know(known.replicas)
            else:
                self.know_addresses(known)
            pair()
            await asyncio.sleep(PAIRING_S)

    async def sweep(self) -> None:
        """Closes streams to drafters that no session has had for a while; never returns."""
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
            self._links[address] = DrafterLink(
                address, self._target, self._link_changed, self._on_messages, self._tls, self.verifier
            )

    def _link_changed(self, address: str, draft: ModelIdentity | None) -> None:
        if draft is None:
            self._metrics.fallbacks.labels("link_lost").inc()
        else:
            self._models[address] = draft.name
        self._on_change(address, draft)

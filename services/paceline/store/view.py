"""The registry as one reader knows it: read in the background, and kept while the registry is down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.errors import UnavailableError
from paceline.core.messages import DRAFTER, VERIFIER
from paceline.service.credentials import FleetTls, channel
from paceline.service.process import CHANNEL_OPTIONS
from paceline.store.base import Replica

PROBE_TIMEOUT_S = 1.0
# Not gateways: they show other certificates, and no reader needs to reach one that has left.
PROBED_ROLES = (VERIFIER, DRAFTER)
# A fresh connection, without the pause that gRPC keeps after an earlier failure.
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))

_log = logging.getLogger(__name__)

# Asks a replica whether it serves; answers within about a second and does not raise.
Answers = Callable[[Replica], Awaitable[bool]]


class Registry(Protocol):
    """The part of the store that is needed here."""

    async def replicas(self, role: str | None = None) -> list[Replica]:
        """Returns the replicas alive; raises `UnavailableError` when the registry does not answer."""


class Probe:
    """Asks replicas over gRPC's health service, by replica id: another process at the same address answers no.

    Args:
        tls: Certificate to show; None: plain text.
    """

    def __init__(self, tls: FleetTls | None) -> None:
        self._tls = tls

    async def __call__(self, replica: Replica) -> bool:
        """Returns within a second whether a replica serves."""
        if replica.role not in PROBED_ROLES:
            return False
        request = health_pb2.HealthCheckRequest(service=replica.replica_id)
        try:
            async with channel(replica.address, tls=self._tls, role=replica.role, options=_OPTIONS) as opened:
                answer = await health_pb2_grpc.HealthStub(opened).Check(request, timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def nobody_answers(replica: Replica) -> bool:
    """Asks no replica: those missing in the registry are gone."""
    del replica
    return False


class RegistryView:
    """Replicas as last read, and those that have left the registry but still serve.

    A missing entry does not prove that a replica is gone: the store may be full, read-only, emptied, or replaced by an
    outdated copy. So a missing replica is asked itself, by its replica id, and is kept as long as it answers that it
    serves. One that stops, drains, hangs or died does not. No threshold for "too many vanished at once" is needed, as
    each replica is judged by its own answer.

    Args:
        registry: Where replicas announce themselves.
        role: Only these; None: all.
        answers: Asks a replica; all missing ones are asked at once.

    Attributes:
        replicas: Sorted by id; empty before the first `refresh`.
        error: Why the last reading failed; None if it succeeded.
    """

    def __init__(
        self,
        registry: Registry,
        role: str | None = None,
        *,
        answers: Answers = nobody_answers,
    ) -> None:
        self.replicas: tuple[Replica, ...] = ()
        self.error: str | None = None
        self._registry = registry
        self._role = role
        self._answers = answers
        self._num_kept = 0

    async def refresh(self) -> None:
        """Reads the registry once; a failure leaves the last known replicas in place."""
        try:
            found = await self._registry.replicas(self._role)
        except UnavailableError as error:
            if self.error is None:
                _log.warning("registry unreachable, going on with the last known replicas", extra={"error": error})
            self.error = str(error)
            return
        if self.error is not None:
            _log.info("registry reachable again")
            self.error = None
        kept = await self._still_there(_missing(self.replicas, found))
        self._log_kept(kept)
        self.replicas = tuple(sorted((*found, *kept), key=lambda replica: replica.replica_id))

    async def _still_there(self, missing: Sequence[Replica]) -> list[Replica]:
        answers = await asyncio.gather(*map(self._answers, missing))
        return [replica for replica, serves in zip(missing, answers, strict=True) if serves]

    def _log_kept(self, kept: Sequence[Replica]) -> None:
        if len(kept) > self._num_kept:
            names = ", ".join(replica.replica_id for replica in kept)
            _log.warning("replicas are missing in the registry and kept", extra={"replica_ids": names})
        self._num_kept = len(kept)

    async def keep_fresh(self, interval_s: float) -> None:
        """Refreshes with a pause of `interval_s` seconds; never returns."""
        while True:
            await self.refresh()
            await asyncio.sleep(interval_s)


def _missing(known: Sequence[Replica], found: Sequence[Replica]) -> list[Replica]:
    """Returns known replicas that were not found, except those whose address another replica has now."""
    found_ids = {replica.replica_id for replica in found}
    taken = {replica.address for replica in found}
    return [each for each in known if each.replica_id not in found_ids and each.address not in taken]

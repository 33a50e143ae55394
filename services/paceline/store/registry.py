"""The registry: how a replica stays in it, and how a reader knows it while the registry is down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.errors import UnavailableError
from paceline.core.messages import DRAFTER, VERIFIER
from paceline.service.credentials import FleetTls, channel
from paceline.service.process import CHANNEL_OPTIONS
from paceline.service.supervision import TaskSupervisor
from paceline.store.base import Replica, Store

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
EXPIRY_S = 5.0


@asynccontextmanager
async def announced(store: Store, replica: Callable[[], Replica], supervisor: TaskSupervisor) -> AsyncIterator[None]:
    """Announces `replica()` every second and withdraws it at the end.

    An older entry of the replica is removed first, with its mark to drain.

    Args:
        store: The registry.
        replica: Describes the replica as it is now.
        supervisor: Keeps the heartbeat going.
    """
    heart = _Heart(store, replica)
    await store.withdraw(replica().replica_id)
    await heart.beat()
    try:
        async with supervisor.kept({"heartbeat": heart.keep_beating}):
            yield
    finally:
        with suppress(UnavailableError):
            await store.withdraw(replica().replica_id)


class _Heart:
    """Announces one replica, and remembers its mark to drain in case the store loses it."""

    def __init__(self, store: Store, replica: Callable[[], Replica]) -> None:
        self._store = store
        self._replica = replica
        self._marked = False
        self._reachable = True

    async def keep_beating(self) -> None:
        """Announces the replica every second; never returns."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self.beat()
            except UnavailableError as error:
                if self._reachable:
                    _log.warning("the registry is away; serving goes on", extra={"reason": str(error)})
                self._reachable = False
            else:
                if not self._reachable:
                    _log.info("the registry is back")
                self._reachable = True

    async def beat(self) -> None:
        self._marked = await self._store.announce(self._replica(), EXPIRY_S, marked=self._marked)


PROBE_TIMEOUT_S = 1.0
# Not gateways: they show other certificates, and no reader needs to reach one that has left.
PROBED_ROLES = (VERIFIER, DRAFTER)
# A fresh connection, without the pause that gRPC keeps after an earlier failure.
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))

# Asks a replica whether it serves; answers within about a second and does not raise.
Answers = Callable[[Replica], Awaitable[bool]]


async def serves(tls: FleetTls | None, replica: Replica) -> bool:
    """Asks over gRPC's health service, by replica id: another process at the same address answers no.

    Args:
        tls: Certificate to show; None: plain text.
    """
    if replica.role not in PROBED_ROLES:
        return False
    return await answers_health(replica.address, replica.role, tls, service=replica.replica_id)


async def answers_health(address: str, role: str, tls: FleetTls | None = None, *, service: str = "") -> bool:
    """Asks a gRPC server of a role whether a service of it is well; answers within about a second and does not raise.

    Args:
        tls: Certificate to show; None: plain text.
        service: Name of the service; empty: all of them.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        async with channel(address, tls=tls, role=role, options=_OPTIONS) as opened:
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
    serves. A replica that stops, drains, hangs or died does not. No threshold for "too many vanished at once" is
    needed, as each replica is judged by its own answer.

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
        registry: Store,
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

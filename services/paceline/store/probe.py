"""Asks a replica itself whether it serves, for readers of a registry that does not name it any more."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.messages import DRAFTER, VERIFIER
from paceline.service.credentials import FleetTls, channel
from paceline.service.process import CHANNEL_OPTIONS
from paceline.store.base import Replica

PROBE_TIMEOUT_S = 1.0
# Gateways have other certificates at their doors, and nobody needs to reach one that has left.
PROBED_ROLES = (VERIFIER, DRAFTER)
# A connection of its own: it must not inherit the pause that gRPC keeps after another's failure.
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


class Probe:
    """Asks replicas over gRPC's health service, each under its own name: another process at its address says no.

    Args:
        tls: Certificate to show; None: plain text.
    """

    def __init__(self, tls: FleetTls | None) -> None:
        self._tls = tls

    async def __call__(self, replica: Replica) -> bool:
        """Says within a second whether a replica serves."""
        if replica.role not in PROBED_ROLES:
            return False
        request = health_pb2.HealthCheckRequest(service=replica.replica_id)
        try:
            async with channel(replica.address, tls=self._tls, role=replica.role, options=_OPTIONS) as opened:
                answer = await health_pb2_grpc.HealthStub(opened).Check(request, timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

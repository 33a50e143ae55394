"""Asks a service of any kind whether it is well; every question has a short deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.errors import UnavailableError
from paceline.service.credentials import FleetTls, channel
from paceline.store.opening import open_store

CHECK_TIMEOUT_S = 1.0

HealthCheck = Callable[[], Awaitable[bool]]


def grpc_health(address: str, role: str, tls: FleetTls | None = None) -> HealthCheck:
    """Returns a check of the overall health of a gRPC server of a role; `tls` is the certificate to show."""

    async def check() -> bool:
        try:
            async with channel(address, tls=tls, role=role) as opened:
                request = health_pb2.HealthCheckRequest()
                answer = await health_pb2_grpc.HealthStub(opened).Check(request, timeout=CHECK_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return check


def http_health(url: str) -> HealthCheck:
    """Returns a check that a URL answers 200; whose certificate it shows is for its clients to judge."""

    async def check() -> bool:
        try:
            async with httpx.AsyncClient(timeout=CHECK_TIMEOUT_S, trust_env=False, verify=False) as client:
                return (await client.get(url)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    return check


def store_health(url: str) -> HealthCheck:
    """Returns a check that a Valkey or Redis server answers."""

    async def check() -> bool:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S), open_store(url) as store:
                await store.ping()
        except (UnavailableError, TimeoutError):
            return False
        return True

    return check

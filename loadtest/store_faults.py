"""Faults of a live Valkey: full, read-only, failed over to a replica that lags."""

from __future__ import annotations

import asyncio
import tempfile
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.cluster.valkey import find_server, server_command
from tools.delay_proxy import DelayProxy
from tools.ports import free_port

# Longer than entries live in the registry, so that what cannot be renewed is taken for gone.
UNWRITABLE_S = 7.0
FAILED_OVER_S = 4.0
SYNCED_WITHIN_S = 10.0
POLL_S = 0.05
NOWHERE = ("127.0.0.1", "1")

Address = tuple[str, int]


async def fill(server: Address) -> None:
    """Nothing can be written for a while: the memory is full."""
    async with _connected(server) as redis:
        await redis.config_set("maxmemory-policy", "noeviction")
        await redis.config_set("maxmemory", 1)
        try:
            await asyncio.sleep(UNWRITABLE_S)
        finally:
            await redis.config_set("maxmemory", 0)


async def make_read_only(server: Address) -> None:
    """Nothing can be written for a while: it follows a master that is not there."""
    async with _connected(server) as redis:
        await redis.replicaof(*NOWHERE)
        try:
            await asyncio.sleep(UNWRITABLE_S)
        finally:
            await redis.replicaof("NO", "ONE")


async def fail_over(server: Address, proxy: DelayProxy) -> None:
    """A replica takes over for a while, and the first one again; what was not copied yet is lost, as it would be."""
    host, _ = server
    port = free_port(host)
    with tempfile.TemporaryDirectory() as folder:
        command = server_command(find_server(), host=host, port=port, data_dir=Path(folder))
        process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
        try:
            await _take_over((host, port), server, proxy)
            await asyncio.sleep(FAILED_OVER_S)
            await _take_over(server, (host, port), proxy)
        finally:
            proxy.set_upstream(server)
            with suppress(RedisError):
                async with _connected(server) as redis:
                    await redis.replicaof("NO", "ONE")
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _take_over(heir: Address, master: Address, proxy: DelayProxy) -> None:
    """Makes a server a copy of another, and then the one that is asked."""
    async with asyncio.timeout(SYNCED_WITHIN_S), _connected(heir) as redis:
        await _until_there(redis)
        await redis.replicaof(master[0], str(master[1]))
        while (await redis.info("replication")).get("master_link_status") != "up":  # noqa: ASYNC110 - only polling shows it
            await asyncio.sleep(POLL_S)
        await redis.replicaof("NO", "ONE")
    proxy.set_upstream(heir)


async def _until_there(redis: Redis) -> None:
    while True:
        with suppress(RedisError):
            await redis.ping()
            return
        await asyncio.sleep(POLL_S)


@asynccontextmanager
async def _connected(server: Address) -> AsyncIterator[Redis]:
    """A connection past all proxies; a server that is away ends the fault."""
    redis = Redis(host=server[0], port=server[1], socket_timeout=2.0)
    try:
        yield redis
    finally:
        await redis.aclose()

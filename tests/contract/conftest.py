"""Real servers for the store's contract: one of each kind a module, empty and well at the start of each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from paceline.cluster.valkey import find_server
from paceline.store.redis import RedisStore
from tests.contract.test_store import HOST, server_process, servers


@pytest.fixture(scope="module", params=servers())
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    program = find_server(None if request.param == "valkey" else Path(request.param))
    with server_process(program, tmp_path_factory.mktemp("data")) as (number, _):
        yield number


@pytest.fixture
async def server(port: int) -> AsyncIterator[Redis]:
    """The server by its own commands; empty and well at the start of each test."""
    async with Redis(host=HOST, port=port) as client:
        await client.execute_command("REPLICAOF", "NO", "ONE")
        await client.config_set("maxmemory", 0)
        await client.flushall()
        yield client


@pytest.fixture
async def store(port: int, server: Redis) -> AsyncIterator[RedisStore]:
    async with RedisStore(f"redis://{HOST}:{port}/0") as opened_store:
        yield opened_store

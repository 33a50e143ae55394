"""`paceline drain` against a real store: the mark, the wait, the way back, and what it says when it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from paceline.cluster import drain as module
from paceline.cluster.drain import DrainConfig, drain
from paceline.cluster.valkey import find_server
from paceline.core.errors import ConfigError, UnavailableError
from paceline.store.base import Replica, Store
from paceline.store.redis import open_store
from tests.contract.test_store import HOST, server_process

VERIFIER = Replica(replica_id="v1", role="verifier", address="127.0.0.1:8101", num_sessions=2)


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Store, str]]:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(module, "GONE_AFTER_S", 0.5)
    with server_process(find_server(), tmp_path) as (port, _):
        url = f"redis://{HOST}:{port}"
        async with open_store(url) as opened:
            await opened.announce(VERIFIER, 60)
            yield opened, url


async def test_it_returns_when_the_last_session_has_left(
    store: tuple[Store, str], capsys: pytest.CaptureFixture[str]
) -> None:
    opened, url = store
    draining = asyncio.create_task(drain(DrainConfig(replica="v1", redis_url=url)))
    while not (await opened.replicas())[0].draining:
        continue
    assert not draining.done()
    await opened.announce(replace(VERIFIER, num_sessions=0), 60)
    await draining
    said = capsys.readouterr().out
    assert "verifier v1 drains, 2 sessions are on it" in said
    assert said.endswith("v1 is drained\n")
    await drain(DrainConfig(replica="v1", redis_url=url, undo=True))
    assert not (await opened.replicas())[0].draining


async def test_a_replica_that_is_gone_is_drained(store: tuple[Store, str], capsys: pytest.CaptureFixture[str]) -> None:
    opened, url = store
    draining = asyncio.create_task(drain(DrainConfig(replica="v1", redis_url=url)))
    while not (await opened.replicas())[0].draining:
        continue
    await opened.withdraw("v1")
    await draining
    assert capsys.readouterr().out.endswith("v1 is drained, and it has left the registry\n")


async def test_a_store_that_comes_back_empty_is_not_taken_for_a_replica_that_is_drained(
    store: tuple[Store, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened, url = store
    monkeypatch.setattr(module, "GONE_AFTER_S", 3600.0)
    draining = asyncio.create_task(drain(DrainConfig(replica="v1", redis_url=url)))
    while "2 sessions are left" not in capsys.readouterr().out:  # noqa: ASYNC110 - a printed line is no event
        await asyncio.sleep(0.01)
    async with Redis.from_url(url) as server:
        await server.flushall()
        reads = (await server.info("commandstats"))["cmdstat_smembers"]["calls"]
        while (await server.info("commandstats"))["cmdstat_smembers"]["calls"] < reads + 3:
            assert not draining.done()
    # Its next heartbeat.
    assert await opened.announce(replace(VERIFIER, num_sessions=0), 60, marked=True)
    await draining
    assert capsys.readouterr().out.endswith("v1 is drained\n")


async def test_a_wait_outlives_a_store_that_is_away_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    looked = asyncio.Event()
    sessions = module._sessions

    async def look_and_tell(store: Store, replica_id: str) -> int:
        try:
            return await sessions(store, replica_id)
        finally:
            looked.set()

    monkeypatch.setattr(module, "_sessions", look_and_tell)
    with server_process(find_server(), tmp_path) as (port, _):
        url = f"redis://{HOST}:{port}"
        async with open_store(url) as opened:
            await opened.announce(VERIFIER, 60)
        draining = asyncio.create_task(drain(DrainConfig(replica="v1", redis_url=url)))
        await looked.wait()
    looked.clear()
    await looked.wait()
    with server_process(find_server(), tmp_path, port):
        async with open_store(url) as opened:
            await opened.announce(replace(VERIFIER, num_sessions=0), 60)
        await draining
    assert capsys.readouterr().out.endswith("v1 is drained\n")


async def test_sessions_that_stay_are_an_error_after_the_wait_and_the_mark_remains(store: tuple[Store, str]) -> None:
    opened, url = store
    with pytest.raises(UnavailableError, match=r"2 sessions are left on v1 after 0\.1 s; it goes on draining"):
        await drain(DrainConfig(replica="v1", redis_url=url, timeout_s=0.1))
    assert (await opened.replicas())[0].draining


async def test_without_waiting_it_returns_at_once(store: tuple[Store, str]) -> None:
    opened, url = store
    await drain(DrainConfig(replica="v1", redis_url=url, wait=False))
    assert (await opened.replicas())[0].draining


async def test_an_unknown_replica_is_refused_and_those_known_are_named(store: tuple[Store, str]) -> None:
    with pytest.raises(ConfigError, match=r"no replica 'v2'.*there are: v1 \(verifier\)"):
        await drain(DrainConfig(replica="v2", redis_url=store[1]))

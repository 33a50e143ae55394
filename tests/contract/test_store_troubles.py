"""A store that is full, read-only, slow, emptied, or has a clock of its own, on real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from paceline.cluster.valkey import find_server
from paceline.core.errors import OverloadedError, UnavailableError
from paceline.gateway.access.keys import ApiKey
from paceline.gateway.access.rate_limit import RateLimit
from paceline.gateway.sessions.records import RecordWriter
from paceline.service.credentials import FleetTls
from paceline.service.dev_ca import make_certificates
from paceline.service.process import GrpcServer, start_grpc_server
from paceline.service.supervision import TaskSupervisor
from paceline.store import registry
from paceline.store.base import (
    EPOCHS_PER_OWNER,
    AdvanceSession,
    LoggedSession,
    SessionState,
    Store,
)
from paceline.store.redis import REPLICA_INDEX, REPLICA_PREFIX, RedisStore
from paceline.store.registry import RegistryView, announced, serves
from tests.contract.test_store import DRAFTER, HOST, PROMPT, SESSION, VERIFIER, eventually, put, server_process
from tests.unit.gateway.sessions.test_records import opened
from tools.delay_proxy import DelayProxy

ALICE = ApiKey(name="alice", digest=bytes(32), requests_per_minute=2)


async def fill(server: Redis) -> None:
    await server.config_set("maxmemory", 1)


async def make_read_only(server: Redis) -> None:
    # Of a primary that is not there: it goes on with what it has.
    await server.execute_command("REPLICAOF", HOST, "1")


# Full.


async def test_a_full_store_keeps_the_registry_up_to_date(server: Redis, store: RedisStore) -> None:
    await store.announce(VERIFIER, 60)
    await fill(server)
    await store.announce(replace(VERIFIER, num_sessions=7), 60)
    await store.announce(DRAFTER, 60)
    await store.drain("d1")
    assert await store.replicas() == [replace(DRAFTER, draining=True), replace(VERIFIER, num_sessions=7)]
    assert await server.pttl(REPLICA_PREFIX + "v1") > 0


async def test_a_full_store_refuses_records_and_says_why(server: Redis, store: RedisStore) -> None:
    await put(store)
    known = await store.session("s1")
    await fill(server)
    with pytest.raises(UnavailableError, match=r"is full; raise its maxmemory"):
        await put(store, replace(SESSION, epoch=6, committed_len=100))
    with pytest.raises(UnavailableError, match="is full"):
        await put(store, replace(SESSION, session_id="s2"))
    for token_ids in ((1,), ()):
        write = AdvanceSession(
            session_id="s1", epoch=6, owner="g1", base_len=3, token_ids=token_ids, state=SessionState.STOP
        )
        with pytest.raises(UnavailableError, match="is full"):
            await store.write_sessions([write])
    assert await store.session("s1") == known
    assert await store.session("s2") is None


async def test_a_session_in_a_full_store_can_be_claimed(server: Redis, store: RedisStore) -> None:
    await put(store)
    await fill(server)
    claimed = await store.claim_session("s1", "g2")
    assert claimed == LoggedSession(record=replace(SESSION, epoch=EPOCHS_PER_OWNER, owner="g2"), token_ids=PROMPT)
    assert await store.session("s1") == claimed


async def test_a_full_store_stops_no_request(server: Redis, port: int) -> None:
    await fill(server)
    limit = RateLimit(f"redis://{HOST}:{port}", timeout_s=30)
    assert [await limit.count(ALICE) for _ in range(3)] == [False] * 3
    await limit.close()


@pytest.mark.parametrize("trouble", [fill, make_read_only])
async def test_sessions_run_on_unrecorded_and_are_recorded_when_the_store_takes_writes_again(
    trouble: Callable[[Redis], Awaitable[None]], server: Redis, store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RecordWriter(store, ttl_s=60, owner="g1")
    recorded_sessions = [opened(writer, session_id=name) for name in ("s1", "s2")]
    await writer.flush()
    await trouble(server)
    for step in range(3):
        for recorded in recorded_sessions:
            recorded.extend((10 + step,))
        await writer.flush()
    recorded_sessions[1].end(SessionState.STOP)
    await writer.flush()
    assert [record.message for record in caplog.records] == ["session records are not written"]
    await server.config_set("maxmemory", 0)
    await server.execute_command("REPLICAOF", "NO", "ONE")
    await writer.flush()
    for name, state in (("s1", SessionState.RUNNING), ("s2", SessionState.STOP)):
        logged = await store.session(name)
        assert logged is not None
        assert (logged.token_ids[-3:], logged.record.state) == ((10, 11, 12), state)


# Read-only.


async def test_a_read_only_copy_is_read_and_named_when_it_is_to_be_written(server: Redis, store: RedisStore) -> None:
    await store.announce(VERIFIER, 60)
    await server.sadd(REPLICA_INDEX, "gone")
    await put(store)
    await make_read_only(server)
    assert await store.replicas() == [VERIFIER]
    assert await store.session("s1") is not None
    writes: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.announce(VERIFIER, 60),
        lambda: store.withdraw("v1"),
        lambda: store.drain("v1"),
        lambda: put(store, replace(SESSION, epoch=6)),
        lambda: store.claim_session("s1", "g2"),
    ]
    for write in writes:
        with pytest.raises(UnavailableError, match=r"read-only copy of another; let --redis-url name the primary"):
            await write()


async def test_after_a_failover_the_new_primary_behind_the_same_name_is_found(
    server: Redis, port: int, tmp_path: Path
) -> None:
    with (
        server_process(find_server(), tmp_path) as (new_port, _),
        DelayProxy((HOST, port)) as name,
    ):
        async with RedisStore(f"redis://{name.address}/0") as store:
            await store.announce(VERIFIER, 60)
            # The old primary is a copy of the new one now, and its connections are left open.
            await make_read_only(server)
            name._upstream = (HOST, new_port)
            with pytest.raises(UnavailableError, match="read-only"):
                await store.announce(VERIFIER, 60)
            await store.announce(VERIFIER, 60)
        async with RedisStore(f"redis://{HOST}:{new_port}/0") as new:
            assert await new.replicas() == [VERIFIER]


async def test_counts_of_requests_find_the_new_primary_too(server: Redis, port: int, tmp_path: Path) -> None:
    now_s = 0.0
    with (
        server_process(find_server(), tmp_path) as (new_port, _),
        DelayProxy((HOST, port)) as name,
    ):
        limit = RateLimit(f"redis://{name.address}", timeout_s=30, clock=lambda: now_s)
        await limit.count(ALICE)
        await make_read_only(server)
        name._upstream = (HOST, new_port)
        await limit.count(ALICE)
        now_s = 60.0
        await limit.count(ALICE)
        await limit.count(ALICE)
        with pytest.raises(OverloadedError):
            await limit.count(ALICE)
        await limit.close()


# Slow.


async def test_a_slow_store_is_waited_for_and_a_silent_one_is_not(server: Redis, port: int) -> None:
    del server
    with DelayProxy((HOST, port), round_trip_s=0.1) as proxy:
        async with RedisStore(f"redis://{proxy.address}/0", socket_timeout_s=5) as patient:
            await patient.announce(VERIFIER, 60)
            assert await patient.replicas() == [VERIFIER]
        async with RedisStore(f"redis://{proxy.address}/0", socket_timeout_s=0.02) as hasty:
            with pytest.raises(UnavailableError, match="does not answer in time"):
                await hasty.replicas()
            proxy.set_round_trip(0.0)
            async with RedisStore(f"redis://{proxy.address}/0", socket_timeout_s=5) as patient:
                assert await patient.replicas() == [VERIFIER]


async def test_no_call_gets_the_answer_to_another_that_was_given_up(server: Redis, port: int) -> None:
    del server
    with DelayProxy((HOST, port)) as proxy:
        async with RedisStore(f"redis://{proxy.address}/0", socket_timeout_s=30) as store:
            await store.announce(VERIFIER, 60)
            await put(store)
            with proxy.held():
                given_up = [asyncio.create_task(store.replicas()) for _ in range(3)]
                given_up += [asyncio.create_task(store.session("s1")) for _ in range(3)]
                await asyncio.sleep(0)
                for task in given_up:
                    task.cancel()
                await asyncio.gather(*given_up, return_exceptions=True)
            for _ in range(10):
                assert await store.replicas() == [VERIFIER]
                assert await store.session("s1") == LoggedSession(record=SESSION, token_ids=PROMPT)


# Emptied, with replicas that serve.


@asynccontextmanager
async def serving(replica_id: str, **settings: Any) -> AsyncIterator[GrpcServer]:
    started = await start_grpc_server(
        host=HOST, port=0, add_servicers=lambda server: None, service_names=["paceline.rpc.v1.Verifier"], **settings
    )
    await started.ready(replica_id)
    try:
        yield started
    finally:
        await started.stop(0)


async def test_an_emptied_store_leaves_the_fleet_that_serves_until_it_serves_no_more(
    server: Redis, store: RedisStore
) -> None:
    view = RegistryView(store, answers=partial(serves, None))
    async with serving("v1") as one, serving("v2") as other:
        for name, listening in (("v1", one), ("v2", other)):
            await store.announce(replace(VERIFIER, replica_id=name, address=listening.address), 60)
        await store.announce(replace(VERIFIER, replica_id="dead", address=f"{HOST}:1"), 60)
        await view.refresh()
        await server.flushall()
        await view.refresh()
        assert [each.replica_id for each in view.replicas] == ["v1", "v2"]
        await one.drain()
        await view.refresh()
        assert [each.replica_id for each in view.replicas] == ["v2"]
    await view.refresh()
    assert view.replicas == ()


async def test_another_process_at_the_address_of_a_replica_is_not_taken_for_it(store: RedisStore) -> None:
    view = RegistryView(store, answers=partial(serves, None))
    async with serving("another") as listening:
        await store.announce(replace(VERIFIER, address=listening.address), 60)
        await view.refresh()
        await store.withdraw("v1")
        await view.refresh()
        assert view.replicas == ()


async def test_replicas_are_asked_with_certificates_where_the_fleet_has_them(tmp_path: Path) -> None:
    make_certificates(tmp_path / "ca")
    own, gateway = (FleetTls.from_folder(tmp_path / "ca" / role, role) for role in ("verifier", "gateway"))
    async with serving("v1", credentials=own.server_credentials()) as listening:
        replica = replace(VERIFIER, address=listening.address)
        assert await serves(gateway, replica)
        assert not await serves(gateway, replace(replica, role="drafter"))
        assert not await serves(None, replica)


# Marks to drain.


@asynccontextmanager
async def beating(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(registry, "HEARTBEAT_S", 0.01)
    async with announced(store, lambda: VERIFIER, TaskSupervisor(CollectorRegistry())):
        yield


async def test_a_mark_to_drain_is_set_anew_by_the_replica_when_the_store_has_lost_it(
    server: Redis, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def marked() -> bool:
        return any(each.draining for each in await store.replicas())

    async def heard() -> bool:
        return any(heart._marked for heart in hearts)

    hearts: list[registry._Heart] = []
    monkeypatch.setattr(
        registry, "_Heart", lambda *arguments, kind=registry._Heart: hearts.append(kind(*arguments)) or hearts[-1]
    )
    async with beating(store, monkeypatch):
        await store.drain("v1")
        await eventually(heard)
        await server.flushall()
        await eventually(marked)
        await store.drain("v1", draining=False)
        assert not await marked()

        async def forgotten() -> bool:
            return not await heard()

        await eventually(forgotten)
        assert not await marked()
    assert await store.replicas() == []


async def test_a_mark_of_an_earlier_life_is_not_believed(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.announce(VERIFIER, 60)
    await store.drain("v1")
    async with beating(store, monkeypatch):
        assert await store.replicas() == [VERIFIER]


# Rates.


async def test_a_count_that_is_given_back_is_free_for_every_gateway(server: Redis, port: int) -> None:
    del server
    one, other = (RateLimit(f"redis://{HOST}:{port}", timeout_s=30) for _ in range(2))
    await one.count(ALICE)
    await one.count(ALICE)
    await one.give_back(ALICE)
    assert await other.count(ALICE)
    with pytest.raises(OverloadedError):
        await one.count(ALICE)
    await one.close()
    await other.close()

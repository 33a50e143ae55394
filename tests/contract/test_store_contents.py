"""A store that holds what nobody should have written, or what somebody else has just written, on real servers."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from redis.asyncio import Redis

from paceline.gateway.sessions.records import RecordWriter
from paceline.store.base import (
    LoggedSession,
    PutSession,
    SessionState,
    Written,
)
from paceline.store.redis import REPLICA_INDEX, REPLICA_PREFIX, RedisStore
from tests.contract.test_store import PROMPT, SESSION, VERIFIER, put
from tests.unit.gateway.sessions.test_records import opened

RECORD_KEY, LOG_KEY = "paceline:session:{s1}", "paceline:tokens:{s1}"


async def test_an_entry_that_cannot_be_read_costs_itself_only_and_is_told_of_once(
    server: Redis, store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    await store.announce(VERIFIER, 60)
    written: dict[str, Any] = json.loads(json.dumps(asdict(VERIFIER)))
    strange = {
        "list": json.dumps({**written, "replica_id": "list", "role": ["verifier"]}),
        "other": json.dumps(written),
        "deep": "[" * 100_000,
        "bytes": b"\xff\x00",
        "empty": "",
    }
    for name, entry in strange.items():
        await server.set(REPLICA_PREFIX + name, entry, px=60_000)
    await server.rpush(REPLICA_PREFIX + "wrong type", "x")
    await server.sadd(REPLICA_INDEX, *strange, "wrong type", b"\xfe")
    for _ in range(3):
        assert await store.replicas() == [VERIFIER]
        assert await store.replicas("verifier") == [VERIFIER]
    assert store.num_bad_entries == len(strange) + 1
    names = [vars(record)["replica_id"] for record in caplog.records]
    assert sorted(names) == sorted([*strange, "wrong type"])
    [of_list] = [str(vars(each)["error"]) for each in caplog.records if vars(each)["replica_id"] == "list"]
    assert of_list == "entry.role: must be of type str, got ['verifier']"
    await server.delete(*(REPLICA_PREFIX + name for name in strange), REPLICA_PREFIX + "wrong type")
    assert await store.replicas() == [VERIFIER]
    assert store.num_bad_entries == 0


async def spoil_state(server: Redis) -> None:
    await server.hset(RECORD_KEY, "state", "asleep")


async def spoil_field(server: Redis) -> None:
    await server.hdel(RECORD_KEY, "prompt_len")


async def spoil_record_type(server: Redis) -> None:
    await server.set(RECORD_KEY, "x")


async def spoil_log_type(server: Redis) -> None:
    await server.delete(LOG_KEY)
    await server.sadd(LOG_KEY, "x")


async def cut_log(server: Redis) -> None:
    await server.set(LOG_KEY, (await server.get(LOG_KEY) or b"")[:-4])


async def cut_token(server: Redis) -> None:
    await server.append(LOG_KEY, "x")


SPOILERS = [spoil_state, spoil_field, spoil_record_type, spoil_log_type, cut_log, cut_token]


@pytest.mark.parametrize("spoil", SPOILERS)
async def test_a_record_that_cannot_be_read_is_an_unknown_one(
    spoil: Callable[[Redis], Awaitable[None]], server: Redis, store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    await put(store, replace(SESSION, committed_len=2))
    await spoil(server)
    with caplog.at_level(logging.WARNING):
        assert await store.session("s1") is None
        assert await store.claim_session("s1", "g2") is None
    assert {record.message for record in caplog.records} == {"a session record cannot be read"}


async def test_one_write_that_cannot_be_made_leaves_the_others_their_answers(server: Redis, store: RedisStore) -> None:
    await server.set(RECORD_KEY, "x")
    writes = [
        PutSession(record=replace(SESSION, session_id=name), token_ids=PROMPT, ttl_s=60) for name in ("s0", "s1", "s2")
    ]
    assert await store.write_sessions(writes) == [Written.DONE, Written.REFUSED, Written.DONE]
    for name in ("s0", "s2"):
        assert await store.session(name) is not None


async def test_one_session_that_cannot_be_recorded_does_not_keep_others_from_it(
    server: Redis, store: RedisStore
) -> None:
    await server.set(RECORD_KEY, "x")
    now_s = 0.0
    writer = RecordWriter(store, ttl_s=60, owner="g1", clock=lambda: now_s)
    recorded_sessions = [opened(writer, session_id=name) for name in ("s1", "s2")]
    for step in range(3):
        for recorded in recorded_sessions:
            recorded.extend((10 + step,))
        await writer.flush()
        logged = await store.session("s2")
        assert logged is not None
        assert logged.token_ids[-1] == 10 + step
    await server.delete(RECORD_KEY)
    await writer.flush()
    logged = await store.session("s1")
    assert logged is not None
    assert logged.token_ids[-3:] == (10, 11, 12)


async def test_an_ended_session_whose_record_is_refused_is_given_up(server: Redis, store: RedisStore) -> None:
    await server.set(RECORD_KEY, "x")
    writer = RecordWriter(store, ttl_s=60, owner="g1")
    opened(writer, session_id="s1").end(SessionState.STOP)
    opened(writer, session_id="s2")
    await writer.flush()
    assert [recorded.record.session_id for recorded in (*writer._changed, *writer._open)] == ["s2"]


# Claims.


async def test_a_claim_gives_the_log_of_the_moment_of_the_claim(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(store)
    read = store.session

    async def read_then_grow(session_id: str) -> LoggedSession | None:
        logged = await read(session_id)
        await put(store, replace(SESSION, committed_len=2))
        return logged

    monkeypatch.setattr(store, "session", read_then_grow)
    claimed = await store.claim_session("s1", "g2")
    assert claimed is not None
    assert (claimed.record.committed_len, claimed.token_ids) == (2, (*PROMPT, 0, 1))

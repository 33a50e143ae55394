"""Requests are counted by key; a store that does not answer stops nothing and is left alone for a while."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.core.errors import OverloadedError
from paceline.gateway.access.keys import ApiKey
from paceline.gateway.access.rate_limit import REST_S, RateLimit

ALICE = ApiKey(name="alice", digest=bytes(32), requests_per_minute=2)
BOB = replace(ALICE, name="bob")


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"redis://127.0.0.1:{server.getsockname()[1]}"


async def test_a_key_over_its_limit_is_told_when_to_come_again_and_others_are_served() -> None:
    limit = RateLimit("memory://")
    await limit.count(ALICE)
    await limit.count(ALICE)
    with pytest.raises(OverloadedError, match="'alice' has had its 2 requests per minute") as caught:
        await limit.count(ALICE)
    assert 0 < caught.value.retry_after_s <= 60
    await limit.count(BOB)


async def test_a_store_that_does_not_answer_stops_nobody_and_is_asked_again_later(
    silent_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 100.0
    limit = RateLimit(silent_server, timeout_s=0.02, clock=lambda: now_s)
    await limit.count(replace(ALICE, requests_per_minute=None))
    assert not caplog.records, "a key without a limit is never counted"
    with caplog.at_level(logging.INFO):
        await limit.count(ALICE)
        # At rest the store is not asked: a deadline that has passed already would be noticed.
        limit._timeout_s = -1.0
        for _ in range(5):
            await limit.count(ALICE)
        assert limit._rests_until_s == now_s + REST_S
        now_s += REST_S
        await limit.count(ALICE)
    assert limit._rests_until_s == now_s + REST_S
    assert [record.getMessage() for record in caplog.records] == ["requests are not counted, the store does not answer"]
    await limit.close()


async def test_nobody_there_at_all_stops_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    limit = RateLimit(f"redis://127.0.0.1:{port}", clock=lambda: 100.0)
    for _ in range(5):
        await limit.count(ALICE)
    assert limit._rests_until_s == 100.0 + REST_S, "it was asked, and was not there"
    await limit.close()

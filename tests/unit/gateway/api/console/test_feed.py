"""Who watches is told; while nobody does, nothing is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from paceline.core.errors import OverloadedError, UnavailableError
from paceline.gateway.api.console import feed as module
from paceline.gateway.api.console.feed import MAX_WAITING_FRAMES, ConsoleFeed, Read
from paceline.gateway.api.console.figures import Reading
from paceline.gateway.api.console.frames import OwnCounts
from paceline.store.base import Replica

VERIFIER = Replica(replica_id="v", role="verifier", address="h:1", metrics_address="h:2")
OWN = OwnCounts(replica_id="g", num_sessions=0, sessions_at={}, tokens=0.0)


class Fleet:
    """Replicas whose metrics can be read, and how often they were."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = replicas
        self.reads: list[str] = []
        self.readers = 0
        self.fault: Exception | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Read]:
        self.readers += 1
        try:
            yield self.read
        finally:
            self.readers -= 1

    async def read(self, replica: Replica) -> Reading | None:
        self.reads.append(replica.replica_id)
        if self.fault is not None:
            raise self.fault
        return Reading(taken_s=float(len(self.reads)), samples={})

    def feed(self) -> ConsoleFeed:
        return ConsoleFeed(lambda: self.replicas, lambda: OWN, open_reader=self.open, interval_s=0.0)


async def test_nothing_is_read_until_somebody_watches_and_after_the_last_has_left() -> None:
    fleet = Fleet(VERIFIER)
    feed = fleet.feed()
    assert feed._polling is None
    with feed.watching() as first:
        with feed.watching() as second:
            assert (await first.get(), (await second.get())) != (None, None)
            assert fleet.readers == 1
        assert feed._polling is not None
    assert (feed._polling, feed._viewers) == (None, set())
    await asyncio.sleep(0)
    reads = len(fleet.reads)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (len(fleet.reads), fleet.readers) == (reads, 0)


async def test_a_viewer_that_comes_back_is_told_again() -> None:
    feed = Fleet(VERIFIER).feed()
    for _ in range(2):
        with feed.watching() as frames:
            assert await frames.get() is not None


async def test_a_slow_viewer_loses_the_oldest_frames_and_delays_nobody() -> None:
    fleet = Fleet(VERIFIER)
    feed = fleet.feed()
    with feed.watching() as slow, feed.watching() as quick:
        for _ in range(5 * MAX_WAITING_FRAMES):
            await quick.get()
        assert slow.qsize() == MAX_WAITING_FRAMES


async def test_one_viewer_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VIEWERS", 2)
    feed = Fleet().feed()
    with feed.watching():
        with feed.watching():
            with pytest.raises(OverloadedError, match="2 of 2 viewers of this console are taken"):
                with feed.watching():
                    pass
        with feed.watching():
            assert len(feed._viewers) == 2


async def test_closing_sends_viewers_home_and_refuses_others() -> None:
    fleet = Fleet(VERIFIER)
    feed = fleet.feed()
    with feed.watching() as frames:
        await frames.get()
        await feed.close()
        while await frames.get() is not None:
            continue
        assert fleet.readers == 0
    with pytest.raises(UnavailableError):
        with feed.watching():
            pass


async def test_a_fault_ends_the_figures_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(VERIFIER)
    fleet.fault = RuntimeError("planted")
    feed = fleet.feed()
    with feed.watching() as frames:
        assert await frames.get() is None
    assert "the console's figures have ended" in caplog.text
    fleet.fault = None
    with feed.watching() as frames:
        assert await frames.get() is not None


async def test_only_replicas_that_announce_where_are_read() -> None:
    silent = Replica(replica_id="old", role="drafter", address="h:3")
    gateway = Replica(replica_id="g", role="gateway", address="h:4", metrics_address="h:5")
    fleet = Fleet(VERIFIER, silent, gateway)
    with fleet.feed().watching() as frames:
        await frames.get()
    assert set(fleet.reads) == {"v"}

"""Session records are written in the background; a store that dies, forgets or fences costs records only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import UnavailableError
from paceline.core.messages import ModelIdentity
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.sessions.recorded import RecordedSession
from paceline.gateway.sessions.records import RENEWAL_S, RecordWriter, session_record
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.take_over import RUNNING_S, Resumption
from paceline.store.base import LoggedSession, PutSession, Replica, SessionState, SessionWrite, Written
from tests.support.memory_store import MemoryStore

IDENTITY = ModelIdentity(name="tiny", vocab_hash="h", vocab_size=100, context_len=64)
PROMPT = (1, 2, 3)


class CountingStore(MemoryStore):
    """Counts exchanges; does not answer while it is `away`."""

    def __init__(self) -> None:
        super().__init__(lambda: self.now_s)
        self.now_s = 0.0
        self.away = False
        self.exchanges: list[list[SessionWrite]] = []

    async def write_sessions(self, writes: Sequence[SessionWrite]) -> list[Written]:
        self.exchanges.append(list(writes))
        if self.away:
            raise UnavailableError("no answer")
        return await super().write_sessions(writes)

    async def logged(self, session_id: str = "s") -> LoggedSession:
        found = await self.session(session_id)
        assert found is not None
        return found


def request(**changes: Any) -> SessionRequest:
    fields: dict[str, Any] = {
        "model": ServedModel(identity=IDENTITY, codec=None),  # type: ignore[arg-type]  # no text here
        "session_id": "s",
        "prompt_token_ids": PROMPT,
        "sampling": SamplingParams(max_tokens=8, seed=5),
        "speculation": SpeculationParams(),
        "stops": ("END",),
    }
    return SessionRequest(**{**fields, **changes})


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def writer(store: CountingStore) -> RecordWriter:
    return RecordWriter(store, ttl_s=60, owner="g1", clock=lambda: store.now_s)


def verifier(name: str, **identity: Any) -> Replica:
    return Replica(replica_id=name, role="verifier", address=f"{name}:1", identity=replace(IDENTITY, **identity))


def opened(writer: RecordWriter, taken_over: list[str] | None = None, **changes: Any) -> RecordedSession:
    asked = request(**changes)
    lost = [] if taken_over is None else taken_over
    recorded = writer.open(asked, lambda: lost.append(asked.session_id))
    recorded.placed(asked.epoch, verifier("v"))
    return recorded


def test_a_record_holds_what_a_resume_needs_but_no_tokens() -> None:
    record = session_record(request(), "g1")
    parameters = json.loads(record.params_json)
    assert (record.prompt_len, record.committed_len, record.owner) == (3, 0, "g1")
    assert parameters["sampling"]["seed"] == 5
    assert parameters["sampling"]["max_tokens"] == 8
    assert parameters["stop"] == ["END"]


async def test_progress_is_written_once_a_flush_and_nothing_where_nothing_has_changed(
    writer: RecordWriter, store: CountingStore
) -> None:
    writer.open(request(), lambda: None).end(SessionState.FAILED)
    await writer.flush()
    assert not store.exchanges, "it never found a verifier"
    recorded = opened(writer)
    recorded.extend((10, 11, 12))
    assert await store.session("s") is None
    for _ in range(3):
        await writer.flush()
    logged = await store.logged()
    assert logged.token_ids == (*PROMPT, 10, 11, 12)
    assert (logged.record.committed_len, logged.record.verifier_id) == (3, "v")
    for token_id in range(13, 17):
        recorded.extend((token_id,))
    recorded.end(SessionState.LENGTH)
    await writer.flush()
    logged = await store.logged()
    assert logged.token_ids == (*PROMPT, *range(10, 17))
    assert logged.record.state is SessionState.LENGTH
    assert [len(exchange) for exchange in store.exchanges] == [1, 1]


async def test_a_session_that_moves_is_written_whole_with_its_new_place(
    writer: RecordWriter, store: CountingStore
) -> None:
    recorded = opened(writer)
    recorded.extend((10, 11))
    await writer.flush()
    recorded.placed(2, verifier("v2"))
    recorded.extend((12,))
    await writer.flush()
    logged = await store.logged()
    assert (logged.record.epoch, logged.record.verifier_id, logged.token_ids) == (2, "v2", (*PROMPT, 10, 11, 12))
    recorded.extend((13,))
    await writer.flush()
    assert not isinstance(store.exchanges[-1][0], PutSession)


async def test_what_a_dead_store_misses_or_forgets_is_written_when_it_is_back(
    writer: RecordWriter, store: CountingStore
) -> None:
    recorded, other = opened(writer), opened(writer, session_id="other")
    store.away = True
    recorded.extend((10,))
    await writer.flush()
    recorded.extend((11,))
    other.end(SessionState.STOP)
    await writer.flush()
    store.away = False
    await writer.flush()
    assert (await store.logged()).token_ids == (*PROMPT, 10, 11)
    assert (await store.logged("other")).record.state is SessionState.STOP
    store._sessions.clear()
    recorded.extend((12,))
    await writer.flush()
    await writer.flush()
    assert (await store.logged()).token_ids == (*PROMPT, 10, 11, 12), "a store that forgot everything gets it again"


async def test_what_a_write_that_was_cut_off_held_is_written_by_the_next(
    writer: RecordWriter, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(writer).end(SessionState.STOP)
    asked = asyncio.Event()

    async def hang(writes: Sequence[SessionWrite]) -> list[Written]:
        asked.set()
        await asyncio.Event().wait()
        return []

    with monkeypatch.context() as silent:
        silent.setattr(store, "write_sessions", hang)
        writing = asyncio.create_task(writer.flush())
        await asked.wait()
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
    await writer.flush()
    assert (await store.logged()).record.state is SessionState.STOP


async def test_a_gateway_that_lost_a_session_is_told_and_writes_no_more(
    writer: RecordWriter, store: CountingStore
) -> None:
    taken_over: list[str] = []
    recorded = opened(writer, taken_over)
    await writer.flush()
    claimed = await store.claim_session("s", "g2")
    recorded.extend((10,))
    await writer.flush()
    assert taken_over == ["s"]
    recorded.extend((11,))
    recorded.end(SessionState.FAILED)
    await writer.flush()
    assert await store.session("s") == claimed


async def test_a_gateway_learns_of_a_session_that_was_taken_while_it_waits_for_a_token(
    writer: RecordWriter, store: CountingStore
) -> None:
    taken_over: list[str] = []
    opened(writer, taken_over)
    await writer.flush()
    await store.claim_session("s", "g2")
    await writer.flush()
    assert not taken_over
    store.now_s += RENEWAL_S + 1
    await writer.flush()
    assert taken_over == ["s"]


async def test_a_session_without_news_is_renewed_before_its_record_expires_until_it_ends(
    writer: RecordWriter, store: CountingStore
) -> None:
    recorded = opened(writer)
    for _ in range(10):
        store.now_s += 25
        await writer.flush()
    assert await store.session("s") is not None
    recorded.end(SessionState.STOP)
    await writer.flush()
    store.now_s += 61
    await writer.flush()
    assert await store.session("s") is None


async def test_a_new_session_does_not_wait_for_the_interval(writer: RecordWriter, store: CountingStore) -> None:
    writing = asyncio.create_task(writer.keep_writing(interval_s=3600))
    try:
        opened(writer)
        async with asyncio.timeout(30):
            while await store.session("s") is None:  # noqa: ASYNC110 - the writer gives no event
                await asyncio.sleep(0.01)
        assert not writing.done(), "it goes on to wait"
    finally:
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing


async def test_a_resumed_session_is_recorded_with_the_tokens_of_its_former_owner(
    writer: RecordWriter, store: CountingStore
) -> None:
    opened(writer, epoch=1 << 16, committed_token_ids=(10, 11)).extend((12,))
    await writer.flush()
    logged = await store.logged()
    assert (logged.token_ids, logged.record.committed_len) == ((*PROMPT, 10, 11, 12), 3)


@pytest.mark.parametrize(
    ("arithmetic", "distribution_only"),
    [("", False), ("cpu x86_64, torch 2", False), ("vllm 0.32.0, torch 2", True), ("cuda 13.0 on H100, torch 2", True)],
)
def test_a_text_that_vllm_or_a_gpu_had_a_part_in_is_promised_in_distribution_only(
    arithmetic: str, distribution_only: bool
) -> None:
    recorded = RecordedSession(
        session_record(request(), "me"), PROMPT, lambda _: None, lambda: None, keeps_tokens=False
    )
    assert not recorded.distribution_only
    recorded.placed(1, verifier("v", arithmetic=arithmetic, weights_hash="w"))
    assert recorded.distribution_only is distribution_only
    recorded.extend((4,))
    recorded.placed(2, verifier("v", arithmetic="cpu x86_64, torch 2", weights_hash="w"))
    assert recorded.distribution_only is distribution_only


@pytest.mark.parametrize("state", [SessionState.RUNNING, SessionState.STOP])
async def test_a_session_counts_as_run_until_its_record_is_old_whatever_its_state(state: SessionState) -> None:
    """A response whose session has ended is not interrupted: its end is about to be written."""
    store = CountingStore()
    record = replace(session_record(request(), "g0"), api_key="mine", state=state)
    await store.write_sessions([PutSession(record=record, token_ids=PROMPT, ttl_s=3600)])
    fleet: Any = None
    resumption = Resumption(store, fleet, "g1")
    store.now_s = RUNNING_S - 1
    assert await resumption.runs("s", "mine")
    assert not await resumption.runs("s", "another key")
    assert not await resumption.runs("unknown", "mine")
    store.now_s = RUNNING_S + 1
    assert not await resumption.runs("s", "mine")

"""Session records are written in the background, and a dead store costs records only."""

from __future__ import annotations

import json

from paceline.core.errors import UnavailableError
from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.records import RecordWriter, session_record
from paceline.store.base import SessionRecord
from paceline.store.memory import MemoryStore

RECORD = session_record(
    GenerateRequest(
        session_id="s",
        epoch=1,
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=8, seed=5),
        speculation=SpeculationParams(),
    ),
    model="tiny",
    verifier_id="v",
    drafter_id="",
    stops=("END",),
)


async def test_a_record_holds_what_a_resume_needs_but_no_tokens() -> None:
    parameters = json.loads(RECORD.params_json)
    assert (RECORD.seed, RECORD.prompt_len, RECORD.committed_len, RECORD.state) == (5, 3, 0, "running")
    assert parameters["sampling"]["max_tokens"] == 8
    assert parameters["stop"] == ["END"]
    assert len(RECORD.prompt_hash) == 64


async def test_progress_is_written_once_a_flush_whatever_happened_between() -> None:
    store = MemoryStore()
    writer = RecordWriter(store, ttl_s=60)
    writer.open(RECORD)
    writer.advance("s", 1, 3)
    assert await store.session("s") is None
    await writer.flush()
    written = await store.session("s")
    assert written is not None
    assert (written.committed_len, written.state) == (3, "running")
    for committed_len in range(4, 8):
        writer.advance("s", 1, committed_len)
    writer.advance("s", 1, 8, "finished")
    await writer.flush()
    written = await store.session("s")
    assert written is not None
    assert (written.committed_len, written.state) == (8, "finished")


class DeadStore:
    """A store that never answers."""

    async def put_session(self, record: SessionRecord, ttl_s: float) -> bool:
        raise UnavailableError("no answer")

    async def advance_session(self, session_id: str, epoch: int, committed_len: int, state: str) -> bool:
        raise UnavailableError("no answer")


async def test_a_dead_store_raises_nothing() -> None:
    writer = RecordWriter(DeadStore(), ttl_s=60)
    writer.open(RECORD)
    writer.advance("s", 1, 1)
    await writer.flush()
    writer.advance("s", 1, 2)
    await writer.flush()

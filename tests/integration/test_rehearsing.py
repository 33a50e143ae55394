"""A verifier rehearses with a real drafter while nobody waits: it shows nowhere, and yields to sessions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from paceline.core.draft_policy import Goodput
from paceline.core.messages import GenerateRequest
from paceline.core.params import DRAFT_MODEL, SamplingParams, SpeculationParams
from paceline.engine import rehearsing as engine_rehearsing
from paceline.service.learned import TunedState
from paceline.service.supervision import TaskSupervisor
from paceline.verifier.rehearsing import MOST_BYTES, TTL_S, WORK_S, SharedTuning, is_taught, is_usable
from paceline.verifier.verifier_host import TargetHost
from tests.integration.conftest import know, running_drafter, verifier_at
from tests.support.log_stream import VerifierCalls, verifier_calls
from tests.support.memory_store import MemoryStore

Pair = tuple[Path, Path]
REQUEST = GenerateRequest(
    session_id="s",
    epoch=1,
    prompt_token_ids=tuple(range(5, 25)),
    sampling=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    speculation=SpeculationParams(),
)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rehearsing, "IDLE_S", 0.1)
    monkeypatch.setattr(engine_rehearsing, "TAKE_S", 0.1)


@asynccontextmanager
async def rehearsing(
    pair: Pair, store: MemoryStore, policy: Goodput, file: TunedState
) -> AsyncIterator[tuple[TargetHost, VerifierCalls]]:
    """A verifier with its background tasks, and a drafter that it knows."""
    async with (
        running_drafter(pair[1]) as (drafter, _),
        verifier_at(pair[0], (DRAFT_MODEL,), 2, policy=policy, learned=file) as (address, host),
        verifier_calls(address) as calls,
        TaskSupervisor(CollectorRegistry()).kept(host.background(store)),
    ):
        know(host, drafter)
        yield host, calls


async def test_a_rehearsal_is_found_by_its_kind_and_shows_in_no_metric(tiny_pair: Pair, tmp_path: Path) -> None:
    store, first, second = MemoryStore(), Goodput(), Goodput()
    async with rehearsing(tiny_pair, store, first, TunedState(tmp_path / "one.json", "kind")) as (host, calls):
        await asyncio.wait_for(host._rehearser.done.wait(), 60.0)
        assert await calls.tokens(REQUEST)
        # The last step may not be counted yet; those of a rehearsal commit hundreds.
        assert host._metrics.meter.by_name["vllm:generation_tokens"]._value.get() <= REQUEST.sampling.max_tokens
        assert first.rehearsed
    async with rehearsing(tiny_pair, store, second, TunedState(tmp_path / "two.json", "kind")) as (host, calls):
        await asyncio.wait_for(host._rehearser.done.wait(), 60.0)
        assert await calls.tokens(REQUEST)
    assert second.rehearsed, "by what lies in the store"
    assert [*second.mode.loads] == [*first.mode.loads] == [0, 1]


@pytest.mark.parametrize(
    "content", [b"{}", b"[", b'{"policy": {"rehearsed": "draft"}, "calibrations": {}}', b"[" * 10_000]
)
def test_a_tuning_of_the_store_that_no_engine_can_begin_with_is_none(content: bytes) -> None:
    assert not is_usable(content, "draft")


def rehearsed(**calibrations: object) -> bytes:
    policy = Goodput()
    policy.rehearse(None, over="draft")
    return json.dumps({"policy": policy.learned(), "calibrations": calibrations}).encode()


def test_a_tuning_of_the_store_is_read_up_to_its_bound() -> None:
    """Audit 4, b07: one of 15 MiB held the event loop for 1.7 s."""
    content = rehearsed()
    assert is_usable(content + b" " * (MOST_BYTES - len(content)), "draft")
    assert not is_usable(content + b" " * (MOST_BYTES - len(content) + 1), "draft")


def test_what_was_rehearsed_with_another_draft_model_is_rehearsed_anew() -> None:
    policy = Goodput()
    policy.rehearse(None, over="draft")
    learned = {"policy": policy.learned(), "calibrations": {}}
    assert is_taught(learned, "draft")
    assert not is_taught(learned, "another")
    assert is_usable(json.dumps(learned).encode(), "draft")
    assert not is_usable(json.dumps(learned).encode(), "another")
    assert not is_taught({}, "draft"), "a helper that does not answer"


async def test_a_session_that_comes_in_the_midst_is_served_as_if_there_were_no_rehearsal(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, begun = Goodput(), asyncio.Event()
    rehearse = policy.rehearse

    def watched(drafts: bool | None, *, over: str = "") -> None:
        rehearse(drafts, over=over)
        begun.set()

    monkeypatch.setattr(policy, "rehearse", watched)
    async with rehearsing(tiny_pair, MemoryStore(), policy, TunedState(None, "kind")) as (host, calls):
        await asyncio.wait_for(begun.wait(), 60.0)
        amid = await calls.tokens(REQUEST)
        assert not policy.rehearsed
        await asyncio.wait_for(host._rehearser.done.wait(), 60.0)
        assert await calls.tokens(REQUEST) == amid
        assert policy.rehearsed, "it has gone on"


async def test_one_of_a_kind_rehearses_unless_it_is_gone() -> None:
    now_s = [0.0]
    store = MemoryStore(clock=lambda: now_s[0])
    one, other, stranger = (SharedTuning(store, kind) for kind in ("kind", "kind", "another"))
    assert await one.claim()
    assert not await other.claim()
    assert await stranger.claim()
    assert not await other.learned()
    now_s[0] += WORK_S + 1.0
    assert await other.claim()
    await other.put({"policy": {}})
    assert await one.learned() == b'{"policy": {}}'
    now_s[0] += TTL_S - 1.0
    assert not await one.claim()
    assert await one.claim(anew=True), "it is of no use"
    assert not await other.learned()

"""Drafter and helper die, freeze and talk nonsense in mid-text: texts stay, the engine lives, guesses come again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.cluster.checkpoints import DEMO_DRAFTER
from paceline.core.messages import ModelIdentity
from paceline.engine.loading import model_identity
from tests.vllm.client import ACCEPTED, metrics, texts_of, until_drafted
from tests.vllm.hostile import SCRIPTS, Script, flood, hostile_drafter, other_vocabulary
from tests.vllm.servers import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

NUM_TOKENS = 96
STREAMS = 4
HELPER_S = 60.0


@pytest.fixture(scope="module")
def expected(plain, prompts) -> list[list[int]]:
    return asyncio.run(texts_of(plain.url, prompts[:STREAMS], NUM_TOKENS, STREAMS))


@pytest.fixture(scope="module")
def identity() -> ModelIdentity:
    return model_identity(DEMO_DRAFTER, "demo-drafter", "float32")


def at(num_tokens: int, strike: Callable[[], object]) -> Callable[[int], None]:
    """Strikes once so many tokens have come, of all texts together."""
    come = 0

    def take(count: int) -> None:
        nonlocal come
        before, come = come, come + count
        if before < num_tokens <= come:
            strike()

    return take


@pytest.fixture
async def well(tiered: Vllm, drafter, prompts) -> Iterator[Vllm]:
    """The tier at work before a test and after it, in one engine that was never started again."""
    await until_drafted(tiered.url, prompts[-1])
    pid = tiered.pid
    yield tiered
    assert tiered.lives
    assert tiered.pid == pid
    await until_drafted(tiered.url, prompts[-1])


async def test_a_drafter_is_killed_in_mid_text_and_comes_back(well, drafter, prompts, expected) -> None:
    half = STREAMS * NUM_TOKENS // 2
    assert await texts_of(well.url, prompts[:STREAMS], NUM_TOKENS, STREAMS, at(half, drafter.kill)) == expected
    before = (await metrics(well.url))[ACCEPTED]
    assert await texts_of(well.url, prompts[:STREAMS], NUM_TOKENS, STREAMS) == expected
    assert (await metrics(well.url))[ACCEPTED] == before
    drafter.start()


async def test_a_drafter_freezes_in_mid_text_and_thaws(well, drafter, prompts, expected) -> None:
    half = STREAMS * NUM_TOKENS // 2
    try:
        assert await texts_of(well.url, prompts[:STREAMS], NUM_TOKENS, STREAMS, at(half, drafter.freeze)) == expected
        assert await texts_of(well.url, prompts[:STREAMS], NUM_TOKENS, STREAMS) == expected
    finally:
        drafter.thaw()


async def test_the_helper_is_killed_in_mid_text_and_another_takes_its_place(well, prompts, expected) -> None:
    (helper,) = well.helpers()

    def kill() -> None:
        os.kill(helper, signal.SIGKILL)

    half = STREAMS * NUM_TOKENS // 2
    assert await texts_of(well.url, prompts[:STREAMS], NUM_TOKENS, STREAMS, at(half, kill)) == expected
    deadline_s = time.monotonic() + HELPER_S
    while helper in well.helpers() or not well.helpers():
        assert time.monotonic() < deadline_s, "no helper was started again"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
async def test_a_hostile_drafter_changes_no_text(well, drafter, identity, prompts, expected, script: Script) -> None:
    drafter.kill()
    try:
        with hostile_drafter(drafter.port, identity, script) as hostile:
            await until_said(well, prompts[-1], lambda: hostile.num_said)
            assert await texts_of(well.url, prompts[:STREAMS], NUM_TOKENS, STREAMS) == expected
    finally:
        drafter.start()


async def test_a_drafter_of_another_vocabulary_drafts_for_nobody(well, drafter, identity, prompts, expected) -> None:
    drafter.kill()
    try:
        with hostile_drafter(drafter.port, other_vocabulary(identity), flood) as hostile:
            await until_said(well, prompts[-1], lambda: hostile.num_met)
            assert await texts_of(well.url, prompts[:STREAMS], NUM_TOKENS, STREAMS) == expected
            assert not hostile.num_said
    finally:
        drafter.start()


async def until_said(server: Vllm, prompt: list[int], count: Callable[[], int]) -> None:
    """Keeps a text running until the helper has met the drafter that is there now."""
    deadline_s = time.monotonic() + HELPER_S
    while not count():
        assert time.monotonic() < deadline_s, "the helper did not come"
        await texts_of(server.url, [prompt], 16, 1)

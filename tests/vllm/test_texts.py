"""Greedy texts in float32 with the drafter tier are those without, token for token, however many decode at once."""

from __future__ import annotations

import asyncio

import pytest

from tests.vllm.client import ACCEPTED, metrics, texts_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_TOKENS = 128
AT_ONCE = 8
# Of a text, if guesses came for it at all.
LEAST_ACCEPTED = NUM_TOKENS / 4


@pytest.fixture(scope="module")
def expected(plain, prompts) -> list[list[int]]:
    """What vLLM says without us."""
    return asyncio.run(texts_of(plain.url, prompts, NUM_TOKENS, AT_ONCE))


def num_different(texts: list[list[int]], expected: list[list[int]]) -> int:
    assert [len(text) for text in texts] == [NUM_TOKENS] * len(expected)
    return sum(text != right for text, right in zip(texts, expected, strict=True))


async def test_no_text_differs_at_8_and_more_at_once(tiered, prompts, expected) -> None:
    before = (await metrics(tiered.url))[ACCEPTED]
    # One alone, where the controller drafts for certain; then so many that it may let it be.
    assert await texts_of(tiered.url, prompts[:2], NUM_TOKENS, 1) == expected[:2]
    assert (await metrics(tiered.url))[ACCEPTED] > before
    for at_once in (AT_ONCE, 4 * AT_ONCE):
        assert num_different(await texts_of(tiered.url, prompts, NUM_TOKENS, at_once), expected) == 0


async def test_no_text_differs_when_all_guesses_are_verified(steady, prompts, expected) -> None:
    before = (await metrics(steady.url))[ACCEPTED]
    assert num_different(await texts_of(steady.url, prompts, NUM_TOKENS, 2 * AT_ONCE), expected) == 0
    assert (await metrics(steady.url))[ACCEPTED] > before + LEAST_ACCEPTED * len(prompts)

"""Above temperature 0 tokens are drawn from the target's law, drafts or none: held against plain vLLM's own counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from tests.vllm.client import ACCEPTED, DRAFTED, ask, choices, client, metrics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TEMPERATURE = 0.8
# The first token of a text is never guessed: vLLM asks for guesses when it has one.
LENGTH, PROMPTS = 3, 2
SAMPLES, CHOICES, REQUESTS_AT_ONCE = 768, 16, 2
DETECTED = 1e-4
LEAST_EXPECTED = 8

Counts = Counter[tuple[int, ...]]


async def sampled(url: str, prompts: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    """Short continuations of each prompt; without a seed, since rows with one are slow on a CPU."""
    gate = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async with client() as http:

        async def some(prompt: Sequence[int]) -> list[tuple[int, ...]]:
            settings = {"temperature": TEMPERATURE, "n": CHOICES}
            async with gate:
                return [tuple(text) for text in await choices(http, url, ask(prompt, LENGTH, **settings))]

        each = SAMPLES // CHOICES
        drawn = await asyncio.gather(*(some(prompt) for prompt in prompts for _ in range(each)))
    return [[text for texts in drawn[at : at + each] for text in texts] for at in range(0, len(drawn), each)]


def p_value(some: Counts, others: Counts) -> float:
    """Of Pearson's chi-square that two samples have one law; what is rare in both shares a bin."""
    totals = [sum(some.values()), sum(others.values())]
    rare = [0, 0]
    bins: list[tuple[int, int]] = []
    for outcome in some.keys() | others.keys():
        pair = some[outcome], others[outcome]
        if min(totals) * sum(pair) / sum(totals) >= LEAST_EXPECTED:
            bins.append(pair)
        else:
            rare = [rare[0] + pair[0], rare[1] + pair[1]]
    bins += [(rare[0], rare[1])] if sum(rare) else []
    statistic = 0.0
    for pair in bins:
        for found, total in zip(pair, totals, strict=True):
            expected = total * sum(pair) / sum(totals)
            statistic += (found - expected) ** 2 / expected
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


async def test_tokens_have_the_law_of_plain_vllms(plain, steady, prompts) -> None:
    chosen = prompts[:PROMPTS]
    expected = await sampled(plain.url, chosen)
    before = await metrics(steady.url)
    found = await sampled(steady.url, chosen)
    after = await metrics(steady.url)
    # At least one guess for every other text, and some right and some wrong ones.
    drafted, accepted = after[DRAFTED] - before[DRAFTED], after[ACCEPTED] - before[ACCEPTED]
    assert drafted > PROMPTS * SAMPLES / 2
    assert 0 < accepted < drafted
    for ours, theirs in zip(found, expected, strict=True):
        for ends in range(2, LENGTH + 1):
            assert p_value(counted(ours, ends), counted(theirs, ends)) > DETECTED


def counted(texts: Sequence[tuple[int, ...]], ends: int) -> Counts:
    return Counter(text[ends - 2 : ends] for text in texts)

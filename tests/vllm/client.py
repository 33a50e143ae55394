"""Asks a `vllm serve` for completions, and keeps token ids: equality is asserted token by token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

ANSWER_S = 120.0
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
Tokens = list[int]


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, limits=httpx.Limits(max_connections=None))


def ask(prompt: Sequence[int], max_tokens: int, **settings: Any) -> dict[str, Any]:
    """A request; greedy unless the settings say otherwise."""
    asked = {"model": "target", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0}
    return asked | {"ignore_eos": True, "return_token_ids": True, **settings}


async def choices(http: httpx.AsyncClient, url: str, asked: dict[str, Any]) -> list[Tokens]:
    """Token ids of each choice."""
    answer = await http.post(f"{url}/v1/completions", json=asked)
    assert answer.status_code == httpx.codes.OK, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


async def streamed(
    http: httpx.AsyncClient, url: str, asked: dict[str, Any], on_tokens: Callable[[int], None] = lambda _: None
) -> Tokens:
    """Token ids of one completion; `on_tokens` is told how many more have come."""
    tokens: Tokens = []
    async with http.stream("POST", f"{url}/v1/completions", json={**asked, "stream": True}) as answer:
        assert answer.status_code == httpx.codes.OK, await answer.aread()
        async for line in answer.aiter_lines():
            said = line.removeprefix("data: ")
            if not said or said == "[DONE]":
                continue
            piece = json.loads(said)
            assert "error" not in piece, piece
            new = [token_id for choice in piece["choices"] for token_id in choice["token_ids"] or ()]
            tokens += new
            on_tokens(len(new))
    return tokens


async def texts_of(
    url: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    at_once: int,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> list[Tokens]:
    """Greedy completions of all prompts, so many at once."""
    gate = asyncio.Semaphore(at_once)

    async def one(http: httpx.AsyncClient, prompt: Sequence[int]) -> Tokens:
        async with gate:
            return await streamed(http, url, ask(prompt, max_tokens), on_tokens)

    async with client() as http:
        return await asyncio.gather(*(one(http, prompt) for prompt in prompts))


async def metrics(url: str) -> dict[str, float]:
    """Samples of its `/metrics` by name, summed over their labels."""
    async with client() as http:
        text = (await http.get(f"{url}/metrics")).text
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


async def until_drafted(url: str, prompt: Sequence[int], most_s: float = 60.0) -> None:
    """Returns when guesses are accepted again, however many completions that takes."""
    deadline_s = time.monotonic() + most_s
    before = (await metrics(url))[ACCEPTED]
    while (await metrics(url))[ACCEPTED] <= before:
        assert time.monotonic() < deadline_s, f"no guess was accepted for {most_s:g} s"
        await texts_of(url, [prompt], 64, 1)

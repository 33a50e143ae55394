"""A streaming client of the gateway that keeps the time of every piece, and batches of such clients."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
from tqdm import tqdm

from paceline.checkpoints.corpus import unseen_prompts

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What to ask the gateway for; `speculation` None leaves the defaults to it, and a `traceparent` has it traced.

    `more` are further fields of the body; they count for more than what is written here.
    """

    prompt: str
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 1
    speculation: dict[str, Any] | None = None
    traceparent: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the request."""
        return {"traceparent": self.traceparent} if self.traceparent else {}

    def body(self) -> dict[str, Any]:
        """The JSON body of `/v1/completions`."""
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.speculation is not None:
            body["speculation"] = self.speculation
        return {**body, **self.more}


def asks_of(count: int, max_tokens: int, temperature: float = 0.0) -> list[Ask]:
    """Completions of prompts that the demo pair never saw, each with a seed of its own."""
    return [
        Ask(prompt=prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(unseen_prompts(count))
    ]


@dataclass(slots=True)
class Completion:
    """What came back, with times in seconds since the request was sent."""

    text: str = ""
    num_tokens: int = 0
    piece_times_s: list[float] = field(default_factory=list)
    piece_chars: list[int] = field(default_factory=list)
    started_s: float = 0.0
    seconds: float = 0.0
    record: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def tokens_until(self, time_s: float) -> float:
        """Tokens that had come so many seconds after the batch started, by their share of the text."""
        pairs = zip(self.piece_times_s, self.piece_chars, strict=True)
        chars = sum(count for at_s, count in pairs if self.started_s + at_s <= time_s)
        return self.num_tokens * chars / max(1, sum(self.piece_chars))

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces."""
        return [later - sooner for sooner, later in zip(self.piece_times_s, self.piece_times_s[1:], strict=False)]

    @property
    def decode_s(self) -> float:
        """Seconds from the first piece to the last."""
        return self.piece_times_s[-1] - self.piece_times_s[0]

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first piece, over the time from it to the last."""
        return (self.num_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


def http_client(max_connections: int = 0) -> aiohttp.ClientSession:
    """A client for `complete`; its parser is compiled, since it shares the cores of what it measures.

    Args:
        max_connections: At once; 0: any number.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=max_connections), timeout=TIMEOUT)


async def complete(
    client: aiohttp.ClientSession, url: str, ask: Ask, on_text: Callable[[str], None] | None = None
) -> Completion:
    """Streams one completion; an error of the server ends up in `Completion.error`."""
    completion = Completion()
    started_s = time.perf_counter()
    async with client.post(f"{url}/v1/completions", json=ask.body(), headers=ask.headers) as response:
        if response.status != HTTPStatus.OK:
            completion.error = await response.text(errors="replace")
            return completion
        async for line in response.content:
            if line.startswith(b"data: {"):
                _take(completion, json.loads(line[len(b"data: ") :]), time.perf_counter() - started_s, on_text)
    completion.seconds = time.perf_counter() - started_s
    return completion


async def completed(
    client: aiohttp.ClientSession, url: str, ask: Ask, on_text: Callable[[str], None] | None = None
) -> Completion:
    """Streams one completion to its end.

    Raises:
        RuntimeError: It failed; the message is the server's.
    """
    completion = await complete(client, url, ask, on_text)
    if completion.error:
        raise RuntimeError(completion.error)
    return completion


def _take(completion: Completion, event: dict[str, Any], now_s: float, on_text: Callable[[str], None] | None) -> None:
    if "error" in event:
        completion.error = json.dumps(event["error"])
        return
    for choice in event.get("choices", []):
        if choice.get("text"):
            completion.text += choice["text"]
            completion.piece_times_s.append(now_s)
            completion.piece_chars.append(len(choice["text"]))
            if on_text is not None:
                on_text(choice["text"])
    if event.get("usage"):
        completion.num_tokens = event["usage"]["completion_tokens"]
    if event.get("metrics"):
        completion.record = event["metrics"]["speculative_decoding"]


@dataclass(frozen=True, slots=True)
class Completions:
    """Several completions, and what speculation did for all of them."""

    completions: Sequence[Completion]

    @property
    def texts(self) -> tuple[str, ...]:
        """What was generated."""
        return tuple(each.text for each in self.completions)

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens/s from each completion's first piece to its last."""
        return sum(each.num_tokens - 1 for each in self.completions) / sum(each.decode_s for each in self.completions)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds."""
        return 1.0 + self._each("num_accepted_draft_tokens", "num_spec_steps")

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens."""
        return self._each("num_accepted_draft_tokens", "num_draft_tokens")

    @property
    def mean_gamma(self) -> float:
        """Draft tokens a round."""
        return self._each("num_draft_tokens", "num_spec_steps")

    @property
    def hit_rate(self) -> float:
        """Rounds whose committed tokens were all in the tree already, among all."""
        hits = self.total("num_hits")
        return hits / max(1, hits + self.total("num_misses"))

    @property
    def mean_batch_size(self) -> float:
        """Decoding sessions in a step, averaged over sessions."""
        return statistics.fmean(each.record.get("mean_batch_size", 0.0) for each in self.completions)

    def total(self, key: str) -> int:
        """Sum of one entry of the speculation records."""
        return sum(int(each.record.get(key, 0)) for each in self.completions)

    def _each(self, key: str, per: str) -> float:
        return self.total(key) / max(1, self.total(per))


@dataclass(frozen=True, slots=True)
class BatchResult(Completions):
    """Completions of one run at one concurrency."""

    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """All output tokens over the whole time, prefill included."""
        return sum(each.num_tokens for each in self.completions) / self.seconds

    @property
    def busy_tokens_per_s(self) -> float:
        """Output tokens/s while every stream was busy: until the first of them found no request left to send."""
        last_start_s = max(each.started_s for each in self.completions)
        until_s = min(end for each in self.completions if (end := each.started_s + each.seconds) > last_start_s)
        return sum(each.tokens_until(until_s) for each in self.completions) / until_s


def joined(results: Iterable[Completions]) -> Completions:
    """All completions of several."""
    return Completions([each for result in results for each in result.completions])


def same_texts(results: Iterable[Completions]) -> bool:
    """Whether all gave the same texts, of the same requests in the same order."""
    return len({result.texts for result in results}) <= 1


async def run_batch(url: str, asks: Sequence[Ask], concurrency: int, title: str) -> BatchResult:
    """Runs all requests, `concurrency` at a time.

    Raises:
        RuntimeError: A request failed; the message is the server's.
    """
    gate = asyncio.Semaphore(concurrency)
    async with http_client(concurrency) as client:
        with tqdm(total=len(asks), desc=title, unit="request", leave=False) as bar:

            async def one(ask: Ask) -> Completion:
                async with gate:
                    sent_s = time.perf_counter() - started_s
                    completion = await complete(client, url, ask)
                completion.started_s = sent_s
                bar.update()
                return completion

            started_s = time.perf_counter()
            completions = await asyncio.gather(*(one(ask) for ask in asks))
            seconds = time.perf_counter() - started_s
    failed = [each.error for each in completions if each.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(asks)} requests failed, first: {failed[0]}")
    return BatchResult(completions=completions, seconds=seconds)

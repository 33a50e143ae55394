"""Batches of requests, so many at a time, and replays of them, and what speculation did for all together."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from loadtest.streams import Ask, Completion, Door, HttpDoor
from paceline.checkpoints.corpus import unseen_prompts


def asks_of(count: int, max_tokens: int, temperature: float = 0.0) -> list[Ask]:
    """Completions of prompts that the demo pair never saw, each with a seed of its own."""
    return [
        Ask(prompt=prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(unseen_prompts(count))
    ]


@dataclass(frozen=True, slots=True)
class Completions:
    """Several completions, and what speculation did for all of them."""

    completions: Sequence[Completion]

    @property
    def texts(self) -> tuple[str, ...]:
        """Generated texts."""
        return tuple(each.text for each in self.completions)

    @property
    def num_tokens(self) -> int:
        """All output tokens."""
        return sum(each.num_tokens for each in self.completions)

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens/s from each completion's first piece to its last."""
        return sum(each.num_tokens - 1 for each in self.completions) / sum(each.decode_s for each in self.completions)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds."""
        return 1.0 + self.per("num_accepted_draft_tokens", "num_spec_steps")

    @property
    def mean_gamma(self) -> float:
        """Draft tokens a round."""
        return self.per("num_draft_tokens", "num_spec_steps")

    @property
    def mean_batch_size(self) -> float:
        """Decoding sessions in a step, averaged over sessions."""
        return statistics.fmean(each.record.get("mean_batch_size", 0.0) for each in self.completions)

    def total(self, key: str) -> int:
        """Sum of one entry of the speculation records."""
        return sum(int(each.record.get(key, 0)) for each in self.completions)

    def per(self, key: str, per: str) -> float:
        """Divides one such sum by another."""
        return self.total(key) / max(1, self.total(per))


@dataclass(frozen=True, slots=True)
class BatchResult(Completions):
    """Completions of one run at one concurrency; times count from its start."""

    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """All output tokens over the whole time, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def busy_tokens_per_s(self) -> float:
        """Output tokens/s while every stream was busy: until the first of them found no request left to send."""
        last_start_s = max(each.started_s for each in self.completions)
        until_s = min(each.ended_s for each in self.completions if each.ended_s > last_start_s)
        return sum(each.tokens_until(until_s) for each in self.completions) / until_s


def decoded_together(completions: Sequence[Completion]) -> tuple[int, float]:
    """Tokens and seconds from the moment when all streams had their first token until one had its last."""
    first_s = max(each.counts[0][0] for each in completions)
    last_s = min(each.counts[-1][0] for each in completions)
    tokens = sum(count for each in completions for at_s, count in each.counts if first_s < at_s <= last_s)
    return tokens, max(0.0, last_s - first_s)


def joined(results: Iterable[Completions]) -> Completions:
    """All completions of several."""
    return Completions([each for result in results for each in result.completions])


def same_texts(results: Iterable[Completions]) -> bool:
    """Whether all gave the same texts, of the same requests in the same order."""
    return len({result.texts for result in results}) <= 1


async def completed(url: str, ask: Ask) -> Completion:
    """Streams one completion to its end.

    Raises:
        RuntimeError: It failed; the message is the server's.
    """
    done = await HttpDoor(url).ask(ask)
    if done.error:
        raise RuntimeError(done.message)
    return done


async def run_batch(url: str, asks: Sequence[Ask], concurrency: int, title: str) -> BatchResult:
    """Runs all requests, `concurrency` at a time.

    Raises:
        RuntimeError: A request failed; the message is the server's.
    """
    gate, door = asyncio.Semaphore(concurrency), HttpDoor(url)
    with tqdm(total=len(asks), desc=title, unit="request", leave=False) as bar:

        async def one(ask: Ask) -> Completion:
            async with gate:
                done = await door.ask(ask, origin_s)
            bar.update()
            return done

        origin_s = time.perf_counter()
        completions = await asyncio.gather(*(one(ask) for ask in asks))
        seconds = time.perf_counter() - origin_s
    failed = [each.message for each in completions if each.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(asks)} requests failed, first: {failed[0]}")
    return BatchResult(completions=completions, seconds=seconds)


async def replay(
    door: Door, asks: Sequence[Ask], on_answer: Callable[[Completion], None] = lambda _: None
) -> list[Completion]:
    """Sends requests when they are due, whether earlier ones have ended or not; returns all answers in their order."""
    origin_s = time.perf_counter()

    async def one(ask: Ask) -> Completion:
        await asyncio.sleep(max(0.0, origin_s + ask.due_s - time.perf_counter()))
        done = await door.ask(ask, origin_s)
        if not done.error and done.num_tokens != ask.max_tokens:
            done.error, done.message = "short answer", f"{done.num_tokens} of {ask.max_tokens} tokens"
        on_answer(done)
        return done

    return await asyncio.gather(*(one(ask) for ask in asks))

"""Traces of conversations: who asks when, how long, and which prefixes are shared. Knows nothing of serving.

The form is that of the public Mooncake traces: a prompt is a list of block ids, equal ids mean equal text up to there.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

TRACE_BLOCK = 512
# What is said of the real trace: 1.6 turns a conversation, half of the prompts above 6,900 tokens, 343 generated.
MORE_TURNS = 0.39
FIRST_PROMPT = (5200.0, 1.25)
LATER_PROMPT = (900.0, 1.3)
ANSWER = (270.0, 0.7)
LONGEST_PROMPT = 120_000
LONGEST_ANSWER = 2_000
THINK_S = 90.0
NUM_SYSTEM_PROMPTS = 32
LONGEST_SYSTEM_PROMPT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn of a conversation.

    Attributes:
        at_s: Arrival, from the start of the trace.
        num_input_tokens: Length of the prompt.
        num_output_tokens: Length of the answer.
        block_ids: Names of the prompt's blocks of 512 tokens, the last one perhaps not full.
        final_block_ids: The same of prompt and answer; None when the trace does not tell.
    """

    at_s: float
    num_input_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]
    final_block_ids: tuple[int, ...] | None = None

    @property
    def num_final_tokens(self) -> int:
        """Length of prompt and answer."""
        return self.num_input_tokens + self.num_output_tokens


def full_blocks(block_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Returns the ids of the blocks that are full; only these can be reused."""
    return tuple(block_ids[: num_tokens // TRACE_BLOCK])


def tokens_of(block_ids: Sequence[int], num_tokens: int) -> array[int]:
    """Returns token ids, [num_tokens], that are equal as far as the blocks are: each token is its block's id."""
    return array("I", np.repeat(np.asarray(block_ids, np.uint32), TRACE_BLOCK)[:num_tokens].tobytes())


def read_trace(path: Path) -> list[Request]:
    """Reads a trace in Mooncake's form, JSON lines, plain or gzipped.

    Raises:
        ValueError: A line is not of that form; names it.
    """
    requests = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                request = Request(
                    at_s=row["timestamp"] / 1000,
                    num_input_tokens=int(row["input_length"]),
                    num_output_tokens=int(row["output_length"]),
                    block_ids=tuple(row["hash_ids"]),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path.name}, line {number}: needs timestamp, input_length, output_length and hash_ids ({error})"
                ) from None
            requests.append(request)
    return sorted(requests, key=lambda request: request.at_s)


def generated(num_requests: int, seed: int) -> list[Request]:
    """Returns a trace with the statistics of Mooncake's: growing conversations, some system prompts, long tails."""
    rng = np.random.default_rng(seed)
    requests: list[Request] = []
    next_id = NUM_SYSTEM_PROMPTS * LONGEST_SYSTEM_PROMPT + 1
    started_s = 0.0
    while len(requests) < num_requests:
        started_s += float(rng.exponential(0.5))
        turns = _conversation(rng, started_s, next_id)
        next_id += len(turns[-1].final_block_ids or ())
        requests += turns
    return sorted(requests, key=lambda request: request.at_s)[:num_requests]


def _conversation(rng: np.random.Generator, started_s: float, first_id: int) -> list[Request]:
    """Returns the turns of one conversation; its own blocks are numbered from `first_id`."""
    system = min(NUM_SYSTEM_PROMPTS, int(rng.zipf(1.5))) - 1
    # Block 0 begins every prompt, as in the real trace.
    shared = [0, *(1 + system * LONGEST_SYSTEM_PROMPT + index for index in range(system % LONGEST_SYSTEM_PROMPT))]
    length, at_s = len(shared) * TRACE_BLOCK + _draw(rng, FIRST_PROMPT, LONGEST_PROMPT), started_s
    turns: list[Request] = []
    while True:
        answer = _draw(rng, ANSWER, LONGEST_ANSWER)
        num_own = -(-(length + answer) // TRACE_BLOCK) - len(shared)
        block_ids = (*shared, *range(first_id, first_id + num_own))
        turns.append(
            Request(
                at_s=at_s,
                num_input_tokens=length,
                num_output_tokens=answer,
                block_ids=block_ids[: -(-length // TRACE_BLOCK)],
                final_block_ids=block_ids,
            )
        )
        length += answer + _draw(rng, LATER_PROMPT, LONGEST_PROMPT)
        if length > LONGEST_PROMPT or rng.random() > MORE_TURNS:
            return turns
        at_s += float(rng.exponential(THINK_S))


def _draw(rng: np.random.Generator, median_and_sigma: tuple[float, float], most: int) -> int:
    median, sigma = median_and_sigma
    return int(min(most, max(1, rng.lognormal(np.log(median), sigma))))


def paced(requests: Sequence[Request], tokens_per_s: float) -> list[Request]:
    """Returns the trace with its clock stretched, so that prompts arrive at so many tokens a second on average."""
    span_s = requests[-1].at_s - requests[0].at_s
    stretch = sum(request.num_input_tokens for request in requests) / tokens_per_s / span_s
    return [replace(request, at_s=(request.at_s - requests[0].at_s) * stretch) for request in requests]

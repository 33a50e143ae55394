"""Protocol that peers' scripts share: the job on stdin, a line of JSON per case, the clock of a wave.

The standard library only, since every peer's environment imports this. Scripts run by path, so they find this module
beside them.

A *wave* is as many prompts as there are streams, all asked at once. Decode speed counts the tokens that came while all
streams were decoding, from the moment when the last one had its first token until the first one had its last: drafts
let texts of one length end at different times. Total speed counts everything from the moment of asking.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO

WARM_UP_TOKENS = 16

TokenIds = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A figure to measure: `num_prompts` prompts, `streams` at a time."""

    streams: int
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that one process of a peer measures: one engine, with one draft length or none.

    Attributes:
        target, draft: Checkpoint folders.
        draft_length: Most guesses of a step; None decodes plainly.
        prompts: Token ids.
        cores: The CPUs of the engine.
        drafters: Addresses of drafters of ours that draft instead of the draft model inside; none for all peers but
            vLLM.
        drafter_cores: The CPUs beside them, for what speaks to them.
        learned_dir: Where what is learned of drafters is kept.
        temperature, top_p, top_k: Sampling of all requests; 0, 1 and 0 are off.
    """

    target: str
    draft: str
    draft_length: int | None
    prompts: TokenIds
    max_new_tokens: int
    passes: int
    cores: Sequence[int]
    cases: Sequence[Case]
    drafters: Sequence[str] = field(default_factory=list)
    drafter_cores: Sequence[int] = field(default_factory=list)
    learned_dir: str = "none"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def mode(self) -> str:
        """How guesses come about: `plain` (none do), `draft` (by the engine) or `tier` (by drafters of ours)."""
        if self.draft_length is None:
            return "plain"
        return "tier" if self.drafters else "draft"

    @property
    def most_streams(self) -> int:
        """How many sequences the engine must hold at a time."""
        return max(case.streams for case in self.cases)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and completion."""
        return max(len(prompt) for prompt in self.prompts) + self.max_new_tokens

    def to_json(self) -> str:
        """The job on one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        """Returns the job of `to_json`; raises `ValueError` or `TypeError` for anything else."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"a job is a JSON object, got {type(fields).__name__}")
        cases = [Case(**case) for case in fields.pop("cases", [])]
        return Job(**fields, cases=cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Facts of the measured peer: its version, and in which precision it computes."""

    version: str
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """A wave's outcome; `token_ids` are the completions in the prompts' order."""

    token_ids: TokenIds
    seconds: float
    decode_tokens: int
    decode_s: float

    @property
    def num_tokens(self) -> int:
        """All tokens of the completions."""
        return sum(len(ids) for ids in self.token_ids)


class Peer(Protocol):
    """An engine that is loaded and can run waves."""

    def about(self) -> About:
        """The peer being measured."""

    def run(self, prompts: TokenIds, max_new_tokens: int) -> Wave:
        """Decodes all prompts at once, at the job's temperature, for exactly `max_new_tokens` each."""


@dataclass(slots=True)
class WaveClock:
    """Times one wave of an engine that is driven step by step."""

    streams: int
    max_new_tokens: int
    started_s: float = field(default_factory=time.perf_counter)
    # When all streams decoded first and last, with all tokens by then.
    _first: tuple[float, int] | None = None
    _last: tuple[float, int] | None = None
    _one_ended: bool = False

    def note(self, counts: Sequence[int]) -> None:
        """Takes the number of tokens each stream has after a step; those beyond the length wanted do not count."""
        if self._one_ended or len(counts) < self.streams or not all(counts):
            return
        kept = [min(count, self.max_new_tokens) for count in counts]
        self._last = time.perf_counter(), sum(kept)
        self._first = self._first or self._last
        self._one_ended = max(kept) == self.max_new_tokens

    def wave(self, token_ids: TokenIds) -> Wave:
        """The wave that ends now."""
        ended_s = time.perf_counter()
        (first_s, first_tokens), (last_s, last_tokens) = self._first or (ended_s, 0), self._last or (ended_s, 0)
        return Wave(
            token_ids=token_ids,
            seconds=ended_s - self.started_s,
            decode_tokens=last_tokens - first_tokens,
            decode_s=last_s - first_s,
        )


def serve(open_peer: Callable[[Job], Peer]) -> None:
    """Reads a job from stdin and answers with a line of JSON about the peer, and one for each case."""
    die_with_parent()
    answers = _own_stdout()
    job = Job.from_json(sys.stdin.read())
    os.sched_setaffinity(0, job.cores)
    peer = open_peer(job)
    _answer(answers, asdict(peer.about()))
    for case in job.cases:
        _answer(answers, measure(peer, job, case))


def die_with_parent() -> None:
    """Asks Linux to end this process when its parent does, however that ends."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def measure(peer: Peer, job: Job, case: Case) -> dict[str, Any]:
    """Runs a case: a short wave to warm up, then all passes; the figures are those of the median pass."""
    for prompts in _waves(job.prompts[: case.streams], case.streams):
        peer.run(prompts, WARM_UP_TOKENS)
    passes = [
        [peer.run(wave, job.max_new_tokens) for wave in _waves(job.prompts[: case.num_prompts], case.streams)]
        for _ in range(job.passes)
    ]
    return {
        "streams": case.streams,
        "decode_tokens_per_s": statistics.median(map(_decode_tokens_per_s, passes)),
        "total_tokens_per_s": statistics.median(map(_total_tokens_per_s, passes)),
        "num_tokens": sum(wave.num_tokens for wave in passes[-1]),
        "token_ids": [list(ids) for wave in passes[-1] for ids in wave.token_ids],
    }


def _waves(prompts: TokenIds, streams: int) -> Iterator[TokenIds]:
    for start in range(0, len(prompts), streams):
        yield prompts[start : start + streams]


def _decode_tokens_per_s(waves: Sequence[Wave]) -> float:
    return sum(wave.decode_tokens for wave in waves) / max(1e-9, sum(wave.decode_s for wave in waves))


def _total_tokens_per_s(waves: Sequence[Wave]) -> float:
    return sum(wave.num_tokens for wave in waves) / sum(wave.seconds for wave in waves)


def _answer(stream: TextIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


def _own_stdout() -> TextIO:
    """Keeps stdout for the answers: what a library or a child prints there goes to stderr from now on."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept

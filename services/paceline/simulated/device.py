"""Devices that take their time and compute nothing: models whose steps are as long as a profile says.

A step writes digests of texts where a model writes KV. While it lasts, the interpreter is free, as beside a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.features import Features
from paceline.core.pages import BLOCK_SIZE
from paceline.engine.batch import Batch
from paceline.engine.levels import draft_by_levels
from paceline.engine.model import Burst, Drafted
from paceline.engine.pending import HostPending, Rankings, Ranks, VerifyRequest, VerifyResult, follow_known
from paceline.simulated.guesses import GuessLaw, Logits
from paceline.simulated.profile import DeviceFacts
from paceline.simulated.text import GUESS, LAW, Digests, Ints, contributions, mixed, next_tokens

# Keys the digests of all simulated models: drafters know the truth of their targets.
KEY = 0x5061_6365_6C69_6E65
# Logits of tokens that the text does not choose; a grammar that bars the chosen one leaves the best of these.
LEAST, MOST, NUM_TABLES = -24.0, -20.0, 64


class DigestCache:
    """The KV cache of a simulated model by physical slot: digests of the texts up to there, and each token's part."""

    def __init__(self, num_blocks: int) -> None:
        self.digests: Digests = np.zeros(num_blocks * BLOCK_SIZE, np.uint64)
        self.added: Digests = np.zeros(num_blocks * BLOCK_SIZE, np.uint64)

    def apply_moves(self, moves: list[tuple[int, int]]) -> None:
        """Copies slots, by pairs of source and target, and clears the list."""
        if moves:
            sources, targets = np.array(moves, np.int64).T
            self.digests[targets] = self.digests[sources]
            self.added[targets] = self.added[sources]
            moves.clear()

    def features(self, slots: Sequence[int]) -> Features:
        """There are none, float32 [n, 0]."""
        return np.zeros((len(slots), 0), np.float32)

    def state_bytes(self, slots: Sequence[int], width: int) -> bytes:
        del slots, width
        return b""

    def write(self, batch: Batch) -> Digests:
        """Writes the rows of a step; returns the digests of their texts, uint64 [rows]."""
        added = contributions(batch.token_ids, batch.positions, KEY)
        self.added[batch.slots] = added
        digests = np.zeros(len(added), np.uint64)
        nodes = batch.num_ancestors > 0
        with np.errstate(over="ignore"):
            digests[~nodes] = self._of_prefixes(batch, added, np.flatnonzero(~nodes))
            digests[nodes] = self._of_nodes(batch, np.flatnonzero(nodes))
        self.digests[batch.slots[nodes]] = digests[nodes]
        return digests

    def _of_prefixes(self, batch: Batch, added: Digests, rows: Ints) -> Digests:
        """Digests of rows that follow one another within a sequence, as batches are packed; and writes them."""
        if not len(rows):
            return np.zeros(0, np.uint64)
        sequences, positions = batch.sequences[rows], batch.positions[rows]
        starts = np.ones(len(rows), bool)
        starts[1:] = (sequences[1:] != sequences[:-1]) | (positions[1:] != positions[:-1] + 1)
        sums = np.cumsum(added[rows], dtype=np.uint64)
        first = np.flatnonzero(starts)
        before = self._committed(batch, sequences[first], positions[first]) - (sums[first] - added[rows[first]])
        digests: Digests = sums + np.repeat(before, np.diff([*first, len(rows)]))
        self.digests[batch.slots[rows]] = digests
        return digests

    def _of_nodes(self, batch: Batch, rows: Ints) -> Digests:
        if not len(rows):
            return np.zeros(0, np.uint64)
        base = self._committed(batch, batch.sequences[rows], batch.context_lens[rows])
        ancestors = batch.ancestors[rows]
        counted = np.arange(ancestors.shape[1]) < batch.num_ancestors[rows, None]
        steps = np.where(counted, self.added[np.where(counted, ancestors, 0)], np.uint64(0))
        digests: Digests = base + steps.sum(axis=1, dtype=np.uint64)
        return digests

    def _committed(self, batch: Batch, sequences: npt.NDArray[np.int32], lengths: npt.NDArray[np.integer]) -> Digests:
        """Digests of the first tokens of sequences; that of none is 0."""
        last = np.maximum(lengths.astype(np.int64) - 1, 0)
        blocks = batch.block_tables[sequences, np.minimum(last // BLOCK_SIZE, batch.block_tables.shape[1] - 1)]
        known = self.digests[blocks.astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE]
        return np.where(lengths > 0, known, np.uint64(0))


class Pace:
    """Makes steps as long as a profile says.

    Args:
        facts: Facts of the device.
        seed: Seed of random step times.
        overhead: Share by which a target's steps take longer while drafters work.
        sleep: Waits for a number of seconds, and leaves the interpreter to others.
    """

    def __init__(
        self,
        facts: DeviceFacts,
        *,
        seed: int = 0,
        overhead: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._facts, self._clock, self._sleep = facts, clock, sleep
        self._overhead, self._factor = overhead, 1.0
        self._luck = np.random.default_rng(seed)

    def now_s(self) -> float:
        return self._clock()

    def beside_drafters(self, work: bool) -> None:
        """Whether drafters work during the steps that follow."""
        self._factor = 1.0 + self._overhead * work

    def keep(self, started_s: float, *batches: Batch) -> None:
        """Returns when steps that began at `started_s`, one after the other, are over."""
        left_s = started_s + sum(map(self.seconds, batches)) - self._clock()
        if left_s > 0:
            self._sleep(left_s)

    def seconds(self, batch: Batch) -> float:
        """The time of a step: by its rows, its sequences and the KV that they read."""
        read = np.zeros(len(batch.block_tables), np.int64)
        np.maximum.at(read, batch.sequences, batch.context_lens)
        expected = self._facts.step_s(len(batch.token_ids), num_sessions=len(read), kv_tokens=int(read.sum()))
        noise = self._facts.noise
        return self._factor * expected * math.exp(noise * float(self._luck.standard_normal()) - noise**2 / 2)


class TextPending:
    """A simulated target's step that is over: its tokens are known, and logits are made for the rows that need them.

    Args:
        tokens: int64 `[rows]`, the next token of each row.
        make: Logits of some of these rows, float32 `[n, vocab]`.
    """

    runs_ahead = False

    def __init__(self, tokens: Ints, make: Callable[[Ints], Logits]) -> None:
        self._tokens, self._make = tokens, make
        self._host: HostPending | None = None

    def prepare(self, wanted: VerifyRequest | Ranks | None) -> None:
        """Makes all logits now, as a device would while it computes, unless greedy choices are all that is wanted."""
        if not isinstance(wanted, VerifyRequest) or not wanted.choices["greedy"].all():
            self._on_host()

    def follow(self, walks: VerifyRequest) -> VerifyResult:
        # The next token has the largest logit of its row.
        return follow_known(self._tokens, walks) if walks.choices["greedy"].all() else self._on_host().follow(walks)

    def rank(self, rows: Ints, positions: Ints, choices: np.ndarray) -> Rankings:
        return self._on_host().rank(rows, positions, choices)

    def logits(self, rows: Sequence[int]) -> Logits:
        return self._make(np.asarray(rows, np.int64)) if self._host is None else self._host.logits(rows)

    def _on_host(self) -> HostPending:
        if self._host is None:
            self._host = HostPending(self._make(np.arange(len(self._tokens))))
        return self._host


class SimulatedTarget:
    """A target model: its text's next token has all the weight; the others' logits only rank them.

    Args:
        words: Tokens that its texts are made of, int64 [n].
        pace: Pace of its device.
    """

    feature_width = state_width = 0

    def __init__(self, words: Ints, pace: Pace, vocab_size: int) -> None:
        self._words, self._pace = words, pace
        ranks = np.random.default_rng(KEY).uniform(LEAST, MOST, (NUM_TABLES, vocab_size))
        self._tables = ranks.astype(np.float32)

    def new_cache(self, num_blocks: int) -> DigestCache:
        return DigestCache(num_blocks)

    def launch(self, batch: Batch, cache: DigestCache, wanted: VerifyRequest | Ranks | None) -> TextPending:
        """Takes a step's time."""
        started_s = self._pace.now_s()
        digests = cache.write(batch)[batch.logit_rows]
        tokens = next_tokens(self._words, digests)

        def make(rows: Ints) -> Logits:
            logits = self._tables[(mixed(digests[rows], LAW) % np.uint64(NUM_TABLES)).astype(np.int64)]
            logits[np.arange(len(rows)), tokens[rows]] = 0.0
            return logits

        pending = TextPending(tokens, make)
        pending.prepare(wanted)
        self._pace.keep(started_s, batch)
        return pending


class SimulatedDraft:
    """A draft model that knows its target's texts, and guesses them as well as a distribution says.

    Args:
        words: Tokens that the target's texts are made of, int64 [n].
        pace: Pace of its device.
        truth: Distribution of its guesses.
    """

    feature_width = state_width = 0

    def __init__(self, words: Ints, pace: Pace, vocab_size: int, truth: GuessLaw) -> None:
        self._words, self._pace, self._vocab_size = words, pace, vocab_size
        self._ranks, self._logits, self._rest = truth.table(vocab_size)

    def new_cache(self, num_blocks: int) -> DigestCache:
        return DigestCache(num_blocks)

    def launch(self, batch: Batch, cache: DigestCache, wanted: VerifyRequest | Ranks | None) -> HostPending:
        """Takes a step's time."""
        del wanted
        started_s = self._pace.now_s()
        logits = self._guesses(cache.write(batch)[batch.logit_rows])
        self._pace.keep(started_s, batch)
        return HostPending(logits)

    def draft(self, batch: Batch, cache: DigestCache, burst: Burst) -> Drafted:
        """Takes the time of all levels at once."""
        started_s, computed = self._pace.now_s(), list[Batch]()

        def launch(rows: Batch, wanted: Ranks) -> HostPending:
            del wanted
            computed.append(rows)
            return HostPending(self._guesses(cache.write(rows)[rows.logit_rows]))

        drafted = draft_by_levels(launch, batch, burst)
        self._pace.keep(started_s, *computed)
        return drafted

    def _guesses(self, digests: Digests) -> Logits:
        width = self._logits.shape[1]
        places = (mixed(digests, GUESS) % np.uint64(len(self._ranks))).astype(np.int64)
        ranks, rows = self._ranks[places], np.arange(len(digests))
        # The true token first, then wrong ones; those before its rank move up.
        tokens = next_tokens(self._words, digests, others=width)
        order = np.broadcast_to(np.arange(1, 1 + width), (len(digests), width)).copy()
        right = ranks >= 0
        order[rows[right], ranks[right]] = 0
        logits = np.repeat(self._rest[places, None], self._vocab_size, axis=1)
        logits[rows[:, None], tokens[rows[:, None], order]] = self._logits[places]
        return logits

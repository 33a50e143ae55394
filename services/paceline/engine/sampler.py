"""A session's sampler: how it changes rows of logits, and how it chooses tokens from them.

The order of processors, the filters and the noise are defined in `paceline.core.processors` and
`paceline.core.noise`; the compiled loops choose the same token. This module must not know trees, steps
or other sessions.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import numpy.typing as npt

from paceline.core.errors import LocalProtocolError
from paceline.core.grammar import FIELD, Allowed, Bits, OutputGrammar
from paceline.core.messages import PositionLogprobs
from paceline.core.params import SamplingParams
from paceline.core.processors import (
    MAX_VOCAB_SIZE,
    NoTokenLeftError,
    Truncation,
    allowed_bits,
    ends_of_bad_words,
    masked_until_min_tokens,
    require_usable,
)
from paceline.engine.backends.cpu import noise_kernels, row_kernels, step_kernels

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NO_IDS = np.empty(0, np.int64)
_ALL = Allowed(np.empty(0, np.uint8))
_NO_PENALTIES = (1.0, 0.0, 0.0)
# Room for ids that penalties look at, beyond those of the prompt, before arrays grow.
_FIRST_SLOTS = 64
_FIRST_ROW = np.zeros(1, np.int64)

# Compiled loops' workspace for a row: the largest of each chunk; what filters gather: logits, ids and weights; of
# each block of noise its first arrival, whose that is, and what perturbed scores cannot exceed.
Space = tuple[Logits, tuple[Logits, Ints, Ints], tuple[Floats, Ints, Floats]]


class _ThreadSpaces(threading.local):
    """Each thread's working space, by vocabulary size."""

    def __init__(self) -> None:
        self.by_vocab_size: dict[int, Space] = {}


_SPACES = _ThreadSpaces()


def working_space(vocab_size: int) -> Space:
    """This thread's, for rows of this size; made at the first call."""
    space = _SPACES.by_vocab_size.get(vocab_size)
    if space is None:
        num_chunks = -(-vocab_size // row_kernels.CHUNK)
        # The gathering loop writes before it decides whether to keep, and noise is drawn for pairs of blocks.
        most, even = vocab_size + 1, num_chunks + num_chunks % 2
        gathered = (np.empty(most, np.float32), np.empty(most, np.int64), np.empty(most, np.int64))
        blocks = (np.empty(even), np.empty(even, np.int64), np.empty(num_chunks))
        space = _SPACES.by_vocab_size[vocab_size] = (np.empty(num_chunks, np.float32), gathered, blocks)
    return space


class _SeenTokens:
    """Ids that penalties look at, with their output counts, as arrays for the compiled loops."""

    def __init__(self, vocab_size: int, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        # Not token by token: that took 70 ms for 100,000, of the event loop's time.
        counts = Counter(output_token_ids)
        ids = {*prompt_token_ids, *counts}
        _require_ids(ids, vocab_size)
        self._slots = dict(zip(ids, range(len(ids)), strict=True))
        self._ids = np.zeros(len(ids) + _FIRST_SLOTS, np.int64)
        self._ids[: len(ids)] = np.fromiter(ids, np.int64, len(ids))
        self._counts = np.zeros_like(self._ids)
        for token_id, count in counts.items():
            self._counts[self._slots[token_id]] = count

    def arrays(self) -> tuple[Ints, Ints]:
        """Returns ids and output counts; a count of 0 is a token of the prompt alone."""
        return self._ids[: len(self._slots)], self._counts[: len(self._slots)]

    def add(self, token_id: int, count: int) -> None:
        slot = self._slots.get(token_id)
        if slot is None:
            _require_ids((token_id,), self._vocab_size)
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
            self._ids[slot] = token_id
            self._counts[slot] = 0
        self._counts[slot] += count

    @contextmanager
    def extended(self, path: Sequence[int]) -> Iterator[None]:
        """Counts the path as output for the time of the block."""
        size = len(self._slots)
        counted = []
        try:
            for token_id in path:
                self.add(token_id, 1)
                counted.append(token_id)
            yield
        finally:
            for token_id in counted:
                self._counts[self._slots[token_id]] -= 1
            while len(self._slots) > size:
                self._slots.popitem()


def _require_ids(token_ids: Collection[int], vocab_size: int) -> None:
    """Refuses ids that a compiled loop would take as an address outside its row."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise LocalProtocolError(f"token id {token_id} is outside the vocabulary of {vocab_size}")


class RowSampler:
    """How one session chooses; every committed token is pushed once.

    Any thread may call it, one at a time. Rows of logits are float32 [vocab], C-contiguous.

    Attributes:
        choice: A `CHOICE`.
        changes_rows: Whether rows go through `change` before anything is chosen: not the logits alone decide.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        grammar: OutputGrammar | None = None,
    ) -> None:
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise LocalProtocolError(f"the vocabulary must hold from 1 to {MAX_VOCAB_SIZE} ids, not {vocab_size}")
        masked_ids = masked_until_min_tokens(params, eos_token_ids)
        biased_ids = [token_id for token_id, _ in params.logit_bias]
        bad_ids = [token_id for word in params.bad_words for token_id in word]
        _require_ids((*masked_ids, *biased_ids, *params.allowed_token_ids, *bad_ids), vocab_size)
        self._vocab_size = vocab_size
        self._min_tokens = params.min_tokens
        self._choice = step_kernels.choice_of(Truncation.of(params), params.seed)
        self.choice = self._choice.tobytes()
        self._bias_ids = np.array(biased_ids, np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float64)
        self._allowed = allowed_bits(params, vocab_size)
        self._masked_at_first = np.array(masked_ids, np.int64)
        self._num_outputs = len(output_token_ids)
        self._bad_words = params.bad_words
        # As many outputs as may begin a bad word.
        self._tail: deque[int] = deque(output_token_ids, max(map(len, params.bad_words), default=1) - 1)
        self._grammar = grammar
        if grammar is not None:
            grammar.push(output_token_ids)
        self._penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._seen: _SeenTokens | None = None
        if self._penalties != _NO_PENALTIES:
            # Only the repetition penalty looks at the prompt.
            prompt = prompt_token_ids if params.repetition_penalty != 1.0 else ()
            self._seen = _SeenTokens(vocab_size, prompt, output_token_ids)
        ids = (self._bias_ids, self._masked_at_first, self._allowed, self._bad_words)
        self.changes_rows = grammar is not None or self._seen is not None or any(len(each) for each in ids)

    def push(self, token_id: int) -> None:
        """Appends one output token to the history."""
        self._num_outputs += 1
        self._tail.append(token_id)
        if self._grammar is not None:
            self._grammar.push((token_id,))
        if self._seen is not None:
            self._seen.add(token_id, 1)

    def change(self, row: Logits, path: Sequence[int] = ()) -> None:
        """Changes a row as the request asks, by all but temperature and filters.

        Args:
            path: Tokens between the history and this row, down guesses; they count as output.

        Raises:
            InvalidRequestError, MovedError: The grammar cannot be followed; see `GrammarState.allowed`.
        """
        self._require_row(row)
        with nullcontext() if self._seen is None else self._seen.extended(path):
            seen_ids, seen_counts = (_NO_IDS, _NO_IDS) if self._seen is None else self._seen.arrays()
            allowed = _ALL if self._grammar is None else self._grammar.after(path)
            masked, bits = self._masked(path, must_end=allowed.ended), self._both(allowed.bits)
            row_kernels.process_row(
                row, self._bias_ids, self._biases, masked, bits, seen_ids, seen_counts, self._penalties
            )

    def probabilities(self, row: Logits) -> Floats:
        """Distribution [vocab] of the token chosen from a processed row; at temperature 0 one token has all of it.

        Raises:
            UnusableLogitsError: The logits hold NaN or +inf, or every token is masked.
        """
        probs = np.empty(self._vocab_size)
        self.require_usable(step_kernels.probabilities(row, self._choice[0], working_space(self._vocab_size), probs))
        return probs

    def rank(
        self, logits: Logits, position: int, count: int, path: Sequence[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Returns the best ids of the coupled rule's scores, best first, and the weight of each.

        Weights are the exponentials of the scores, up to a constant: with noise, or at temperature 0 those of the
        processed logits alone. Fewer than `count` ids come back when fewer survive the filters.

        Args:
            logits: [vocab], usually of a draft model.
            position: Absolute position of the token to guess.
            count: How many ids, at least 1.
            path: Tokens between the history and this row (the tree path); they count as output.

        Raises:
            UnusableLogitsError: The logits hold NaN or +inf, or every token is masked.
        """
        self._require_row(logits)
        row, largest = logits[None], np.empty(1)
        if self.changes_rows:
            row = row.copy()
            self.change(row[0], path)
        token_ids, scores = np.full((1, count), step_kernels.NOTHING), np.full((1, count), -np.inf)
        space, positions = working_space(self._vocab_size), np.array([position], np.int64)
        step_kernels.rank(row, _FIRST_ROW, positions, self._choice, space, token_ids, scores, largest)
        self.require_usable(float(largest[0]))
        found = token_ids[0] != step_kernels.NOTHING
        return token_ids[0, found].tolist(), np.exp(scores[0, found] - scores[0, 0]).tolist()

    def logprobs(self, logits: Logits, token_id: int, count: int) -> PositionLogprobs:
        """Returns log probabilities of the raw logits [vocab]: the token's, with its rank, and the `count` best.

        Raises:
            UnusableLogitsError: The logits hold NaN or +inf, or every token is masked.
        """
        self._require_row(logits)
        chunk_max, *_ = working_space(self._vocab_size)
        largest = row_kernels.find_maxima(logits, chunk_max)
        require_usable(largest)
        normaliser = largest + math.log(row_kernels.sum_of_exp(logits, largest))
        top_ids, top_scores = np.full(count, step_kernels.NOTHING), np.full(count, -np.inf)
        if count:
            noise_kernels.best_plain(logits, chunk_max, top_ids, top_scores)
        filled = int((top_ids != step_kernels.NOTHING).sum())
        top = zip(top_ids[:filled].tolist(), (top_scores[:filled] - normaliser).tolist(), strict=True)
        return PositionLogprobs(
            token_id=token_id,
            logprob=float(logits[token_id]) - normaliser,
            top=tuple(top),
            rank=int(np.count_nonzero(logits > logits[token_id])) + 1,
        )

    def _require_row(self, logits: Logits) -> None:
        if logits.shape != (self._vocab_size,) or logits.dtype != np.float32:
            raise LocalProtocolError(
                f"a row must hold {self._vocab_size} float32 logits, got {logits.dtype} {logits.shape}"
            )

    def _both(self, of_grammar: Bits) -> Bits:
        """Tokens that the grammar and the request both allow."""
        if len(self._allowed) and len(of_grammar):
            return of_grammar & self._allowed
        return self._allowed if len(self._allowed) else of_grammar

    def _masked(self, path: Sequence[int], *, must_end: bool = False) -> Ints:
        """Returns the ids that a row behind a path may not choose, beside those that are not allowed anywhere."""
        at_first = self._num_outputs + len(path) < self._min_tokens and not must_end
        masked_ids = self._masked_at_first if at_first else _NO_IDS
        if not self._bad_words:
            return masked_ids
        ends = ends_of_bad_words(self._bad_words, (*self._tail, *path))
        return np.concatenate((masked_ids, np.array(ends, np.int64)))

    def require_usable(self, largest: float) -> None:
        if largest == -math.inf and self._grammar is not None:
            raise NoTokenLeftError(FIELD, "leaves no token to choose beside what else the request rules out")
        require_usable(largest)

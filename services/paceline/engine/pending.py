"""Queries to a model after a step: tokens down guesses, rankings of guesses, or the logits themselves.

`HostPending` answers from logits in the memory of the host, by compiled loops that look only at rows they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.calibration import NUM_RANKED, confidences
from paceline.core.processors import Truncation
from paceline.engine.backends.cpu import step_kernels
from paceline.engine.sampler import Logits, working_space
from paceline.forest import Bools, Floats, Ints

Longs = npt.NDArray[np.int64]
# Tokens of rows that are still to be chosen; and what is passed in place of logits where they are known.
NOT_KNOWN: Longs = np.empty(0, np.int64)
NO_LOGITS: Logits = np.empty((0, 1), np.float32)
NO_SPACE = working_space(1)


class VerifyRequest(NamedTuple):
    """Guesses of some sessions of a step, to be followed down by the target's tokens.

    Attributes:
        rows: int64 `[sessions]`, of their last committed tokens; those of a session's guesses come right behind.
        positions: int64 `[sessions]`, absolute, of the first token to choose.
        choices: `CHOICE` `[sessions]`, how each session chooses.
        starts: int64 `[sessions]`, where the guesses of each session begin.
        stops: int64 `[sessions]`, where they end.
        tokens: int32 `[guesses]`.
        parents: int32 `[guesses]`, which of its session's guesses each one hangs below; -1: none.
        others: int64 `[m]`, rows whose logits the host is going to change; None: all that are not followed.
    """

    rows: Longs
    positions: Longs
    choices: np.ndarray
    starts: Longs
    stops: Longs
    tokens: Ints
    parents: Ints
    others: Longs | None = None


class VerifyResult(NamedTuple):
    """The target's tokens.

    Attributes:
        tokens: int64 `[rows]`, those of a session from its first row on.
        counts: int64 `[sessions]`, how many; 0 where the logits leave nothing to choose.
        rivals: bool `[sessions]`, whether there were guesses in the last one's place.
    """

    tokens: Longs
    counts: Longs
    rivals: Bools


class Ranks(NamedTuple):
    """Rows below which guesses are wanted.

    Attributes:
        rows: int64 `[n]`.
        positions: int64 `[n]`, absolute, of the tokens to guess.
        choices: `CHOICE` `[n]`.
    """

    rows: Longs
    positions: Longs
    choices: np.ndarray


class Rankings(NamedTuple):
    """The best guesses at some rows, best first, as each session's sampler would rank them.

    Attributes:
        token_ids: int32 `[n, NUM_RANKED]`, below 0 behind the last.
        confidences: float64 `[n, NUM_RANKED]`, how sure they are.
        usable: bool `[n]`, whether the logits leave something to choose.
    """

    token_ids: Ints
    confidences: Floats
    usable: Bools


def choices_of(choices: Sequence[bytes]) -> np.ndarray:
    """A column of how sessions choose."""
    return np.frombuffer(b"".join(choices), step_kernels.CHOICE)


def greedy_roots(count: int) -> VerifyRequest:
    """A token at each row, chosen greedily: what most steps are asked, and a device need not hand its logits over."""
    zeros, nothing = np.zeros(count, np.int64), np.zeros(0, np.int32)
    greedy = step_kernels.choice_of(Truncation()).repeat(count)
    return VerifyRequest(np.arange(count), zeros + 1, greedy, zeros, zeros, nothing, nothing)


def warm_up() -> None:
    """Chooses and ranks once; what was compiled before is read from the cache."""
    pending, walks = HostPending(np.zeros((1, 2), np.float32)), greedy_roots(1)
    pending.follow(walks)
    pending.rank(walks.rows, walks.positions, walks.choices)


def follow_known(tokens: Longs, walks: VerifyRequest) -> VerifyResult:
    """Follows tokens that are known down the guesses.

    Args:
        tokens: int64 `[rows]`, `step_kernels.NOTHING` where a row's logits leave nothing to choose.
    """
    num_sessions = len(walks.rows)
    walked = VerifyResult(
        np.empty(len(tokens), np.int64), np.empty(num_sessions, np.int64), np.empty(num_sessions, np.bool_)
    )
    if num_sessions:
        step_kernels.follow(NO_LOGITS, tokens, *walks[:-1], NO_SPACE, *walked)
    return walked


class HostPending:
    """A step that is over.

    Args:
        logits: float32 `[rows, vocab]`, C-contiguous, of `Batch.logit_rows` in that order.
    """

    runs_ahead = False

    def __init__(self, logits: Logits) -> None:
        self._logits = logits

    def follow(self, walks: VerifyRequest) -> VerifyResult:
        num_sessions = len(walks.rows)
        walked = VerifyResult(
            np.empty(len(self._logits), np.int64), np.empty(num_sessions, np.int64), np.empty(num_sessions, np.bool_)
        )
        if num_sessions:
            space = working_space(self._logits.shape[1])
            step_kernels.follow(self._logits, NOT_KNOWN, *walks[:-1], space, *walked)
        return walked

    def rank(self, rows: Longs, positions: Longs, choices: np.ndarray) -> Rankings:
        token_ids = np.full((len(rows), NUM_RANKED), step_kernels.NOTHING, np.int64)
        scores, largest = np.full(token_ids.shape, -np.inf), np.empty(len(rows))
        if len(rows):
            space = working_space(self._logits.shape[1])
            step_kernels.rank(self._logits, rows, positions, choices, space, token_ids, scores, largest)
        usable = np.isfinite(largest)
        weights = np.exp(scores - np.where(usable, scores[:, 0], 0.0)[:, None])
        return Rankings(token_ids.astype(np.int32), confidences(weights, greedy=choices["greedy"]), usable)

    def logits(self, rows: Sequence[int]) -> Logits:
        copied: Logits = self._logits[np.asarray(rows, np.int64)]
        return copied

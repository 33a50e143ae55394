"""Compiled loops over all rows of a step: the target's own tokens, followed down guesses, and a draft model's guesses.

They choose and rank what `RowSampler` does, for sessions that ask for no more than temperature, top-k, top-p and min-p.
They release the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.engine.backends.cpu.noise_kernels import best_perturbed, rank_perturbed, rank_plain
from paceline.engine.backends.cpu.row_kernels import Ints, Logits, filter_row, load_row
from paceline.kernel_cache import inlined, kernel

# How a session chooses: `paceline.core.processors.Truncation`, and the seed of its noise.
CHOICE = np.dtype(
    [
        ("greedy", np.bool_),
        ("inverse_temperature", np.float64),
        ("log_min_p", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("seed_low", np.uint64),
        ("seed_high", np.uint64),
    ],
    align=True,
)
# There is no token to choose, or no guess of it.
NOTHING = -1

_SPAN = 512
_SIGN, _LOWEST, _HIGHEST = np.int32(31), np.int32(-(2**31)), np.int32(2**31 - 1)
_INFINITY, _MINUS_INFINITY = np.int32(0x7F800000), np.int32(-0x7F800001)
_MASK32, _SHIFT32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROOT = -1
_NO_PENALTIES = (1.0, 0.0, 0.0)


@inlined
def _ordered(bits: Any) -> Any:
    """The bits of float32 as whole numbers of the same order, with NaN beyond either infinity; its own inverse."""
    return bits ^ ((bits >> _SIGN) & _HIGHEST)


@kernel
def _argmax(row: Logits) -> int:
    """Returns the lowest id of the largest logit; NOTHING where one is NaN, or the largest is not finite."""
    # Loops over whole numbers vectorise; those that compare numbers which may be NaN do not.
    bits, highest, lowest = row.view(np.int32), _LOWEST, _HIGHEST
    for token_id in range(len(bits)):
        order = _ordered(bits[token_id])
        highest, lowest = max(highest, order), min(lowest, order)
    if highest >= _INFINITY or highest <= _MINUS_INFINITY or lowest < _MINUS_INFINITY:
        return NOTHING
    largest = np.int32(_ordered(highest)).view(np.float32)
    for start in range(0, len(row), _SPAN):
        found = np.int32(0)
        for token_id in range(start, min(start + _SPAN, len(row))):
            found += np.int32(row[token_id] == largest)
        if found:
            for token_id in range(start, len(row)):
                if row[token_id] == largest:
                    return token_id
    return NOTHING


@kernel
def _load(row: Logits, choice: Any, space: Any) -> float:
    """Fills the working space with the scores of a row and returns the largest."""
    scores, chunk_max, _ = space
    no_ids, no_values, all_allowed = np.empty(0, np.int64), np.empty(0), np.empty(0, np.uint8)
    return load_row(
        row, no_ids, no_values, no_ids, all_allowed, no_ids, no_ids, _NO_PENALTIES, choice.inverse_temperature,
        scores, chunk_max,
    )  # fmt: skip


@inlined
def _noise_at(choice: Any, position: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    place = np.uint64(position)
    return (choice.seed_low, choice.seed_high), (place & _MASK32, place >> _SHIFT32)


@kernel
def _choose(row: Logits, choice: Any, position: int, space: Any) -> int:
    """Returns the token for an absolute position; NOTHING where the logits leave none."""
    if choice.greedy:
        return _argmax(row)
    scores, chunk_max, gathered = space
    largest = _load(row, choice, space)
    if not np.isfinite(largest):
        return NOTHING
    cut, last_id = filter_row(scores, chunk_max, largest, choice.log_min_p, choice.top_k, choice.top_p, gathered)
    return best_perturbed(scores, chunk_max, largest, cut, last_id, *_noise_at(choice, position))


@inlined
def _child(tokens: Any, parents: Any, parent: int, token_id: int) -> tuple[int, bool]:
    """Returns the guess of a token below another guess, or NOTHING, and whether anything was guessed there."""
    guessed = False
    for place in range(len(tokens)):
        if parents[place] == parent:
            guessed = True
            if tokens[place] == token_id:
                return place, True
    return NOTHING, guessed


@kernel
def follow(
    logits: Logits,
    firsts: Ints,
    positions: Ints,
    choices: Any,
    starts: Ints,
    stops: Ints,
    tokens: Any,
    parents: Any,
    space: Any,
    chosen: Ints,
    counts: Ints,
    rivals: Any,
) -> None:
    """Follows the target's tokens down the guesses of each session until it chooses one that was not guessed.

    Args:
        logits: float32 `[rows, vocab]`, of the last committed token of each session, and of its guesses behind it.
        firsts: int64 `[sessions]`, the first of those rows.
        positions: int64 `[sessions]`, absolute, of the first token to choose.
        choices: `CHOICE` `[sessions]`.
        starts: int64 `[sessions]`, where the guesses of each session begin.
        stops: int64 `[sessions]`, where they end.
        tokens: int32 `[guesses]`.
        parents: int32 `[guesses]`, which of its session's guesses each one hangs below; -1: none.
        space: Working space for one row: scores, largest of each chunk, and what filters gather.
        chosen: int64 `[rows]`, filled from the session's first row on.
        counts: int64 `[sessions]`, filled with how many; 0 where the logits leave nothing to choose.
        rivals: bool `[sessions]`, filled with whether there were guesses in the last one's place.
    """
    for session in range(len(firsts)):
        guesses = slice(starts[session], stops[session])
        at, count = _ROOT, 0
        while True:
            row = firsts[session] + at + 1
            token_id = _choose(logits[row], choices[session], positions[session] + count, space)
            if token_id == NOTHING:
                count = 0
                break
            chosen[firsts[session] + count] = token_id
            count += 1
            at, rivals[session] = _child(tokens[guesses], parents[guesses], at, token_id)
            if at == NOTHING:
                break
        counts[session] = count


@kernel
def rank(
    logits: Logits,
    rows: Ints,
    positions: Ints,
    choices: Any,
    space: Any,
    top_ids: Ints,
    top_scores: Any,
    largest: Any,
    totals: Any,
) -> None:
    """Finds the best ids of each row, as `RowSampler.rank`.

    Args:
        logits: float32 `[rows, vocab]`.
        rows: int64 `[n]`, which of them.
        positions: int64 `[n]`, absolute, of the tokens to guess.
        choices: `CHOICE` `[n]`.
        space: See `follow`.
        top_ids: int64 `[n, count]`, filled, best first; it comes as NOTHING.
        top_scores: float64 `[n, count]`, filled; it comes as -inf.
        largest: float64 `[n]`, filled with the largest score without noise; NaN or infinite where there is none.
        totals: float64 `[n]`, filled with the sum of exp(score - largest).
    """
    scores, chunk_max, gathered = space
    for each in range(len(rows)):
        choice = choices[each]
        most = largest[each] = _load(logits[rows[each]], choice, space)
        if not np.isfinite(most):
            continue
        ids, best = top_ids[each], top_scores[each]
        if choice.greedy:
            _, totals[each] = rank_plain(scores, chunk_max, most, ids, best)
        else:
            cut, last_id = filter_row(scores, chunk_max, most, choice.log_min_p, choice.top_k, choice.top_p, gathered)
            noise_at = _noise_at(choice, positions[each])
            _, totals[each] = rank_perturbed(scores, chunk_max, most, cut, last_id, *noise_at, ids, best)

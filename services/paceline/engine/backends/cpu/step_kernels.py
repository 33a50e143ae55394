"""Compiled loops over all rows of a step: the target's tokens, down guesses or row by row, and a draft model's guesses.

They know temperature, top-k, top-p and min-p; whatever else a request asks for has changed its rows before. They
release the GIL.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt

from paceline.core.noise import split_uint64
from paceline.core.processors import Truncation
from paceline.engine.backends.cpu.noise_kernels import best_perturbed, best_plain
from paceline.engine.backends.cpu.row_kernels import CHUNK, Floats, Ints, Logits, exact_exp, filter_row, find_maxima
from paceline.kernel_cache import inlined, kernel

# How a session chooses: `paceline.core.processors.Truncation`, and the seed of its noise.
CHOICE = np.dtype([*get_type_hints(Truncation).items(), ("seed_low", np.uint64), ("seed_high", np.uint64)], align=True)
# There is no token to choose, or no guess of it.
NOTHING = -1

_MASK32, _SHIFT32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROOT = -1
# Of less than this share of the likeliest id nothing is left.
_LEAST_EXPONENT = -700.0


def choice_of(rule: Truncation, seed: int = 0) -> npt.NDArray[np.void]:
    """Returns a `CHOICE` `[1]`."""
    return np.array([(*astuple(rule), *split_uint64(seed))], CHOICE)


@kernel
def best(row: Logits, choice: Any, position: int, space: Any, top_ids: Ints, top_scores: Any) -> Any:
    """Finds the best ids of a row, by the noise of a position unless the choice is greedy.

    Args:
        row: float32 `[vocab]`.
        choice: A `CHOICE`.
        position: Absolute, of the token.
        space: Working space for one row, see `paceline.engine.sampler.working_space`.
        top_ids: int64 `[count]`, filled, best first; it comes as NOTHING.
        top_scores: float64 `[count]`, filled; it comes as -inf.

    Returns:
        The largest score without noise; NaN or infinite where the logits leave nothing to choose.
    """
    chunk_max, gathered, blocks = space
    largest = find_maxima(row, chunk_max)
    if not np.isfinite(largest):
        return largest
    if choice.greedy:
        best_plain(row, chunk_max, top_ids, top_scores)
        return largest
    cut, last_id = filter_row(row, chunk_max, largest, choice, gathered)
    place = np.uint64(position)
    best_perturbed(
        row, chunk_max, cut, last_id, choice.inverse_temperature, (choice.seed_low, choice.seed_high),
        (place & _MASK32, place >> _SHIFT32), blocks, top_ids, top_scores,
    )  # fmt: skip
    return largest * choice.inverse_temperature


@kernel
def _choose(row: Logits, choice: Any, position: int, space: Any) -> Any:
    """Returns the token for an absolute position; NOTHING where the logits leave none."""
    top_id, top_score = np.full(1, NOTHING, np.int64), np.full(1, -np.inf)
    best(row, choice, position, space, top_id, top_score)
    return top_id[0]


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
    known: Ints,
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
        known: int64 `[rows]`, the tokens of all rows, NOTHING where there is none, if they are chosen already: then
            no logits are read. Empty: they are chosen here, where they are needed.
        firsts: int64 `[sessions]`, the first of those rows.
        positions: int64 `[sessions]`, absolute, of the first token to choose.
        choices: `CHOICE` `[sessions]`.
        starts: int64 `[sessions]`, where the guesses of each session begin.
        stops: int64 `[sessions]`, where they end.
        tokens: int32 `[guesses]`.
        parents: int32 `[guesses]`, which of its session's guesses each one hangs below; -1: none.
        space: See `best`.
        chosen: int64 `[rows]`, filled from the session's first row on.
        counts: int64 `[sessions]`, filled with how many; 0 where the logits leave nothing to choose.
        rivals: bool `[sessions]`, filled with whether there were guesses in the last one's place.
    """
    for session in range(len(firsts)):
        guesses = slice(starts[session], stops[session])
        at, count = _ROOT, 0
        while True:
            row = firsts[session] + at + 1
            if len(known):
                token_id = known[row]
            else:
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
    logits: Logits, rows: Ints, positions: Ints, choices: Any, space: Any, top_ids: Ints, top_scores: Any, largest: Any
) -> None:
    """Finds the best ids of each row.

    Args:
        logits: float32 `[rows, vocab]`.
        rows: int64 `[n]`, which of them.
        positions: int64 `[n]`, absolute, of the tokens to guess.
        choices: `CHOICE` `[n]`.
        space: See `best`.
        top_ids: int64 `[n, count]`, filled, best first; it comes as NOTHING.
        top_scores: float64 `[n, count]`, filled; it comes as -inf.
        largest: float64 `[n]`, filled with the largest score without noise; NaN or infinite where there is none.
    """
    for each in range(len(rows)):
        largest[each] = best(logits[rows[each]], choices[each], positions[each], space, top_ids[each], top_scores[each])


@kernel
def probabilities(row: Logits, choice: Any, space: Any, probs: Floats) -> float:
    """Fills in the law of what is chosen from a row; at temperature 0 all of it is one id's.

    Args:
        row: float32 `[vocab]`.
        choice: A `CHOICE`.
        space: See `best`.
        probs: float64 `[vocab]`.

    Returns:
        The largest logit; NaN or infinite where the logits leave nothing to choose, and nothing is filled in.
    """
    chunk_max, gathered, _ = space
    largest = find_maxima(row, chunk_max)
    if not np.isfinite(largest):
        return largest
    probs[:] = 0.0
    if choice.greedy:
        probs[np.argmax(row)] = 1.0
        return largest
    cut, last_id = filter_row(row, chunk_max, largest, choice, gathered)
    total = 0.0
    for chunk in range(len(chunk_max)):
        if chunk_max[chunk] < cut:
            continue
        for token_id in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, len(row))):
            logit = row[token_id]
            exponent = (np.float64(logit) - largest) * choice.inverse_temperature
            if (logit > cut or (logit == cut and token_id <= last_id)) and exponent > _LEAST_EXPONENT:
                probs[token_id] = exact_exp(exponent)
                total += probs[token_id]
    for token_id in range(len(row)):
        probs[token_id] /= total
    return largest


@kernel
def _pick(masses: Floats, uniform: float) -> int:
    """Returns the id whose interval of cumulative mass holds `uniform` in [0, 1), never one of mass 0."""
    total = 0.0
    for mass in masses:
        total += mass
    reached, last = 0.0, NOTHING
    for token_id in range(len(masses)):
        reached += masses[token_id]
        if masses[token_id] > 0.0:
            last = token_id
            if reached > uniform * total:
                break
    return last


@kernel
def accept(probs: Floats, drawn_ids: Ints, drawn_weights: Floats, guess: int, uniforms: Floats) -> tuple[int, float]:
    """Accepts a guess by the rejection rule, or chooses in its place (2211.17192, algorithm 1).

    Args:
        probs: float64 `[vocab]`, the target's law; overwritten.
        drawn_ids: int64 `[m]`, ids that the guess was drawn from; all others have no weight.
        drawn_weights: float64 `[m]`, of these ids.
        guess: NOTHING: none was verified, and the token is drawn from the target's law.
        uniforms: float64 `[2]` in [0, 1), for the guess, and for a token in its place.

    Returns:
        The token, and how likely a guess from this distribution was to be accepted: what the two laws have in common.
    """
    total, chance, share = drawn_weights.sum(), 0.0, 0.0
    for entry in range(len(drawn_ids)):
        chance += min(probs[drawn_ids[entry]], drawn_weights[entry] / total)
        if drawn_ids[entry] == guess:
            share = drawn_weights[entry] / total
    if guess == NOTHING:
        return _pick(probs, uniforms[1]), chance
    if uniforms[0] * share < probs[guess]:
        return guess, chance
    before, excess = probs[drawn_ids], 0.0
    for entry in range(len(drawn_ids)):
        token_id = drawn_ids[entry]
        probs[token_id] = max(probs[token_id] - drawn_weights[entry] / total, 0.0)
    for mass in probs:
        excess += mass
    if not excess > 0.0:
        # The two laws are equal up to rounding.
        for entry in range(len(drawn_ids)):
            probs[drawn_ids[entry]] = before[entry]
    return _pick(probs, uniforms[1]), chance


@kernel
def choose(
    rows: Logits,
    positions: Ints,
    choices: Any,
    guesses: Ints,
    uniforms: Floats,
    ends: Ints,
    drawn_ids: Ints,
    drawn_weights: Floats,
    space: Any,
    probs: Floats,
    chosen: Ints,
    chances: Floats,
) -> None:
    """Chooses a token at each row: by the noise of its position, or by the rejection rule.

    Args:
        rows: float32 `[n, vocab]`.
        positions: int64 `[n]`, absolute, of the tokens.
        choices: `CHOICE` `[n]`.
        guesses: int64 `[n]`, as of `accept`.
        uniforms: float64 `[n, 2]`, as of `accept`; NaN: by noise.
        ends: int64 `[n]`, where ids and weights of each row end.
        drawn_ids: int64 `[m]`.
        drawn_weights: float64 `[m]`.
        space: See `best`.
        probs: float64 `[vocab]`, working space; none is needed without the rejection rule.
        chosen: int64 `[n]`, filled; NOTHING where the logits leave nothing to choose.
        chances: float64 `[n]`, filled for the rejection rule, as of `accept`.
    """
    start = 0
    for each in range(len(rows)):
        drawn = slice(start, ends[each])
        start = ends[each]
        if np.isnan(uniforms[each, 0]):
            chosen[each] = _choose(rows[each], choices[each], positions[each], space)
        elif np.isfinite(probabilities(rows[each], choices[each], space, probs)):
            chosen[each], chances[each] = accept(
                probs, drawn_ids[drawn], drawn_weights[drawn], guesses[each], uniforms[each]
            )
        else:
            chosen[each] = NOTHING

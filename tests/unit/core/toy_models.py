"""Toy models as tables, and exact laws of what is committed, for the proofs by enumeration."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

FloatArray = npt.NDArray[np.float64]
Tokens = tuple[int, ...]
Model = dict[Tokens, FloatArray]
Law = dict[Tokens, float]


def prefixes(vocab: int, longest: int) -> Iterator[Tokens]:
    for length in range(longest + 1):
        yield from itertools.product(range(vocab), repeat=length)


def normalised(weights: Sequence[int]) -> FloatArray:
    return np.array(weights, dtype=np.float64) / sum(weights)


def laws(vocab: int) -> st.SearchStrategy[FloatArray]:
    return st.lists(st.integers(0, 9), min_size=vocab, max_size=vocab).filter(any).map(normalised)


def completed(law: Law, target: Model, length: int) -> Law:
    """The law of the first `length` tokens when the target itself goes on after each committed run."""
    while any(len(tokens) < length for tokens in law):
        longer: Law = defaultdict(float)
        for tokens, prob in law.items():
            if len(tokens) == length:
                longer[tokens] += prob
                continue
            for token_id, next_prob in enumerate(target[tokens]):
                longer[(*tokens, token_id)] += prob * float(next_prob)
        law = longer
    return law


def total_variation(law: Law, target: Model, length: int) -> float:
    """Distance between the completed law of committed tokens and the target's own."""
    found, wanted = completed(law, target, length), completed({(): 1.0}, target, length)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    return 0.5 * sum(abs(found.get(tokens, 0.0) - wanted.get(tokens, 0.0)) for tokens in {*found, *wanted})


def cells(cuts: Sequence[float]) -> list[tuple[float, float]]:
    """Representative and width of every interval between the cuts of [0, 1)."""
    edges = [0.0, *sorted(cut for cut in cuts if 0.0 < cut < 1.0), 1.0]
    pairs = [((low + high) / 2, high - low) for low, high in itertools.pairwise(edges)]
    return [(middle, width) for middle, width in pairs if width > 1e-14]


def excess_law(target_probs: FloatArray, draft_probs: FloatArray) -> FloatArray:
    excess = np.maximum(target_probs - draft_probs, 0.0)
    return excess / max(float(excess.sum()), 1e-300)


def uniform_cells(
    target_rows: Sequence[FloatArray], draft_rows: Sequence[FloatArray], tokens: Tokens
) -> Iterator[tuple[list[float], float]]:
    """All cells of the gamma + 1 uniforms on which a walk over these rows is constant, with their volumes."""
    axes = [
        cells([target[token] / draft[token]])
        for target, draft, token in zip(target_rows, draft_rows, tokens, strict=False)
    ]
    last_laws = [*target_rows, *map(excess_law, target_rows, draft_rows)]
    axes.append(cells(np.concatenate([np.cumsum(law) for law in last_laws]).tolist()))
    for cell in itertools.product(*axes):
        yield [middle for middle, _ in cell], math.prod(width for _, width in cell)

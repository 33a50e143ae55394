"""Proof by enumeration: what the rejection rule commits has the target's law, whatever was drafted.

Nothing is sampled. A toy model is a table: the law of the next token for every prefix. Laws of whole
sequences are exact sums over all outcomes of all random numbers, and are compared to 1e-12. Committed runs
differ in length, so each is completed to gamma + 1 tokens with the target's own law before the comparison
(2302.01318, theorem 1).

Rejection rule: the uniforms are cut at every point where the walk can change its mind; one representative per
cell, weighed by the cell's volume, makes the sum exact, and the code under test is run for each.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.acceptance import sparse_draft
from tests.support.laws import VerifyOutcome, dense, pick, reject_walk
from tests.unit.core.toy_models import (
    SHAPES,
    FloatArray,
    Law,
    Model,
    cells,
    completed,
    laws,
    normalised,
    prefixes,
    random_model,
    total_variation,
    uniform_cells,
)


@st.composite
def model_pairs(draw: st.DrawFn) -> tuple[int, int, Model, Model]:
    vocab, gamma = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]))
    target = {prefix: draw(laws(vocab)) for prefix in prefixes(vocab, gamma)}
    return vocab, gamma, target, {prefix: draw(laws(vocab)) for prefix in prefixes(vocab, gamma - 1)}


def rejection_law(gamma: int, target: Model, draft: Model) -> Law:
    """Exact law of the committed run."""
    law: Law = defaultdict(float)
    for tokens, draft_mass in completed({(): 1.0}, draft, gamma).items():
        if draft_mass == 0.0:
            continue
        heads = [tokens[:length] for length in range(gamma + 1)]
        target_rows, draft_rows = [target[head] for head in heads], [draft[head] for head in heads[:-1]]
        for uniforms, volume in uniform_cells(target_rows, draft_rows, tokens):
            outcome = reject_walk(target_rows, draft_rows, tokens, uniforms)
            law[*tokens[: outcome.num_accepted], outcome.next_token_id] += draft_mass * volume
    return law


@pytest.mark.parametrize(("vocab", "gamma"), SHAPES)
def test_rejection_commits_the_law_of_the_target(vocab: int, gamma: int) -> None:
    """2211.17192, appendix A.1; 2302.01318, theorem 1."""
    rng = np.random.default_rng(100 * vocab + gamma)
    for _ in range(6 if gamma < 3 else 2):
        target, draft = random_model(rng, vocab, gamma), random_model(rng, vocab, gamma - 1)
        assert total_variation(rejection_law(gamma, target, draft), target, gamma + 1) < 1e-12


@settings(deadline=None, max_examples=60)
@given(model_pairs())
def test_rejection_commits_the_law_of_any_target_under_any_draft(
    pair: tuple[int, int, Model, Model],
) -> None:
    _, gamma, target, draft = pair
    assert total_variation(rejection_law(gamma, target, draft), target, gamma + 1) < 1e-12


def test_a_token_without_target_mass_is_never_accepted_even_at_uniform_zero() -> None:
    target, draft = normalised([0, 1]), normalised([1, 1])
    outcome = reject_walk([target, target], [draft], [0], [0.0, 0.0])
    assert outcome == VerifyOutcome(num_accepted=0, next_token_id=1)


def test_equal_laws_accept_everything_and_add_a_bonus() -> None:
    probs = normalised([1, 2, 3])
    outcome = reject_walk([probs] * 3, [probs] * 2, [2, 0], [0.999999, 0.999999, 0.9])
    assert outcome == VerifyOutcome(num_accepted=2, next_token_id=2)


@given(st.integers(2, 8).flatmap(laws), st.floats(0.0, 1.0, exclude_max=True))
def test_a_token_of_mass_zero_is_never_picked(probs: FloatArray, uniform: float) -> None:
    assert probs[pick(probs, uniform)] > 0.0
    assert pick(probs, math.nextafter(1.0, 0.0)) == np.flatnonzero(probs)[-1]


# Sparse drafts


@given(st.integers(2, 12).flatmap(laws), st.integers(1, 12))
def test_a_sparse_draft_is_sampled_with_exactly_the_law_it_sends(probs: FloatArray, keep: int) -> None:
    sent = sparse_draft(probs, keep)
    sent_probs = dense(sent, len(probs))
    law = np.zeros(len(probs))
    for middle, width in cells(np.cumsum(sent_probs[list(sent.token_ids)]).tolist()):
        law[sent.sample(middle)] += width
    np.testing.assert_allclose(law, sent_probs, atol=1e-12)


def test_a_sparse_draft_keeps_the_64_best_in_sixteen_bits_lowest_id_first_among_equals() -> None:
    sent = sparse_draft(normalised([*[1] * 100, 5]))
    assert sent.token_ids == (100, *range(63))
    assert max(sent.weights) == 65535
    assert dense(sent, 101).sum() == pytest.approx(1.0, abs=1e-15)


@given(st.integers(2, 12).flatmap(laws), st.integers(1, 12))
def test_a_sparse_draft_keeps_the_best_of_the_whole_order(probs: FloatArray, keep: int) -> None:
    best = [index for index in np.argsort(-probs, kind="stable")[:keep].tolist() if probs[index] > 0.0]
    assert sparse_draft(probs, keep).token_ids == tuple(best)


def test_a_sparse_draft_drops_ids_whose_weight_rounds_to_nothing() -> None:
    assert sparse_draft(np.array([1e-9, 1.0 - 1e-9])).token_ids == (1,)

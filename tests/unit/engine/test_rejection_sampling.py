"""Proof by enumeration: what the rejection rule commits has the target's law, whatever was drafted.

Nothing is sampled. A toy model is a table: the law of the next token for every prefix. Laws of whole
sequences are exact sums over all outcomes of all random numbers, and are compared to 1e-12. Committed runs
differ in length, so each is completed to gamma + 1 tokens with the target's own law before the comparison
(2302.01318, theorem 1).

Rejection rule: the uniforms are cut at every point where the walk can change its mind; one representative per
cell, weighed by the cell's volume, makes the sum exact, and the code under test is run for each.

Bugs that public code has had are planted, and the same law test must find each (total variation above 1e-3).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.rejection_sampling import sparse_draft
from tests.support.laws import VerifyOutcome, accept_prob, dense, overlap, pick, reject_walk, residual
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
    race_law,
    random_model,
    total_variation,
    uniform_cells,
)

Walk = Callable[[Sequence[FloatArray], Sequence[FloatArray], Sequence[int], Sequence[float]], VerifyOutcome]


@st.composite
def model_pairs(draw: st.DrawFn) -> tuple[int, int, Model, Model]:
    vocab, gamma = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]))
    target = {prefix: draw(laws(vocab)) for prefix in prefixes(vocab, gamma)}
    return vocab, gamma, target, {prefix: draw(laws(vocab)) for prefix in prefixes(vocab, gamma - 1)}


def rejection_law(
    gamma: int,
    target: Model,
    draft: Model,
    *,
    reported: Model | None = None,
    walk: Walk = reject_walk,
) -> Law:
    """Exact law of the committed run; drafts come from `draft`, the verifier is told `reported`."""
    reported = reported or draft
    law: Law = defaultdict(float)
    for tokens, draft_mass in completed({(): 1.0}, draft, gamma).items():
        if draft_mass == 0.0:
            continue
        heads = [tokens[:length] for length in range(gamma + 1)]
        target_rows, draft_rows = [target[head] for head in heads], [reported[head] for head in heads[:-1]]
        for uniforms, volume in uniform_cells(target_rows, draft_rows, tokens):
            outcome = walk(target_rows, draft_rows, tokens, uniforms)
            run = (*tokens[: outcome.num_accepted], outcome.next_token_id)
            law[run] += draft_mass * volume
    return law


# The rejection rule


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


@given(st.integers(2, 6).flatmap(lambda vocab: st.tuples(laws(vocab), laws(vocab))))
def test_accepted_and_recovered_mass_add_up_to_the_target(pair: tuple[FloatArray, FloatArray]) -> None:
    target, draft = pair
    keep = np.array([accept_prob(target, draft, token) for token in range(len(target))])
    rejected = float(np.sum(draft * (1.0 - keep)))
    np.testing.assert_allclose(draft * keep + rejected * residual(target, draft), target, atol=1e-12)
    assert float(np.sum(draft * keep)) == pytest.approx(1.0 - 0.5 * np.abs(target - draft).sum(), abs=1e-12)
    assert float(np.sum(draft * keep)) == pytest.approx(overlap(target, draft), abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(3, 4).flatmap(lambda vocab: st.tuples(laws(vocab), laws(vocab))), st.integers(1, 3))
def test_a_sparse_draft_keeps_the_law_if_it_is_what_was_sampled(pair: tuple[FloatArray, FloatArray], keep: int) -> None:
    vocab = len(pair[0])
    target = dict.fromkeys(prefixes(vocab, 1), pair[0])
    sent: Model = {(): dense(sparse_draft(pair[1], keep), vocab)}
    assert total_variation(rejection_law(1, target, sent), target, 2) < 1e-12


def test_a_token_without_target_mass_is_never_accepted_even_at_uniform_zero() -> None:
    target, draft = normalised([0, 1]), normalised([1, 1])
    outcome = reject_walk([target, target], [draft], [0], [0.0, 0.0])
    assert outcome == VerifyOutcome(num_accepted=0, next_token_id=1)


def test_equal_laws_accept_everything_and_add_a_bonus() -> None:
    probs = normalised([1, 2, 3])
    outcome = reject_walk([probs] * 3, [probs] * 2, [2, 0], [0.999999, 0.999999, 0.9])
    assert outcome == VerifyOutcome(num_accepted=2, next_token_id=2)


def test_the_residual_of_equal_laws_is_the_law_itself() -> None:
    np.testing.assert_allclose(residual(normalised([1, 3]), normalised([1, 3])), [0.25, 0.75])


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


# Planted bugs: the law test must find them


FIXED_TARGET = {prefix: np.array([0.50, 0.30, 0.15, 0.05]) for prefix in prefixes(4, 2)}
FIXED_DRAFT = {prefix: np.array([0.30, 0.45, 0.05, 0.20]) for prefix in prefixes(4, 1)}
DETECTED = 1e-3


def test_planted_bug_reported_draft_distribution_is_not_the_sampled_one() -> None:
    """Sampled from the top 2, reported untruncated (as in transformers issue 47932)."""
    sampled = {prefix: dense(sparse_draft(probs, 2), 4) for prefix, probs in FIXED_DRAFT.items()}
    honest = rejection_law(2, FIXED_TARGET, sampled)
    planted = rejection_law(2, FIXED_TARGET, sampled, reported=FIXED_DRAFT)
    assert total_variation(honest, FIXED_TARGET, 3) < 1e-12
    assert total_variation(planted, FIXED_TARGET, 3) > DETECTED


def test_planted_bug_quantised_after_sampling() -> None:
    reported = {prefix: np.round(probs * 16) / 16 for prefix, probs in FIXED_DRAFT.items()}
    planted = rejection_law(2, FIXED_TARGET, FIXED_DRAFT, reported=reported)
    assert total_variation(planted, FIXED_TARGET, 3) > DETECTED


def truncate_after_looking(
    target_rows: Sequence[FloatArray],
    draft_rows: Sequence[FloatArray],
    draft_tokens: Sequence[int],
    uniforms: Sequence[float],
) -> VerifyOutcome:
    """Drops the chain from the first token on that the drafter itself found improbable."""
    keep = 0
    while keep < len(draft_tokens) and draft_rows[keep][draft_tokens[keep]] >= 0.25:
        keep += 1
    fresh = [*uniforms[:keep], uniforms[-1]]
    return reject_walk(target_rows[: keep + 1], draft_rows[:keep], draft_tokens[:keep], fresh)


def truncate_after_including(
    target_rows: Sequence[FloatArray],
    draft_rows: Sequence[FloatArray],
    draft_tokens: Sequence[int],
    uniforms: Sequence[float],
) -> VerifyOutcome:
    """Ends the chain behind the improbable token: what is dropped was not looked at."""
    keep = 0
    while keep < len(draft_tokens) and (keep == 0 or draft_rows[keep - 1][draft_tokens[keep - 1]] >= 0.25):
        keep += 1
    fresh = [*uniforms[:keep], uniforms[-1]]
    return reject_walk(target_rows[: keep + 1], draft_rows[:keep], draft_tokens[:keep], fresh)


def test_planted_bug_truncation_after_looking_at_the_token() -> None:
    planted = rejection_law(2, FIXED_TARGET, FIXED_DRAFT, walk=truncate_after_looking)
    assert total_variation(planted, FIXED_TARGET, 3) > DETECTED


def test_truncation_behind_the_token_looked_at_keeps_the_law() -> None:
    allowed = rejection_law(2, FIXED_TARGET, FIXED_DRAFT, walk=truncate_after_including)
    assert total_variation(allowed, FIXED_TARGET, 3) < 1e-12


def residual_draw_law(joint: FloatArray) -> Law:
    """Law of the first token when draft i and residual draw j come with probability joint[i, j]."""
    target, draft = FIXED_TARGET[()], FIXED_DRAFT[()]
    law: Law = defaultdict(float)
    for i, j in itertools.product(range(4), repeat=2):
        keep = accept_prob(target, draft, i)
        law[(i,)] += float(joint[i, j]) * keep
        law[(j,)] += float(joint[i, j]) * (1.0 - keep)
    return law


def test_planted_bug_reused_noise_in_the_residual() -> None:
    """The draft's Gumbel noise serves the residual draw too; independent noise is the control."""
    draft, rest = FIXED_DRAFT[()], residual(FIXED_TARGET[()], FIXED_DRAFT[()])
    assert total_variation(residual_draw_law(np.outer(draft, rest)), FIXED_TARGET, 1) < 1e-12
    assert total_variation(residual_draw_law(race_law(draft, rest)), FIXED_TARGET, 1) > DETECTED


def test_planted_bug_reused_uniform_in_the_residual() -> None:
    """The uniform that drew the draft token draws the recovered token too."""
    target, draft = FIXED_TARGET[()], FIXED_DRAFT[()]
    cuts = np.concatenate((np.cumsum(draft), np.cumsum(residual(target, draft)))).tolist()
    law: Law = defaultdict(float)
    for shared, width in cells(cuts):
        token = pick(draft, shared)
        for uniform, share in cells([target[token] / draft[token]]):
            outcome = reject_walk([target, target], [draft], [token], [uniform, shared])
            first = token if outcome.num_accepted else outcome.next_token_id
            law[(first,)] += width * share
    assert total_variation(law, FIXED_TARGET, 1) > DETECTED

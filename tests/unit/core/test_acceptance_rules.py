"""Rules at work on trees, and which is taken. Proofs: tests/contract/test_served_rules.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.acceptance import SparseDraft, rule_of, served_rules, sparse_draft
from paceline.core.errors import RemoteProtocolError
from paceline.core.link import SessionLink
from paceline.core.messages import GenerateRequest
from paceline.core.params import COUPLED, REJECTION, SamplingParams, SpeculationParams
from tests.support.guesses import NodeGuess
from tests.support.laws import dense
from tests.support.trees import merge_into, new_tree, nodes_of
from tests.unit.core.toy_models import FloatArray, cells, laws, normalised


def guess(node_id: int, parent_id: int, token_id: int, *weights: int) -> NodeGuess:
    draft = SparseDraft(token_ids=tuple(range(len(weights))), weights=weights) if weights else None
    return NodeGuess(node_id=node_id, parent_id=parent_id, token_id=token_id, confidence=0.75, distribution=draft)


# Which rule


def test_a_request_names_its_rule_and_else_it_is_the_verifiers() -> None:
    assert rule_of(SpeculationParams(), REJECTION) == REJECTION
    assert rule_of(SpeculationParams(acceptance=COUPLED), REJECTION) == COUPLED
    assert rule_of(SpeculationParams(acceptance=REJECTION), COUPLED) == REJECTION


def test_without_speculation_there_is_nothing_to_accept_and_tokens_are_those_of_the_coupled_rule() -> None:
    assert rule_of(SpeculationParams(enabled=False), REJECTION) == COUPLED
    assert rule_of(SpeculationParams(max_draft_tokens=0, acceptance=REJECTION), COUPLED) == COUPLED


def test_the_rules_that_can_be_asked_for_begin_with_the_default() -> None:
    assert served_rules(COUPLED, ("draft_model", "ngram")) == (COUPLED, REJECTION)
    assert served_rules(REJECTION, ("draft_model",)) == (REJECTION, COUPLED)
    # Chains come from the drafter tier alone.
    assert served_rules(COUPLED, ("ngram",)) == (COUPLED,)


# Chains


def test_a_chain_takes_the_first_guess_below_a_node_and_nothing_beside_it() -> None:
    tree = new_tree([9], chain=True)
    guesses = [guess(1, 0, 0, 1, 1), guess(2, 0, 1, 1, 1), guess(3, 2, 0, 1, 1), guess(4, 1, 1, 1, 1)]
    merge_into(tree, guesses, 1)
    assert [node.token_id for node in nodes_of(tree)] == [0, 1]
    again = merge_into(tree, [guess(5, 0, 0, 1, 3), guess(6, 5, 0, 1, 1)], 1)
    assert (again[0], again[2]) == (0, 1), "5 is 1 by another name, and has a child"
    first = nodes_of(tree)[0].draft
    assert first is not None
    assert first.weights == (1, 1), "what was said of it first counts"


def test_of_an_id_that_is_used_twice_the_distribution_of_the_guess_in_the_tree_counts() -> None:
    """Otherwise a drafter could make a guess that its distribution does not hold, and a session fail by a division."""
    tree = new_tree([9], chain=True)
    other = NodeGuess(1, 0, 5, 0.75, SparseDraft(token_ids=(5,), weights=(1,)))
    merge_into(tree, [guess(1, 0, 0, 1, 3), other], 1)
    first = nodes_of(tree)[0].draft
    assert first is not None
    assert first.token_ids == (0, 1)
    lost = new_tree([9], chain=True)
    # The first hangs below nothing, so that the second takes its name.
    merge_into(lost, [guess(1, 7, 0, 1, 3), other], 1)
    assert nodes_of(lost)[0].draft == other.distribution


def test_a_session_refuses_a_guess_that_does_not_say_what_it_was_drawn_from() -> None:
    request = GenerateRequest(
        session_id="s",
        epoch=1,
        prompt_token_ids=(9,),
        sampling=SamplingParams(max_tokens=9),
        speculation=SpeculationParams(),
    )
    link = SessionLink(request, 1, [9], new_tree([9], chain=True), {}, acceptance=REJECTION)
    with pytest.raises(RemoteProtocolError, match=rf"Drafts.distributions: .* rule {REJECTION}"):
        link.check(1, has_distributions=False)


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

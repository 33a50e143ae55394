"""Rules at work on trees, and which is taken. Proofs: tests/contract/test_served_rules.py."""

from __future__ import annotations

import pytest

from paceline.core.acceptance_rules import RULES, TargetRows, judge_rejection, rule_of, served_rules, token_fates
from paceline.core.errors import RemoteProtocolError
from paceline.core.link import SessionLink
from paceline.core.messages import GenerateRequest, TokenFate
from paceline.core.params import ACCEPTANCE_RULES, COUPLED, REJECTION, SamplingParams, SpeculationParams
from paceline.core.rejection_sampling import SparseDraft, overlap
from paceline.core.tree import Node
from tests.support.guesses import NodeGuess
from tests.support.trees import merge_into, new_tree, nodes_of, verified
from tests.unit.core.toy_models import normalised


def guess(node_id: int, parent_id: int, token_id: int, *weights: int) -> NodeGuess:
    draft = SparseDraft(token_ids=tuple(range(len(weights))), weights=weights) if weights else None
    return NodeGuess(node_id=node_id, parent_id=parent_id, token_id=token_id, confidence=0.75, distribution=draft)


def never(_: Node) -> int:
    raise AssertionError("it samples from the target's distribution")


def draft(*weights: int) -> SparseDraft:
    return SparseDraft(token_ids=tuple(range(len(weights))), weights=weights)


# Which rule


def test_a_request_names_its_rule_and_else_it_is_the_verifiers() -> None:
    assert rule_of(SpeculationParams(), REJECTION) == REJECTION
    assert rule_of(SpeculationParams(acceptance=COUPLED), REJECTION) == COUPLED
    assert rule_of(SpeculationParams(acceptance=REJECTION), COUPLED) == REJECTION


def test_without_speculation_there_is_nothing_to_accept_and_tokens_are_those_of_the_coupled_rule() -> None:
    assert rule_of(SpeculationParams(enabled=False), REJECTION) == COUPLED
    assert rule_of(SpeculationParams(max_draft_tokens=0, acceptance=REJECTION), COUPLED) == COUPLED


def test_every_rule_that_a_request_may_name_is_in_the_table() -> None:
    assert tuple(RULES) == ACCEPTANCE_RULES


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
    link = SessionLink(request, [9], new_tree([9], chain=True), {}, acceptance=REJECTION)
    with pytest.raises(RemoteProtocolError, match=rf"Drafts.distributions: .* rule {REJECTION}"):
        link.check(1, has_distributions=False)


def test_what_is_learned_of_a_drafter_is_how_often_its_guess_is_accepted_whatever_it_was() -> None:
    """1 - TV of each row on the committed path, the one below the last verified node included."""
    target, drawn_from = normalised([5, 3, 2]), normalised([1, 1, 2])
    learned = set()
    for token_id in range(3):
        root, (first, _) = verified((-1, token_id, draft(1, 1, 2)), (0, 0, draft(2, 1, 1)))
        rows = TargetRows(choose=never, distribution=lambda _: target, uniforms=lambda count: [0.5] * count)
        verdict = judge_rejection(root, [first], rows)
        assert verdict.chances is not None
        learned.add(verdict.chances[0])
        if len(verdict.token_ids) == 2:
            assert verdict.chances[1] == overlap(target, normalised([2, 1, 1]))
    assert learned == {overlap(target, drawn_from)}
    assert overlap(target, drawn_from) == pytest.approx(0.25 + 0.25 + 0.2)


# How tokens came about


@pytest.mark.parametrize(
    ("tokens", "token_ids", "fates"),
    [
        ((), (1,), "plain"),
        ((1,), (0,), "recovered"),
        ((1,), (1, 0), "accepted bonus"),
        ((1,), (1, 2), "accepted bonus"),
        ((1, 2), (1, 2, 0), "accepted accepted bonus"),
        ((1, 2), (1, 0), "accepted recovered"),
        ((1, 2, 3), (3, 0), "accepted bonus"),
        # An end token that was drafted ends a round without a token of the target's own.
        ((1, 2), (1, 2), "accepted accepted"),
    ],
)
def test_the_last_token_is_plain_recovered_or_bonus_and_those_before_it_are_accepted(
    tokens: tuple[int, ...], token_ids: tuple[int, ...], fates: str
) -> None:
    root, nodes = verified((-1, 1), (0, 2), (-1, 3))
    nodes = [node for node in nodes if node.token_id in tokens]
    assert token_fates(root, nodes, token_ids) == tuple(map(TokenFate, fates.split()))

"""Rules at work on trees: which is taken, and what the lossy one does. Laws: tests/contract/test_served_rules.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from paceline.core.acceptance_rules import Rules, token_fates
from paceline.core.errors import InvalidRequestError, RemoteProtocolError
from paceline.core.messages import GenerateRequest, TokenFate
from paceline.core.params import ACCEPTANCE_RULES, BLOCK, COUPLED, REJECTION, SamplingParams, SpeculationParams
from paceline.core.rejection_sampling import FloatArray, SparseDraft, overlap
from paceline.core.session import VerifierSession
from paceline.core.tree import Node
from tests.support.guesses import NodeGuess
from tests.support.plugin_pages import typical_rule
from tests.support.trees import graft_into, new_tree, nodes_of, verified
from tests.unit.core.toy_models import normalised


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The target's rows by the node's token; -1 is the root's."""

    laws: dict[int, FloatArray]
    choices: dict[int, int]

    def choose(self, node: Node) -> int:
        return self.choices[node.token_id]

    def law(self, node: Node) -> FloatArray:
        return self.laws[node.token_id]

    def uniforms(self, count: int) -> Sequence[float]:
        return [0.5] * count


def guess(node_id: int, parent_id: int, token_id: int, *weights: int) -> NodeGuess:
    draft = SparseDraft(token_ids=tuple(range(len(weights))), weights=weights) if weights else None
    return NodeGuess(node_id=node_id, parent_id=parent_id, token_id=token_id, confidence=0.75, distribution=draft)


def draft(*weights: int) -> SparseDraft:
    return SparseDraft(token_ids=tuple(range(len(weights))), weights=weights)


# Which rule


def test_a_request_names_its_rule_and_else_it_is_the_verifiers() -> None:
    rules = Rules(default=BLOCK)
    assert rules.of(SpeculationParams()).name == BLOCK
    assert rules.of(SpeculationParams(acceptance=REJECTION)).name == REJECTION
    assert rules.of(SpeculationParams(acceptance=COUPLED)).name == COUPLED
    assert Rules().of(SpeculationParams()).name == COUPLED


def test_without_speculation_there_is_nothing_to_accept_and_tokens_are_those_of_the_coupled_rule() -> None:
    assert Rules(default=REJECTION).of(SpeculationParams(enabled=False)).name == COUPLED
    lossy = Rules(default="typical", more=(typical_rule(),))
    assert lossy.of(SpeculationParams(max_draft_tokens=0)).name == COUPLED


def test_only_rules_of_other_packages_are_lossy_and_what_is_not_served_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"typical is not served here, only coupled, rejection, block"):
        Rules().of(SpeculationParams(acceptance="typical"))
    served = Rules(more=(typical_rule(),))
    lossy = {name: served.of(SpeculationParams(acceptance=name)).lossy for name in (*ACCEPTANCE_RULES, "typical")}
    assert lossy == {COUPLED: False, REJECTION: False, BLOCK: False, "typical": True}


# Chains


def test_a_chain_takes_the_first_guess_below_a_node_and_nothing_beside_it() -> None:
    tree = new_tree([9], chain=True)
    guesses = [guess(1, 0, 0, 1, 1), guess(2, 0, 1, 1, 1), guess(3, 2, 0, 1, 1), guess(4, 1, 1, 1, 1)]
    graft_into(tree, guesses, 1)
    assert [node.token_id for node in nodes_of(tree)] == [0, 1]
    again = graft_into(tree, [guess(5, 0, 0, 1, 3), guess(6, 5, 0, 1, 1)], 1)
    assert (again[0], again[2]) == (0, 1), "5 is 1 by another name, and has a child"
    first = nodes_of(tree)[0].draft
    assert first is not None
    assert first.weights == (1, 1), "what was said of it first counts"


def test_of_an_id_that_is_used_twice_the_distribution_of_the_guess_in_the_tree_counts() -> None:
    """Otherwise a drafter could make a guess that its distribution does not hold, and a session fail by a division."""
    tree = new_tree([9], chain=True)
    other = NodeGuess(1, 0, 5, 0.75, SparseDraft(token_ids=(5,), weights=(1,)))
    graft_into(tree, [guess(1, 0, 0, 1, 3), other], 1)
    first = nodes_of(tree)[0].draft
    assert first is not None
    assert first.token_ids == (0, 1)
    lost = new_tree([9], chain=True)
    # The first hangs below nothing, so that the second takes its name.
    graft_into(lost, [guess(1, 7, 0, 1, 3), other], 1)
    assert nodes_of(lost)[0].draft == other.distribution


@pytest.mark.parametrize("acceptance", [REJECTION, BLOCK])
def test_a_session_refuses_a_guess_that_does_not_say_what_it_was_drawn_from(acceptance: str) -> None:
    request = GenerateRequest(
        session_id="s",
        epoch=1,
        prompt_token_ids=(9,),
        sampling=SamplingParams(max_tokens=9),
        speculation=SpeculationParams(),
    )
    session = VerifierSession(request, acceptance=acceptance)
    with pytest.raises(RemoteProtocolError, match=rf"Drafts.distributions: .* rule {acceptance}"):
        session.check(1, has_distributions=False)


def test_what_is_learned_of_a_drafter_is_how_often_its_guess_is_accepted_whatever_it_was() -> None:
    """1 - TV of each row on the committed path, the one below the last verified node included."""
    target, drawn_from = normalised([5, 3, 2]), normalised([1, 1, 2])
    learned = set()
    for token_id in range(3):
        root, (first, _) = verified((-1, token_id, draft(1, 1, 2)), (0, 0, draft(2, 1, 1)))
        rows = Rows(laws={-1: target, **dict.fromkeys(range(3), target)}, choices={})
        verdict = Rules().of(SpeculationParams(acceptance=REJECTION)).judge(root, [first], rows)
        assert verdict.chances is not None
        learned.add(verdict.chances[0])
        if len(verdict.token_ids) == 2:
            assert verdict.chances[1] == overlap(target, normalised([2, 1, 1]))
    assert learned == {overlap(target, drawn_from)}
    assert overlap(target, drawn_from) == pytest.approx(0.25 + 0.25 + 0.2)


# The rule of docs/add-an-acceptance-rule.md


@pytest.mark.parametrize(
    ("options", "law", "choices", "count", "token_ids"),
    [
        # The target's own choice comes first.
        ({}, [1, 1, 6, 2], {-1: 1, 1: 0}, 3, (1, 0)),
        # Where it was not guessed, the likeliest guess stands in if it is typical: 0.3 is above 0.25, 0.1 is not.
        ({"threshold": 0.25, "alpha": 1.0}, [4, 2, 3, 1], {-1: 0, 2: 0}, 3, (2, 0)),
        ({"threshold": 0.35, "alpha": 2.0}, [4, 2, 3, 1], {-1: 0, 2: 0}, 3, (0,)),
        # A guess that was not verified never stands in.
        ({}, [4, 2, 3, 1], {-1: 0}, 0, (0,)),
        # At temperature 0 nothing but the target's choice is typical.
        ({}, [1, 0, 0, 0], {-1: 0}, 3, (0,)),
        # The less certain the target is, the less is asked of a token: 0.1 * exp(-entropy) is 0.028.
        ({"threshold": 0.9, "alpha": 0.1}, [4, 2, 3, 1], {-1: 0, 2: 0, 3: 0}, 3, (2, 3, 0)),
    ],
)
def test_a_typical_guess_stands_in_for_a_choice_that_was_not_guessed(
    options: dict[str, float], law: list[int], choices: dict[int, int], count: int, token_ids: tuple[int, ...]
) -> None:
    root, nodes = verified((-1, 1), (-1, 2), (1, 3))
    rows = Rows(laws=dict.fromkeys(range(-1, 4), normalised(law)), choices=choices)
    assert typical_rule(**options).judge(root, nodes[:count], rows).token_ids == token_ids


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


def test_the_rules_that_can_be_asked_for_begin_with_the_default() -> None:
    assert Rules().names(("draft_model", "ngram")) == ("coupled", "rejection", "block")
    assert Rules(default="block").names(("draft_model",)) == ("block", "coupled", "rejection")
    # Chains come from the drafter tier alone.
    assert Rules().names(("ngram",)) == ("coupled",)

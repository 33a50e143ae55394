"""Acceptance rules at work on a draft tree: verified nodes and the target's rows in, tokens out.

A rule sees one round of one session. It knows neither models nor the wire; what it asks of the target comes through
`TargetRows`. The mathematics is in `paceline.core.rejection_sampling`. `RULES` is the table of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.messages import TokenFate
from paceline.core.params import ACCEPTANCE_RULES, COUPLED, REJECTION, TIER_METHODS, SpeculationParams
from paceline.core.rejection_sampling import FloatArray, overlap, reject_walk
from paceline.core.tree import Node, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRows:
    """What the target computes in one round of one session, at the root and at the verified nodes.

    Attributes:
        choose: The target's own choice after a node, by the session's noise.
        distribution: Of the token after a node, `[vocab]`: all processors applied, the node's path counted as output.
        uniforms: So many numbers in [0, 1) that no other round and no draft has seen.
    """

    choose: Callable[[Node], int]
    distribution: Callable[[Node], FloatArray]
    uniforms: Callable[[int], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a round commits: accepted draft tokens, and the one that follows them.

    Args:
        token_ids: At least one.
        chances: For each place in it, the probability that the guess there was accepted, where the rule knows it;
            None: it was accepted exactly where that was committed.
    """

    token_ids: tuple[int, ...]
    chances: tuple[float, ...] | None = None


def token_fates(root: Node, verified: Sequence[Node], token_ids: Sequence[int]) -> tuple[TokenFate, ...]:
    """Returns how each token of a round came about.

    Args:
        root: Stands for the last committed token; its tree as the round found it.
        verified: Nodes below it whose rows this step computed.
        token_ids: What the round commits; all but the last are verified nodes.
    """
    members = set(map(id, verified))
    fates: list[TokenFate] = []
    node = root
    for token_id in token_ids:
        child = node.children.get(token_id)
        if child is None or id(child) not in members:
            rivals = any(id(each) in members for each in node.children.values())
            own = TokenFate.RECOVERED if rivals else TokenFate.BONUS
            return (*fates, own if members else TokenFate.PLAIN)
        fates.append(TokenFate.ACCEPTED)
        node = child
    return tuple(fates)


def judge_coupled(root: Node, verified: Sequence[Node], rows: TargetRows) -> Verdict:
    """Follows the target's own choices down the verified nodes (section 3 of docs/speculation.md)."""
    return Verdict(token_ids=walk(root, verified, rows.choose))


def judge_rejection(root: Node, verified: Sequence[Node], rows: TargetRows) -> Verdict:
    """Walks down the verified nodes, which are a chain, each with the distribution that it was sampled from."""
    targets = [rows.distribution(node) for node in (root, *verified)]
    token_ids = [node.token_id for node in verified]
    drafts = [_drawn_from(node, targets[0]) for node in verified]
    outcome = reject_walk(targets, drafts, token_ids, rows.uniforms(len(verified) + 1))
    path = (root, *verified[: outcome.num_accepted])
    # An overlap is what the share of accepted tokens would be in the mean, and it is known whether or not the next
    # guess was verified.
    chances = [
        overlap(target, _drawn_from(child, target))
        for node, target in zip(path, targets, strict=False)
        for child in node.children.values()
    ]
    return Verdict(
        token_ids=(*token_ids[: outcome.num_accepted], outcome.next_token_id),
        chances=tuple(chances),
    )


def _drawn_from(node: Node, target: FloatArray) -> FloatArray:
    assert node.draft is not None, "a session takes no guess without a distribution under such a rule"
    return node.draft.probs(len(target))


# Decides one round: the root stands for the last committed token, the nodes below it are those whose rows this step
# computed, parents before children.
Judge = Callable[[Node, Sequence[Node], TargetRows], Verdict]
# All acceptance rules by the names that requests use, which are those of `paceline.core.params`.
RULES: dict[str, Judge] = {COUPLED: judge_coupled, REJECTION: judge_rejection}


def served_rules(default: str, methods: Sequence[str]) -> tuple[str, ...]:
    """Names of the rules that can be asked for, the default first, where a verifier drafts by these methods."""
    # Chains come from drafters of the tier only.
    served = ACCEPTANCE_RULES if set(methods) & set(TIER_METHODS) else (COUPLED,)
    return (default, *(name for name in served if name != default))


def rule_of(speculation: SpeculationParams, default: str) -> str:
    """The name of a session's rule; `coupled` without speculation, where there is nothing to accept."""
    return COUPLED if speculation.cap == 0 else speculation.acceptance or default

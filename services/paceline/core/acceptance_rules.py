"""Acceptance rules at work on a draft tree: verified nodes and the target's rows in, tokens out.

A rule sees one round of one session. It knows neither models nor the wire; what it asks of the target comes through
`TargetRows`. The mathematics is in `paceline.core.rejection_sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.errors import InvalidRequestError
from paceline.core.messages import TokenFate
from paceline.core.params import BLOCK, CHAIN_RULES, COUPLED, REJECTION, TIER_METHODS, SpeculationParams
from paceline.core.rejection_sampling import (
    FloatArray,
    VerifyOutcome,
    block_walk,
    overlap,
    reject_walk,
)
from paceline.core.tree import Node, walk


class TargetRows(Protocol):
    """What the target computes in one round of one session, at the root and at the verified nodes."""

    def choose(self, node: Node) -> int:
        """The target's own choice after a node, by the session's noise."""
        ...

    def law(self, node: Node) -> FloatArray:
        """Law of the token after a node, `[vocab]`: all processors applied, the node's path counted as output."""
        ...

    def uniforms(self, count: int) -> Sequence[float]:
        """Numbers in [0, 1) that no other round and no draft has seen."""
        ...


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


class Rule(Protocol):
    """One acceptance rule."""

    @property
    def name(self) -> str:
        """As requests name it."""
        ...

    @property
    def lossy(self) -> bool:
        """True when the committed tokens do not have the target's law."""
        ...

    @property
    def drafts(self) -> str:
        """The rule that drafters receive; it decides what they send.

        Under `coupled` trees whose guesses follow the session's noise, under `rejection` chains whose nodes carry
        the distribution that they were sampled from.
        """
        ...

    def judge(self, root: Node, verified: Sequence[Node], rows: TargetRows) -> Verdict:
        """Decides one round.

        Args:
            root: Stands for the last committed token.
            verified: Nodes below it whose rows this step computed, parents before children.
            rows: The target's.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupled:
    """The target's own choices, followed down the tree (section 3 of docs/speculation.md)."""

    name: str = COUPLED
    lossy: bool = False
    drafts: str = COUPLED

    def judge(self, root: Node, verified: Sequence[Node], rows: TargetRows) -> Verdict:
        """Follows the target's choices down the verified nodes."""
        return Verdict(token_ids=walk(root, verified, rows.choose))


Walk = Callable[[Sequence[FloatArray], Sequence[FloatArray], Sequence[int], Sequence[float]], VerifyOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Draft tokens weighed by the distributions they were sampled from.

    Args:
        name: As requests name it.
        walk: `reject_walk` or `block_walk`.
    """

    name: str
    walk: Walk
    lossy: bool = False

    @property
    def drafts(self) -> str:
        """Its own name: drafters send chains."""
        return self.name

    def judge(self, root: Node, verified: Sequence[Node], rows: TargetRows) -> Verdict:
        """Walks down the verified nodes, which are a chain, each with its distribution."""
        laws = [rows.law(node) for node in (root, *verified)]
        token_ids = [node.token_id for node in verified]
        outcome = self.walk(
            laws, [_drawn_from(node, laws[0]) for node in verified], token_ids, rows.uniforms(len(verified) + 1)
        )
        path = (root, *verified[: outcome.num_accepted])
        # An overlap is what the share of accepted tokens would be in the mean, and it is known whether or not the next
        # guess was verified.
        chances = [
            overlap(law, _drawn_from(child, law))
            for node, law in zip(path, laws, strict=False)
            for child in node.children.values()
        ]
        return Verdict(
            token_ids=(*token_ids[: outcome.num_accepted], outcome.next_token_id),
            chances=tuple(chances),
        )


def _drawn_from(node: Node, law: FloatArray) -> FloatArray:
    assert node.draft is not None, "a session takes no guess without a distribution under such a rule"
    return node.draft.probs(len(law))


LAWFUL: tuple[Rule, ...] = (
    Coupled(),
    Chain(name=REJECTION, walk=reject_walk),
    Chain(name=BLOCK, walk=block_walk),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules that a verifier serves: those that come with Paceline, and those that its settings name besides.

    Args:
        default: Name of the rule of requests that name none.
        more: Rules of other packages.
    """

    default: str = COUPLED
    more: tuple[Rule, ...] = ()

    def names(self, methods: Sequence[str]) -> tuple[str, ...]:
        """Names of the rules that can be asked for, the default first, where a verifier drafts by these methods."""
        chains = bool(set(methods) & set(TIER_METHODS))
        served = (rule.name for rule in (*LAWFUL, *self.more) if chains or rule.drafts not in CHAIN_RULES)
        return (self.default, *(name for name in served if name != self.default))

    def of(self, speculation: SpeculationParams) -> Rule:
        """Returns the rule of a session; `coupled` without speculation, where there is nothing to accept.

        Raises:
            InvalidRequestError: It is not served.
        """
        name = COUPLED if speculation.cap == 0 else speculation.acceptance or self.default
        rules = {rule.name: rule for rule in (*LAWFUL, *self.more)}
        if name not in rules:
            raise InvalidRequestError("speculation.acceptance", f"{name} is not served here, only {', '.join(rules)}")
        return rules[name]

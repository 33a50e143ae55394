"""Draft trees of plain objects, slow and simple: what the forest must agree with, on both tiers.

`SlowTree` is a verifier's tree of one session, `SlowGrowth` a drafter's. Tests compare both with `paceline.forest`
over random streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LEAST_CONFIDENCE = 1 / 512
AHEAD, MOST_HELD, MAX_ROOM = 0.1, 3, 256
RECENT = 128


@dataclass(eq=False)
class SlowNode:
    """One guessed token; the root stands for the last committed one."""

    node_id: int
    parent: SlowNode | None
    token: int
    position: int
    guesses: dict[int, float] = field(default_factory=dict)
    log_weight: float = 0.0
    children: dict[int, SlowNode] = field(default_factory=dict)
    kv: int | None = None
    alive: bool = True

    def path(self) -> tuple[int, ...]:
        """Tokens from below the root down to it."""
        return () if self.parent is None else (*self.parent.path(), self.token)

    def below(self) -> list[SlowNode]:
        """All nodes below it, by their depth."""
        nodes = list(self.children.values())
        for node in nodes:
            nodes += node.children.values()
        return nodes


@dataclass
class SlowOffset:
    """How much better than usual a source does on one session."""

    value: float = 0.0
    variance: float = 0.3


@dataclass
class SlowCalibration:
    """One source's map from confidence to probability: logistic regression, one Newton step an observation."""

    slope: float = 1.0
    intercept: float = 0.0
    var_slope: float = 0.25
    var_intercept: float = 0.5
    covariance: float = 0.0

    def probability(self, confidence: float, offset: SlowOffset) -> float:
        """Probability that a guess matches."""
        return 1.0 / (1.0 + math.exp(-self.slope * log_odds(confidence) - self.intercept - offset.value))

    def observe(self, confidence: float, offset: SlowOffset, matched: float) -> None:
        """Learns from one guess."""
        x, chance = log_odds(confidence), self.probability(confidence, offset)
        curvature = chance * (1.0 - chance)
        toward_slope = self.var_slope * x + self.covariance
        toward_intercept = self.covariance * x + self.var_intercept
        scale = 1.0 / (1.0 + curvature * (x * toward_slope + toward_intercept + offset.variance))
        error = (matched - chance) * scale
        self.slope = max(0.1, self.slope + toward_slope * error)
        self.intercept += toward_intercept * error
        offset.value += offset.variance * error
        self.var_slope += 2e-5 - curvature * scale * toward_slope**2
        self.covariance -= curvature * scale * toward_slope * toward_intercept
        self.var_intercept += 2e-5 - curvature * scale * toward_intercept**2
        offset.variance = min(0.3, offset.variance + 2e-3 - curvature * scale * offset.variance**2)


def log_odds(confidence: float) -> float:
    """Bounded log odds."""
    if confidence in (0.0, 1.0):
        return 6.0 if confidence else -6.0
    return max(-6.0, min(6.0, math.log(confidence / (1.0 - confidence))))


class SlowTree:
    """A tree of one session.

    Args:
        tokens: Committed ones.
        probability: From a source and its confidence to the probability that a guess matches.
        observe: Learns how a guess of a source and confidence turned out.
        chain: A node has one child.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        probability: Callable[[int, float], float] = lambda _, confidence: confidence,
        observe: Callable[[int, float, float], None] = lambda *_: None,
        *,
        chain: bool = False,
    ) -> None:
        self.tokens = list(tokens)
        self.chain = chain
        self.root = SlowNode(0, None, -1, len(tokens) - 1)
        self.index: dict[int, SlowNode] = {}
        self._probability, self._observe = probability, observe

    def nodes(self) -> list[SlowNode]:
        """All of it, by depth."""
        return self.root.below()

    def survival(self, node: SlowNode) -> float:
        """Probability that all tokens down to a node match."""
        return math.exp(node.log_weight - self.root.log_weight)

    def add(self, parent: SlowNode, token: int, confidence: float, source: int = 0) -> SlowNode:
        """Adds a guess, or raises the one that is there."""
        log_weight = parent.log_weight + math.log(max(self._probability(source, confidence), LEAST_CONFIDENCE))
        node = parent.children.get(token)
        if node is None:
            node = SlowNode(0, parent, token, parent.position + 1, {source: confidence}, log_weight)
            parent.children[token] = node
            return node
        node.guesses[source] = confidence
        rise = log_weight - node.log_weight
        if rise > 0.0:
            for each in (node, *node.below()):
                each.log_weight += rise
        return node

    def merge(self, base_len: int, guesses: Sequence[tuple[int, int, int, float]]) -> tuple[int, int, int]:
        """Adds `(id, parent's id, token, confidence)`; returns how many were added, late and stale."""
        added = late = stale = 0
        for node_id, parent_id, token, confidence in guesses:
            parent = self.index.get(parent_id) if parent_id else None
            if node_id in self.index:
                continue
            if parent_id and parent is None:
                stale += 1
                continue
            position = base_len if parent is None else parent.position + 1
            if parent is None or not parent.alive:
                if position != len(self.tokens):
                    late += not self._remembers(node_id, token, position)
                    continue
                parent = self.root
            if self.chain and parent.children and token not in parent.children:
                stale += 1
                continue
            added += token not in parent.children
            node = self.add(parent, token, confidence)
            # The newest id of a node counts.
            self.index = {each: other for each, other in self.index.items() if other is not node} | {node_id: node}
            node.node_id = node_id
        return added, late, stale

    def _remembers(self, node_id: int, token: int, position: int) -> bool:
        if position < len(self.tokens) - RECENT or self.tokens[position] != token:
            return False
        self.index[node_id] = SlowNode(node_id, None, token, position, alive=False)
        return True

    def best(self, limit: int) -> list[SlowNode]:
        """The nodes of highest survival, parents before children."""
        return sorted(self.nodes(), key=lambda node: -node.log_weight)[:limit]

    def best_chain(self, limit: int) -> list[SlowNode]:
        """The chain of best children."""
        chain: list[SlowNode] = []
        node = self.root
        while node.children and len(chain) < limit:
            node = max(node.children.values(), key=lambda each: each.log_weight)
            chain.append(node)
        return chain

    def commit(self, tokens: Sequence[int]) -> tuple[list[SlowNode], list[SlowNode], bool]:
        """Follows committed tokens; returns the nodes met, those that fell off, and whether all tokens were there."""
        self._score(tokens)
        before, matched = [self.root, *self.nodes()], []
        node = self.root
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                break
            matched.append(child)
            node = child
        self.tokens += tokens
        hit = len(matched) == len(tokens)
        lives = node.below() if hit else []
        self.root = node if hit else SlowNode(0, None, -1, len(self.tokens) - 1)
        self.root.parent = None
        for each in before:
            each.alive = each in lives
        dead = [each for each in before[1:] if not each.alive and each not in matched]
        self.index = {key: each for key, each in self.index.items() if each not in dead}
        return matched, dead, hit

    def _score(self, tokens: Sequence[int]) -> None:
        node: SlowNode | None = self.root
        for token in tokens:
            if node is None:
                return
            for child in node.children.values():
                for source, confidence in sorted(child.guesses.items()):
                    self._observe(source, confidence, float(child.token == token))
            node = node.children.get(token)


class SlowGrowth:
    """A drafter's tree of one session, and the guesses that are kept back."""

    def __init__(self, tokens: Sequence[int], price: float, room: int) -> None:
        self.tree = SlowTree(tokens)
        self.price, self.room = price, room
        self.kept: dict[SlowNode, list[tuple[int, float]]] = {}
        self.unsent: list[SlowNode] = []
        self._held, self._push_at, self._next_id = 0, 1, 1

    def wants_nodes(self) -> bool:
        """Whether the verifier would take more."""
        return self.price < 1.0 and self._room > 0

    @property
    def _room(self) -> int:
        return max(0, min(self.room, MAX_ROOM) - len(self.tree.nodes()))

    def frontier(self, limit: int, context_len: int) -> list[SlowNode]:
        """Nodes worth computing, best first."""
        if not self.wants_nodes():
            return []
        worth = [
            node
            for node in self.tree.nodes()
            if self.tree.survival(node) >= AHEAD * self.price
            and node.kv is None
            and (node.parent is self.tree.root or (node.parent is not None and node.parent.kv is not None))
            and node.position + 1 < context_len
        ]
        return sorted(worth, key=lambda node: -node.log_weight)[:limit]

    def offer(self, node: SlowNode, ranked: Sequence[tuple[int, float]]) -> None:
        """Hangs what is worth it below a node, and keeps the others back."""
        self.kept[node] = list(ranked)
        self._grow(node)

    def _grow(self, node: SlowNode) -> None:
        survival = self.tree.survival(node)
        worth = [guess for guess in self.kept[node] if survival * guess[1] >= AHEAD * self.price][: self._room]
        self.kept[node] = self.kept[node][len(worth) :]
        for token, confidence in worth:
            if token not in node.children:
                child = self.tree.add(node, token, confidence)
                child.node_id, self._next_id = self._next_id, self._next_id + 1
                self.unsent.append(child)

    def commit(self, tokens: Sequence[int], price: float, room: int) -> tuple[list[SlowNode], list[SlowNode], bool]:
        """Follows committed tokens."""
        self.price, self.room = price, room
        self._held, self._push_at = 0, 1
        matched, dead, hit = self.tree.commit(tokens)
        self.unsent = [node for node in self.unsent if node.alive]
        self.kept = {node: ranked for node, ranked in self.kept.items() if node is self.tree.root or node.alive}
        for node in self.kept if price < 1.0 else ():
            self._grow(node)
        return matched, dead, hit

    def push(self, *, goes_on: bool) -> list[SlowNode]:
        """Nodes that are due after a draft step."""
        if not self.unsent:
            return []
        self._held += 1
        if self._held < self._push_at and goes_on:
            return []
        self._push_at = self._held + min(self._held, MOST_HELD)
        return self.drain()

    def drain(self) -> list[SlowNode]:
        """All that the verifier does not know."""
        unsent, self.unsent = self.unsent, []
        return unsent

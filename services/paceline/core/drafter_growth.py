"""Where a drafter grows a session's tree next, what it keeps back, and when it sends nodes.

Pure rules over the drafter's end of a session; they know nothing of models, KV or time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass
from operator import attrgetter

from paceline.core.messages import DraftNodes
from paceline.core.rejection_sampling import SparseDraft
from paceline.core.session import DrafterSession
from paceline.core.tree import Node, NodeState

# The price is for verifying a node now. Growing below it still pays while the drafter has time: what is not worth
# verifying in this round is at hand in the next one, if the commit leads there.
AHEAD = 0.1
# Every message costs the verifier time in the middle of a step, so nodes are held back for this number of draft
# steps; not those of the first two after a commit, which a verifier may be waiting for.
MOST_HELD = 3
# More nodes ahead than any verifier uses; a peer that asks for more does not get it.
MAX_ROOM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """What may follow a node, `(token_id, confidence)` best first, and the distribution it was sampled from."""

    ranked: list[tuple[int, float]]
    draft: SparseDraft | None = None


class DrafterGrowth:
    """The growth of one session's tree.

    Args:
        mirror: The drafter's end of the session.
        expanded: Ids of the nodes whose children have been computed; the caller keeps it up to date.
    """

    def __init__(self, mirror: DrafterSession, expanded: Container[int]) -> None:
        self._mirror = mirror
        self._expanded = expanded
        # Guesses below computed nodes that are not worth a place in the tree until a commit comes closer to them.
        self._withheld: dict[Node, Guesses] = {}
        self._steps_since_commit = 0
        self._push_at = 1

    @property
    def wants_nodes(self) -> bool:
        """True when the verifier would take more nodes."""
        mirror = self._mirror
        return mirror.price < 1.0 and mirror.tree.num_nodes < min(mirror.room, MAX_ROOM)

    @property
    def _least_survival(self) -> float:
        return AHEAD * self._mirror.price

    def knows(self, node: Node) -> bool:
        """Whether guesses below the node are at hand."""
        return node in self._withheld

    def frontier(self, limit: int, context_len: int) -> list[Node]:
        """Unexpanded nodes worth growing at this price, best first; their children must lie within the context."""
        if not self.wants_nodes:
            return []
        tree, expanded = self._mirror.tree, self._expanded
        least = self._least_survival
        least_log_weight = tree.root.log_weight + math.log(least) if least > 0.0 else -math.inf
        worth = [
            node
            for node in tree.nodes()
            if node.log_weight >= least_log_weight
            and node.node_id not in expanded
            and (node.parent is tree.root or (node.parent is not None and node.parent.node_id in expanded))
            and node.position + 1 < context_len
        ]
        worth.sort(key=attrgetter("log_weight"), reverse=True)
        return worth[:limit]

    def offer(self, node: Node, guesses: Guesses) -> None:
        """Hangs the guesses that are worth it below a node, and keeps the others back."""
        self._withheld[node] = guesses
        self._grow(node)

    def grow(self, node: Node) -> None:
        """Hangs what is at hand and worth it below a node."""
        if node in self._withheld:
            self._grow(node)

    def _grow(self, node: Node) -> None:
        guesses = self._withheld[node]
        survival = self._mirror.tree.survival(node)
        least = self._least_survival
        worth = [guess for guess in guesses.ranked if survival * guess[1] >= least]
        if worth:
            self._mirror.grow(node, worth, guesses.draft)
            self._withheld[node] = Guesses(ranked=guesses.ranked[len(worth) :], draft=guesses.draft)

    def committed(self) -> None:
        """A commit was applied: messages go out soon again."""
        self._steps_since_commit, self._push_at = 0, 1

    def release(self) -> None:
        """Survivals rose with the commit: grows what has become worth it, without computing anything anew."""
        root = self._mirror.tree.root
        self._withheld = {
            node: guesses for node, guesses in self._withheld.items() if node is root or node.state is NodeState.LIVE
        }
        for node in self._withheld if self._mirror.price < 1.0 else ():
            self._grow(node)

    def push(self, goes_on: Callable[[], bool]) -> DraftNodes | None:
        """Nodes that are due after a draft step: held long enough, or the last for now.

        Args:
            goes_on: Returns whether the next step would grow more of this tree; called only where it matters.
        """
        if not self._mirror.has_unsent:
            return None
        self._steps_since_commit += 1
        if self._steps_since_commit < self._push_at and goes_on():
            return None
        self._push_at = self._steps_since_commit + min(self._steps_since_commit, MOST_HELD)
        return self._mirror.drain()

    def forget(self) -> None:
        """Drops the tree until the next commit; committed tokens stay."""
        self._withheld.clear()
        self._mirror.forget()

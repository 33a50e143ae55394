"""The draft tree: one side grows it, a commit prunes it, and both hold the same one.

The tree knows tokens, positions and confidences. It knows nothing of models, networks or time.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from paceline.core.errors import RemoteProtocolError
from paceline.core.messages import NodeGuess
from paceline.core.params import DRAFT_MODEL
from paceline.core.rejection_sampling import SparseDraft

# The least likely guess still has a survival above 0, so that logarithms stay finite.
LEAST_CONFIDENCE = 1 / 512
# Committed nodes keep their ids for this number of positions, for messages that are still under way.
REMEMBERED_POSITIONS = 128
# Far more than a session can use; what a peer sends beyond that is not taken in.
MAX_NODES = 1024

_log_weight = attrgetter("log_weight")


class NodeState(enum.Enum):
    """Where a node stands with respect to the committed tokens."""

    LIVE = "live"
    COMMITTED = "committed"
    DEAD = "dead"


class Node:
    """One guessed token.

    Args:
        node_id: Its name on the wire.
        parent: The node it hangs below.
        token_id: The guess.
        position: The absolute index that the token would take.
        guesses: The confidence of each source that guessed it.
        log_weight: What that is worth: the parent's, and the logarithm of the probability that it matches if the parent
            does.

    Attributes:
        draft: The distribution that the guess was sampled from, where the acceptance rule asks for it.
    """

    __slots__ = ("children", "draft", "guesses", "log_weight", "node_id", "parent", "position", "state", "token_id")

    def __init__(
        self,
        node_id: int,
        parent: Node | None,
        token_id: int,
        position: int,
        guesses: dict[str, float] | None = None,
        log_weight: float = 0.0,
    ) -> None:
        self.node_id = node_id
        self.parent = parent
        self.token_id = token_id
        self.position = position
        self.guesses: dict[str, float] = {} if guesses is None else guesses
        self.log_weight = log_weight
        self.draft: SparseDraft | None = None
        self.children: dict[int, Node] = {}
        self.state = NodeState.LIVE

    @property
    def first_source(self) -> str:
        """The source that guessed it first."""
        return next(iter(self.guesses))

    def __repr__(self) -> str:
        """Short form for failing tests."""
        return f"Node({self.node_id}, token={self.token_id}, position={self.position}, {self.state.value})"


def path_to(node: Node) -> list[Node]:
    """The live nodes from below the root down to a node; none for the root itself."""
    path: list[Node] = []
    step: Node | None = node
    while step is not None and step.state is NodeState.LIVE:
        path.append(step)
        step = step.parent
    return path[::-1]


def path_tokens(node: Node) -> list[int]:
    """Tokens from below the root down to a node."""
    return [step.token_id for step in path_to(node)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraftOutcome:
    """What became of the guesses of one message: `late` ones fell off, `stale` ones have no parent to hang below."""

    num_added: int
    num_late: int
    num_stale: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What a commit did: the nodes it met, oldest first, those that fell off, and whether all its tokens were there."""

    matched: tuple[Node, ...]
    dead: tuple[Node, ...]
    hit: bool


class DraftTree:
    """Guesses beyond the committed tokens; the root stands for the last committed token.

    Args:
        committed_len: Number of committed tokens, at least 1.
        probability: From a source and its confidence in a guess to the probability that the guess matches; None
            takes confidences as they are.
        chain: A node has one child: what is guessed beside the first is dropped, whatever it is.
        can_follow: Whether tokens may follow those committed at all; None: any may. Guesses that may not are dropped.
    """

    def __init__(
        self,
        committed_len: int,
        probability: Callable[[str, float], float] | None = None,
        *,
        chain: bool = False,
        can_follow: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self._probability = probability
        self._chain = chain
        self._can_follow = can_follow
        self._index: dict[int, Node] = {}
        self.root = self._bare_root(committed_len)
        self.num_nodes = 0

    @staticmethod
    def _bare_root(committed_len: int) -> Node:
        root = Node(0, None, -1, committed_len - 1)
        root.state = NodeState.COMMITTED
        return root

    @property
    def committed_len(self) -> int:
        """Committed tokens up to and including the root."""
        return self.root.position + 1

    def survival(self, node: Node) -> float:
        """Probability that the whole path from the root to the node matches."""
        return math.exp(node.log_weight - self.root.log_weight)

    def depth(self, node: Node) -> int:
        """Steps from the root."""
        return node.position - self.root.position

    def nodes(self) -> list[Node]:
        """All live nodes, by their depth."""
        nodes = list(self.root.children.values())
        for node in nodes:
            # The list grows while it is walked.
            nodes.extend(node.children.values())
        return nodes

    def survivals(self, limit: int) -> list[float]:
        """Survivals of the best `limit` nodes, best first."""
        log_weights = sorted(map(_log_weight, self.nodes()), reverse=True)
        return [math.exp(log_weight - self.root.log_weight) for log_weight in log_weights[:limit]]

    def permits(self, parent: Node, token_id: int) -> bool:
        """Whether a guess may be right at all."""
        return self._can_follow is None or self._can_follow([*path_tokens(parent), token_id])

    def probability(self, source: str, confidence: float) -> float:
        """Probability that a source's guess matches if its parent does."""
        return confidence if self._probability is None else self._probability(source, confidence)

    def add(self, parent: Node, guess: NodeGuess, source: str = DRAFT_MODEL) -> Node | None:
        """Hangs a guess below a node; None when the parent already has that token (the id then names that node)."""
        is_new = guess.token_id not in parent.children
        node = self.suggest(parent, guess.token_id, guess.confidence, source)
        self._index[guess.node_id] = node
        if not is_new:
            return None
        node.node_id, node.draft = guess.node_id, guess.draft
        return node

    def suggest(self, parent: Node, token_id: int, confidence: float, source: str) -> Node:
        """Hangs a guess that no message names by an id; where another source guessed the same, the surer one counts."""
        probability = self.probability(source, confidence)
        log_weight = parent.log_weight + math.log(probability if probability > LEAST_CONFIDENCE else LEAST_CONFIDENCE)
        node = parent.children.get(token_id)
        if node is not None:
            node.guesses[source] = confidence
            self._raise(node, log_weight)
            return node
        node = Node(0, parent, token_id, parent.position + 1, {source: confidence}, log_weight)
        parent.children[token_id] = node
        self.num_nodes += 1
        return node

    @staticmethod
    def _raise(node: Node, log_weight: float) -> None:
        """Gives a node a higher weight, and all below it with it."""
        rise = log_weight - node.log_weight
        stack = [node] if rise > 0.0 else []
        while stack:
            above = stack.pop()
            above.log_weight += rise
            stack.extend(above.children.values())

    def graft(
        self, guesses: Sequence[NodeGuess], base_len: int, committed: Sequence[int], source: str = DRAFT_MODEL
    ) -> GraftOutcome:
        """Takes in guesses that were made when `base_len` tokens were committed.

        A late message is no error: its nodes are walked down what has been committed since, and what falls off is
        dropped and counted.

        Args:
            guesses: Parents before children.
            base_len: Committed length the sender knew.
            committed: All committed tokens.
            source: Who made them.

        Raises:
            RemoteProtocolError: `base_len` is 0 or beyond what was ever committed.
        """
        if not 1 <= base_len <= len(committed):
            raise RemoteProtocolError(f"base_len {base_len} is not within the {len(committed)} committed tokens")
        num_added = num_late = num_stale = 0
        for guess in guesses:
            if guess.node_id in self._index:
                continue
            parent = self._index.get(guess.parent_id) if guess.parent_id else None
            if (guess.parent_id and parent is None) or len(self._index) >= MAX_NODES:
                num_stale += 1
                continue
            position = base_len if parent is None else parent.position + 1
            below = parent if parent is not None and parent.state is NodeState.LIVE else None
            if below is None and position == self.committed_len:
                below = self.root
            if below is not None and self._takes(below, guess):
                num_added += self.add(below, guess, source) is not None
            elif below is not None:
                num_stale += 1
            elif committed[position] == guess.token_id:
                self._remember(guess, position)
            else:
                num_late += 1
        return GraftOutcome(num_added=num_added, num_late=num_late, num_stale=num_stale)

    def _takes(self, parent: Node, guess: NodeGuess) -> bool:
        if guess.token_id in parent.children:
            return True
        return not (self._chain and parent.children) and self.permits(parent, guess.token_id)

    def _remember(self, guess: NodeGuess, position: int) -> None:
        """The guess came late but was right: its children may still be of use."""
        node = Node(guess.node_id, None, guess.token_id, position)
        node.state = NodeState.COMMITTED
        self._index[guess.node_id] = node

    def outcomes(
        self, token_ids: Sequence[int], chances: Sequence[float] | None = None
    ) -> Iterator[tuple[str, float, float]]:
        """How a commit scores guesses: `(source, confidence, matched)` for every child of a node on its path.

        Args:
            token_ids: Newly committed tokens.
            chances: For each, the probability that the guess in its place was accepted, where the acceptance rule knows
                it; None: a guess matched, 1, or did not, 0.
        """
        node: Node | None = self.root
        for depth, token_id in enumerate(token_ids):
            if node is None:
                return
            for child in node.children.values():
                matched = float(child.token_id == token_id) if chances is None else chances[depth]
                for source, confidence in child.guesses.items():
                    yield source, confidence, matched
            node = node.children.get(token_id)

    def advance(self, token_ids: Sequence[int]) -> Pruning:
        """Walks newly committed tokens down from the root; the subtree reached is the new tree, or an empty one."""
        matched: list[Node] = []
        dead: list[Node] = []
        node = self.root
        for token_id in token_ids:
            child = node.children.get(token_id)
            if child is None:
                break
            dead += _bury(each for each in node.children.values() if each is not child)
            child.state = NodeState.COMMITTED
            matched.append(child)
            node = child
        hit = len(matched) == len(token_ids)
        if hit:
            self.root = node
            node.parent = None
        else:
            dead += _bury(node.children.values())
            self.root = self._bare_root(self.committed_len + len(token_ids))
        self._forget()
        return Pruning(matched=tuple(matched), dead=tuple(dead), hit=hit)

    def _forget(self) -> None:
        oldest = self.root.position - REMEMBERED_POSITIONS
        self._index = {
            node_id: node
            for node_id, node in self._index.items()
            if node.state is NodeState.LIVE or (node.state is NodeState.COMMITTED and node.position >= oldest)
        }
        self.num_nodes = len(self.nodes())


def _bury(nodes: Iterable[Node]) -> list[Node]:
    """Marks nodes and all that hangs below them as dead; returns them all."""
    buried = list(nodes)
    for node in buried:
        node.state = NodeState.DEAD
        # The list grows while it is walked.
        buried.extend(node.children.values())
    return buried


def best_first(tree: DraftTree, limit: int) -> list[Node]:
    """The `limit` live nodes of highest survival, parents before children (ties: shallow first, then as they came)."""
    return sorted(tree.nodes(), key=_log_weight, reverse=True)[:limit]


def best_chain(tree: DraftTree, limit: int) -> list[Node]:
    """The first `limit` nodes of the chain that follows the child of highest survival from the root on."""
    chain: list[Node] = []
    node = tree.root
    while node.children and len(chain) < limit:
        node = max(node.children.values(), key=_log_weight)
        chain.append(node)
    return chain


def best_nodes(tree: DraftTree, limit: int, *, chain: bool) -> list[Node]:
    """What is worth verifying most: see `best_chain` and `best_first`."""
    return best_chain(tree, limit) if chain else best_first(tree, limit)


def walk(root: Node, verified: Sequence[Node], choose: Callable[[Node], int]) -> tuple[int, ...]:
    """Coupled verification: follows the target's own tokens down the verified nodes.

    Starts at the root; every token that the target chooses is committed; while it is among the verified children of
    the node it was chosen at, the walk goes on from there.

    Args:
        root: Stands for the last committed token.
        verified: Nodes whose logits this step computed.
        choose: The target's token after a node; called once per committed token, in order.

    Returns:
        Accepted draft tokens, then one recovered or bonus token.
    """
    members = set(map(id, verified))
    tokens: list[int] = []
    node = root
    while True:
        token_id = choose(node)
        tokens.append(token_id)
        child = node.children.get(token_id)
        if child is None or id(child) not in members:
            return tuple(tokens)
        node = child

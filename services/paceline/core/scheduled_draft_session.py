"""One session as a drafter's scheduler sees it: its end of the protocol, its pages, and the slots of its tree."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.drafter_growth import DrafterGrowth, Guesses
from paceline.core.features import FeatureBuffer, Features, TokensAfterFirst
from paceline.core.messages import Commit, CommittedStates, DraftNodes, LaggingSession, OpenSession
from paceline.core.pages import BLOCK_SIZE, BlockPool, SessionPages, SlotPool, block_hash, salted_root
from paceline.core.session import DrafterSession
from paceline.core.tree import Node, Pruning, path_to


class ScheduledDraftSession(DrafterSession):
    """A session from open to close.

    Args:
        opened: The message that opened it.
        pool: Pages for committed tokens.
        scratch: Slots for tree nodes.
        context_len: Most tokens that the draft model takes.
        feature_width: Of the features that the draft model takes; 0: it takes tokens alone.

    Attributes:
        slots: Of expanded nodes, by their ids.
        computed_to: Rows of its pages whose KV is there when the step under way ends.
        touched_s: When its verifier last sent something for it.
        parked: It found no place, and waits for its next commit or for another one's end.
        given_up: The draft model's logits were unusable: features are not requested again.
    """

    def __init__(
        self, opened: OpenSession, pool: BlockPool, scratch: SlotPool, *, context_len: int, feature_width: int = 0
    ) -> None:
        super().__init__(opened)
        self.features = FeatureBuffer(feature_width, context_len) if feature_width else None
        self.pages = self._make_pages(pool, salted_root(opened.cache_salt))
        self.slots: dict[int, int] = {}
        self.computed_to = 0
        self.touched_s = 0.0
        self.parked = False
        self.given_up = False
        self._growth = DrafterGrowth(self, self.slots)
        self._scratch = scratch
        self._context_len = context_len

    def _make_pages(self, pool: BlockPool, root: bytes | None) -> SessionPages:
        if self.features is None:
            return SessionPages(self.tokens, pool, before=root)
        return SessionPages(TokensAfterFirst(self.tokens), pool, before=block_hash(root, self.tokens[:1]))

    # Messages

    def apply(self, commit: Commit, moves: list[tuple[int, int]]) -> Pruning | LaggingSession | None:
        """Applies a commit; KV of the nodes on the committed path moves from scratch to the session's pages.

        Args:
            commit: The message.
            moves: Where to put what is to be moved, from slot to slot.

        Returns:
            See `DrafterSession.receive`.
        """
        base_len = len(self.tokens)
        outcome = self.receive(commit)
        if isinstance(outcome, Pruning):
            self._growth.committed()
            if self.features is None:
                self._keep(outcome, base_len, moves)
                self._free_dead_slots()
            else:
                # What was drafted from the head's own features is computed anew from the target's.
                self._free_slots()
            self._growth.release()
        return outcome

    def receive_states(self, message: CommittedStates) -> None:
        """Takes in features of committed positions; a draft model that takes tokens alone has no use for them."""
        if self.features is not None and message.epoch == self.epoch:
            self.features.add(message)

    def _keep(self, pruning: Pruning, base_len: int, moves: list[tuple[int, int]]) -> None:
        kept = [node for node in pruning.matched if node.node_id in self.slots]
        if not kept or self.pages.num_computed != base_len or not self.pages.reserve(base_len + len(kept)):
            return
        moves += [(self.slots[node.node_id], self.pages.slot(node.position)) for node in kept]
        self.pages.mark_computed(base_len + len(kept))

    def _free_dead_slots(self) -> None:
        live = {node.node_id for node in self.tree.nodes()}
        for node_id in [node_id for node_id in self.slots if node_id not in live]:
            self._scratch.give_back(self.slots.pop(node_id))

    # What there is to compute

    @property
    def first_position(self) -> int:
        """Position of the token in the first row of its pages."""
        return 0 if self.features is None else 1

    @property
    def computable_to(self) -> int:
        """Rows of its pages that can be computed with what is here."""
        most = len(self.pages.tokens)
        return most if self.features is None else min(most, self.features.stop)

    @property
    def lost_features(self) -> bool:
        """True when it gave up KV that cannot be computed anew, because the features are gone."""
        return self.features is not None and not self.pages.blocks and self.features.start > 0

    @property
    def wants_drafts(self) -> bool:
        """True when the verifier would take more nodes."""
        return self._growth.wants_nodes and len(self.tokens) < self._context_len

    @property
    def lags(self) -> bool:
        """True when tokens are to be computed, and can be."""
        missing = self.pages.num_missing > 0 and self.computable_to > self.pages.num_computed
        return not self.parked and missing and len(self.tokens) < self._context_len

    def wants_step(self, *, can_grow: bool) -> bool:
        """True when it lags, or has a node worth expanding and there is room for that."""
        return self.lags or (can_grow and bool(self.frontier(1)))

    def frontier(self, limit: int) -> list[Node]:
        """Unexpanded nodes worth growing at this price, best first; none while the session lags."""
        if self.pages.num_missing or not self.wants_drafts:
            return []
        return self._growth.frontier(limit, self._context_len)

    def prefix_features(self, start: int, stop: int) -> Features | None:
        """Features of the rows `start` to `stop` - 1 of its pages, if the draft model takes any."""
        return None if self.features is None else self.features.rows(start, stop)

    def parent_slot(self, node: Node) -> int:
        """Where states of the node's parent lie, which has been expanded."""
        assert node.parent is not None, "the root is no guess"
        if node.parent is self.tree.root:
            return self.pages.slot(len(self.pages.tokens) - 1)
        return self.slots[node.parent.node_id]

    def ancestor_slots(self, node: Node) -> list[int]:
        """Scratch slots of a node's ancestors below the root, oldest first."""
        return [self.slots[above.node_id] for above in path_to(node)[:-1]]

    # What was computed

    def offer(self, node: Node, guesses: Guesses) -> None:
        """Hangs the guesses that are worth it below a node, and keeps the others back."""
        self._growth.offer(node, guesses)

    def wants_guesses(self, node: Node) -> bool:
        """Whether guesses below a node are still to be drawn; below a node of a chain they are drawn only once."""
        return not self.chain or not (node.children or self._growth.knows(node))

    def grow_known(self, node: Node) -> None:
        """Hangs what is at hand and worth it below a node."""
        self._growth.grow(node)

    def push(self, *, can_grow: bool) -> DraftNodes | None:
        """Nodes that are due after a draft step: held long enough, or the last for now."""
        return self._growth.push(lambda: self.wants_step(can_grow=can_grow))

    def settle(self) -> None:
        """The step is over: what it computed counts."""
        if self.computed_to > self.pages.num_computed:
            self.pages.mark_computed(self.computed_to)
        if self.features is not None:
            self.features.drop_before(self.pages.num_computed)

    # Room

    def fits(self, num_blocks: int) -> bool:
        """True when `num_blocks` pages hold all its tokens."""
        return len(self.pages.tokens) <= num_blocks * BLOCK_SIZE

    def take_pages(self) -> bool:
        """Takes pages for all its tokens, cached ones first; False when there are too few."""
        if not self.pages.blocks:
            self.computed_to = self.pages.attach_cached_prefix()
        return self.pages.reserve(len(self.pages.tokens))

    def give_up_pages(self) -> None:
        """Gives up all KV, and with it the tree, until the next commit; committed tokens stay, features do not."""
        self.close()
        self.parked = True
        self.computed_to = 0
        self._growth.forget()

    def close(self) -> None:
        """Frees pages and slots."""
        self.pages.release()
        self._free_slots()

    def _free_slots(self) -> None:
        for slot in self.slots.values():
            self._scratch.give_back(slot)
        self.slots.clear()


def quietest(sessions: Sequence[ScheduledDraftSession]) -> ScheduledDraftSession:
    """The one that has gone longest without a message."""
    return min(sessions, key=lambda session: session.touched_s)

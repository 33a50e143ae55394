"""One session inside the drafter's engine: its mirror of the protocol, its pages, and the KV of its tree."""

from __future__ import annotations

import numpy as np

from paceline.core.acceptance import sparse_draft
from paceline.core.confidence import CHAIN_CONFIDENCE, NUM_RANKED, confidences
from paceline.core.messages import (
    Commit,
    CommittedStates,
    DraftNodes,
    LaggingSession,
    ModelIdentity,
    OpenSession,
)
from paceline.core.noise import DRAFT_STREAM, uniforms
from paceline.core.pages import BLOCK_SIZE, BlockPool, SessionPages, SlotPool, block_hash, salted_root
from paceline.core.session import DrafterSession
from paceline.core.tree import Node, NodeState, Pruning
from paceline.core.tree_growth import Guesses, TreeGrowth
from paceline.drafting.features import FeatureBuffer, Features, TokensAfterFirst
from paceline.engine.kv import KVCache
from paceline.engine.sampler import RowSampler


class DraftedSession:
    """A session from open to close.

    Args:
        opened: What the verifier told of it.
        identity: The draft model.
        pool: Pages for committed tokens.
        scratch: Slots for tree nodes.
        feature_width: Of the features that the draft model takes; 0: it takes tokens alone.
    """

    def __init__(
        self,
        opened: OpenSession,
        identity: ModelIdentity,
        pool: BlockPool,
        scratch: SlotPool,
        feature_width: int = 0,
    ) -> None:
        self.mirror = DrafterSession(opened)
        self.features = FeatureBuffer(feature_width, identity.context_len) if feature_width else None
        self.pages = self._make_pages(pool, salted_root(opened.cache_salt))
        self.slots: dict[int, int] = {}
        self._growth = TreeGrowth(self.mirror, self.slots)
        self.computed_to = 0
        self.touched_s = 0.0
        self.parked = False
        # The draft model gave nothing to choose from: features are not asked for again.
        self.given_up = False
        self._scratch = scratch
        tokens, prompt_len = opened.token_ids, opened.prompt_len
        self._sampler = RowSampler(
            opened.sampling,
            identity.vocab_size,
            identity.eos_token_ids,
            tokens[:prompt_len],
            tokens[prompt_len:],
        )

    def receive(self, commit: Commit, cache: KVCache) -> Pruning | LaggingSession | None:
        """Applies a commit; KV of the nodes on the committed path moves from scratch to the session's pages."""
        base_len = len(self.mirror.tokens)
        outcome = self.mirror.receive(commit)
        if isinstance(outcome, Pruning):
            self._growth.committed()
            for token_id in self.mirror.tokens[base_len:]:
                self._sampler.push(token_id)
            if self.features is None:
                self._keep(outcome, base_len, cache)
                self._free_dead_slots()
            else:
                # What was drafted from the head's own features is computed anew from the target's.
                self._free_slots()
            self._growth.release()
        return outcome

    def receive_states(self, message: CommittedStates) -> None:
        """Takes in features of committed positions; a draft model that takes tokens alone has no use for them."""
        if self.features is not None and message.epoch == self.mirror.epoch:
            self.features.add(message)

    def _make_pages(self, pool: BlockPool, root: bytes | None) -> SessionPages:
        tokens = self.mirror.tokens
        if self.features is None:
            return SessionPages(tokens, pool, before=root)
        return SessionPages(TokensAfterFirst(tokens), pool, before=block_hash(root, tokens[:1]))

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

    def prefix_features(self, start: int, stop: int) -> Features | None:
        """Features of so many rows of its pages, if the draft model takes any."""
        return None if self.features is None else self.features.rows(start, stop)

    def parent_slot(self, node: Node) -> int:
        """Where states of the node's parent lie, which has been expanded."""
        assert node.parent is not None, "the root is no guess"
        if node.parent is self.mirror.tree.root:
            return self.pages.slot(len(self.pages.tokens) - 1)
        return self.slots[node.parent.node_id]

    def _keep(self, pruning: Pruning, base_len: int, cache: KVCache) -> None:
        kept = [node for node in pruning.matched if node.node_id in self.slots]
        if not kept or self.pages.num_computed != base_len or not self.pages.reserve(base_len + len(kept)):
            return
        sources = [self.slots[node.node_id] for node in kept]
        targets = [self.pages.slot(node.position) for node in kept]
        cache.copy_slots(np.array(sources, np.int64), np.array(targets, np.int64))
        self.pages.mark_computed(base_len + len(kept))

    def _free_dead_slots(self) -> None:
        live = {node.node_id for node in self.mirror.tree.nodes()}
        for node_id in [node_id for node_id in self.slots if node_id not in live]:
            self._scratch.give_back(self.slots.pop(node_id))

    def wants_drafts(self, context_len: int) -> bool:
        """True when the verifier would take more nodes."""
        return self._growth.wants_nodes and len(self.mirror.tokens) < context_len

    def lags(self, context_len: int) -> bool:
        """True when tokens are to be computed, and that has a chance."""
        missing = self.pages.num_missing > 0 and self.computable_to > self.pages.num_computed
        return not self.parked and missing and len(self.mirror.tokens) < context_len

    def wants_step(self, context_len: int, can_grow: bool) -> bool:
        """True when it lags, or has a node worth expanding and there is room for that."""
        return self.lags(context_len) or (can_grow and bool(self.frontier(context_len, 1)))

    def frontier(self, context_len: int, limit: int) -> list[Node]:
        """Unexpanded nodes worth growing at this price, best first; none while the session lags."""
        if self.pages.num_missing or not self.wants_drafts(context_len):
            return []
        return self._growth.frontier(limit, context_len)

    def ancestor_slots(self, node: Node) -> list[int]:
        """Scratch slots of a node's ancestors below the root, oldest first."""
        path: list[int] = []
        above = node.parent
        while above is not None and above.state is NodeState.LIVE:
            path.append(self.slots[above.node_id])
            above = above.parent
        return path[::-1]

    def expand(self, node: Node, row: np.ndarray, width: int) -> None:
        """Hangs the best `width` guesses below a node, from the draft model's logits `[vocab]` after it.

        Under a rule that judges chains it is one, drawn once for all: another try would be another chance.
        """
        path = [step.token_id for step in _path(node)]
        if not self.mirror.chain:
            self._growth.offer(node, self._rank(node, row, path, width))
        elif not node.children and not self._growth.knows(node):
            self._growth.offer(node, self._draw(node, row, path))
        else:
            self._growth.grow(node)

    def _rank(self, node: Node, row: np.ndarray, path: list[int], width: int) -> Guesses:
        token_ids, shares = self._sampler.rank(row, node.position + 1, NUM_RANKED, path)
        sure = confidences(shares, greedy=self.mirror.sampling.temperature == 0.0)
        return Guesses(ranked=list(zip(token_ids, sure, strict=True))[:width])

    def _draw(self, node: Node, row: np.ndarray, path: list[int]) -> Guesses:
        """Samples one token from the very distribution that goes out with it."""
        draft = sparse_draft(self._sampler.law(row, path))
        seed, base_len = self.mirror.sampling.seed, len(self.mirror.tokens)
        uniform, _ = uniforms(seed, DRAFT_STREAM, node.position + 1, base_len, node.node_id)
        return Guesses(ranked=[(draft.sample(uniform), CHAIN_CONFIDENCE)], draft=draft)

    def push(self, context_len: int, can_grow: bool) -> DraftNodes | None:
        """Nodes that are due after a draft step: held long enough, or the last for now."""
        return self._growth.push(lambda: self.wants_step(context_len, can_grow))

    def fits(self, num_blocks: int) -> bool:
        """True when so many pages hold all its tokens."""
        return len(self.pages.tokens) <= num_blocks * BLOCK_SIZE

    def take_pages(self) -> bool:
        """Takes pages for all its tokens, cached ones first; False when there are too few."""
        if not self.pages.blocks:
            self.computed_to = self.pages.attach_cached_prefix()
        return self.pages.reserve(len(self.pages.tokens))

    def settle(self) -> None:
        """The step is over: what it computed counts."""
        if self.computed_to > self.pages.num_computed:
            self.pages.mark_computed(self.computed_to)
        if self.features is not None:
            self.features.drop_before(self.pages.num_computed)

    def forget(self) -> None:
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


def _path(node: Node) -> list[Node]:
    """Live nodes from below the root down to the node."""
    path: list[Node] = []
    step: Node | None = node
    while step is not None and step.state is NodeState.LIVE:
        path.append(step)
        step = step.parent
    return path[::-1]

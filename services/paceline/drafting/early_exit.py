"""Method `layer_skip`: some of the target's own layers draft for all of them (2309.08168, LayerSkip 2404.16710).

A guess is what the target would choose if it ended early. No other weights are needed, and KV of committed tokens is
the target's: only the root and guesses are computed. The root's KV goes where the next step writes it anew, that of
guesses into scratch slots, which are free again at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from typing_extensions import override

from paceline.core.goodput import is_worth
from paceline.core.pages import SlotPool
from paceline.core.params import LAYER_SKIP
from paceline.drafting.growing import StatelessFollower, best_guesses
from paceline.engine.decoder import Decoder
from paceline.engine.kv import KVCache
from paceline.engine.packing import BatchBuilder, PrefixRows, TreeRow
from paceline.engine.source_interface import Followed, LocalSource, Turn
from paceline.forest.linking import CHILD_SHARE

# Times that the layers run after a step at most, and guesses below each node.
MOST_PASSES, WIDTH = 6, 3


@dataclass(slots=True, eq=False, kw_only=True)
class _Guess:
    """A guess that may find a place in the tree.

    Attributes:
        above: The guess it hangs below; None for the root.
        path: Tokens from below the root to this one.
        slots: Scratch slots of the same path, once this guess is computed.
    """

    above: _Guess | None
    path: tuple[int, ...]
    confidence: float
    survival: float
    slots: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Growth:
    """What was guessed for one session so far."""

    turn: Turn[StatelessFollower]
    guesses: list[_Guess] = field(default_factory=list)

    @property
    def session(self) -> Followed:
        return self.turn.follower.session

    def expand(self, above: _Guess | None, row: np.ndarray, width: int) -> None:
        """Adds the best guesses after a guess, or after the root, from logits [vocab]."""
        path, survival = ((), 1.0) if above is None else (above.path, above.survival)
        position = len(self.session.tokens) + len(path)
        for token_id, confidence in best_guesses(self.session, row, position, path, width):
            chance = survival * self.turn.tree.probability(LAYER_SKIP, confidence)
            if chance >= self.turn.least:
                self.guesses.append(_Guess(above=above, path=(*path, token_id), confidence=confidence, survival=chance))

    def leaf(self) -> _Guess | None:
        """The best guess that is not computed yet, if one below it may still be verified."""
        leaves = [each for each in self.guesses if not each.slots and len(each.path) < self.turn.limit]
        return max(leaves, key=lambda each: each.survival, default=None)

    def best(self) -> list[_Guess]:
        """Those for which there is room, best first; parents come before children."""
        return sorted(self.guesses, key=lambda each: (-each.survival, len(each.path)))[: self.turn.limit]

    def prospect(self) -> tuple[float, float]:
        """Expected tokens with what the session has in hand, and what a guess below its best leaf would add."""
        survivals = [each.survival for each in self.best()]
        leaf = self.leaf()
        child = 0.0 if leaf is None else CHILD_SHARE * leaf.survival
        replaced = survivals[-1] if len(survivals) >= self.turn.limit else 0.0
        gain = max(0.0, child - replaced) if child >= self.turn.least else 0.0
        return 1.0 + sum(survivals), gain

    def add(self) -> list[float]:
        """Adds the best guesses to the tree; returns their survivals."""
        tree, best = self.turn.tree, self.best()
        nodes: dict[_Guess | None, int] = {None: tree.root}
        for each in best:
            nodes[each] = tree.suggest(nodes[each.above], each.path[-1], each.confidence, LAYER_SKIP)
        return [each.survival for each in best]


class EarlyExitSource(LocalSource[StatelessFollower]):
    """Grows trees by passes through some of the target's layers.

    Args:
        layers: Those that draft, in the order in which they run.
        cost: Time of a pass through them as a share of a step's.
        width: Guesses below each node.
    """

    name = LAYER_SKIP

    def __init__(
        self,
        decoder: Decoder,
        layers: tuple[int, ...],
        *,
        cost: float,
        width: int = WIDTH,
    ) -> None:
        self._decoder = decoder
        self._layers = layers
        self._cost = cost
        self._width = width
        self._place: tuple[KVCache, SlotPool] | None = None

    @override
    def attach(self, cache: KVCache, scratch: SlotPool) -> None:
        self._place = (cache, scratch)

    @override
    def follow(self, session: Followed) -> StatelessFollower:
        return StatelessFollower(session)

    @override
    def grow(self, turns: Sequence[Turn[StatelessFollower]]) -> list[list[float]]:
        assert self._place is not None, "the engine attaches a source before it asks"
        cache, scratch = self._place
        growths = [_Growth(turn) for turn in turns]
        ready = [growth for growth in growths if _has_place_for_root(growth.turn.follower)]
        slots: list[int] = []
        leaves: list[tuple[_Growth, _Guess | None]] = [(growth, None) for growth in ready]
        try:
            for _ in range(MOST_PASSES):
                self._expand(leaves, cache, scratch, slots)
                prospects = [each.prospect() for each in ready]
                expected, gain = sum(each for each, _ in prospects), sum(each for _, each in prospects)
                if not is_worth(gain, expected, cost_s=self._cost, step_s=1.0):
                    break
                leaves = [(growth, leaf) for growth in ready if (leaf := growth.leaf()) is not None]
        finally:
            scratch.give_back(*slots)
        return [growth.add() for growth in growths]

    def _expand(
        self,
        leaves: Sequence[tuple[_Growth, _Guess | None]],
        cache: KVCache,
        scratch: SlotPool,
        slots: list[int],
    ) -> None:
        """One pass: computes leaves, of which None is a root, and adds guesses below them; notes the slots it takes."""
        builder = BatchBuilder()
        computed: list[tuple[_Growth, _Guess | None]] = []
        for growth, leaf in leaves:
            pages, length = growth.session.pages, len(growth.session.tokens)
            if leaf is None:
                builder.add_prefixes([PrefixRows(pages, length - 1, length, wants_logits=True)])
            else:
                slot = scratch.take()
                if slot is None:
                    break
                slots.append(slot)
                ancestors = () if leaf.above is None else leaf.above.slots
                position = length + len(leaf.path) - 1
                builder.add_nodes([TreeRow(pages, leaf.path[-1], position, (*ancestors, slot))])
                leaf.slots = (*ancestors, slot)
            computed.append((growth, leaf))
        if computed:
            logits = self._decoder.forward(builder.build(), cache, self._layers).cpu().numpy()
            for (growth, leaf), row in zip(computed, logits, strict=True):
                growth.expand(leaf, row, self._width)


def _has_place_for_root(follower: StatelessFollower) -> bool:
    """Whether all tokens before the root are computed, and the root has a slot; takes a page for it if need be."""
    return follower.root_is_next and follower.session.pages.reserve(len(follower.session.tokens))

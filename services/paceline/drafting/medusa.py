"""Method `medusa` (2401.10774): heads on the target's final hidden state guess several tokens ahead at once.

A head knows how far ahead its token is, but not which tokens come between; so all nodes of one depth have the same
guesses below them, and the tree is their product, best first (section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from typing_extensions import override

from paceline.core.pages import SlotPool
from paceline.core.params import MEDUSA
from paceline.drafting.growing import best_guesses, grow_best_first, root_is_next
from paceline.engine.decoder import Decoder
from paceline.engine.kv import KVCache
from paceline.engine.medusa_heads import MedusaHeads
from paceline.engine.source_interface import Followed, LocalSource, Turn

# Guesses of one head.
WIDTH = 4


class MedusaSource(LocalSource[Followed]):
    """Grows trees from Medusa heads.

    The target must keep final hidden states (`StateLayout.final`).

    Args:
        heads: The target's Medusa heads.
    """

    name = MEDUSA

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self._cache: KVCache | None = None

    @override
    @classmethod
    def make(cls, settings: Any, decoder: Decoder) -> Self:
        """Loads the heads, and has the target keep its final states, too."""
        heads = MedusaHeads.load(settings.medusa_model, decoder)
        decoder.keep_states(replace(decoder.states, hidden_size=decoder.hidden_size, final=True))
        return cls(heads)

    @override
    def attach(self, cache: KVCache, scratch: SlotPool) -> None:
        assert cache.states.shape[1] >= self._heads.hidden_size, "the target keeps no final hidden states"
        self._cache = cache

    @override
    def follow(self, session: Followed) -> Followed:
        return session

    @override
    def grow(self, turns: Sequence[Turn[Followed]]) -> None:
        ready = [turn for turn in turns if root_is_next(turn.follower)]
        if not ready:
            return
        # A guess at depth d takes d places in the tree.
        count = min(len(self._heads), max(turn.limit for turn in ready))
        logits = self._heads(self._states(ready), count).cpu().numpy()
        for row, turn in enumerate(ready):
            self._grow_one(turn, logits[:, row])

    def _states(self, turns: Sequence[Turn[Followed]]) -> torch.Tensor:
        """The states that chose the sessions' last tokens, float32 [turns, hidden]."""
        assert self._cache is not None, "the engine attaches a source before it asks"
        sessions = [turn.follower for turn in turns]
        slots = [session.pages.slot(len(session.tokens) - 2) for session in sessions]
        return self._cache.states_at(slots)[:, -self._heads.hidden_size :].to(torch.float32)

    def _grow_one(self, turn: Turn[Followed], logits: np.ndarray) -> None:
        """Grows one tree from logits [heads, vocab]."""
        session = turn.follower
        by_depth: list[list[tuple[int, float]]] = []
        for depth, row in enumerate(logits[: turn.limit]):
            likeliest = [guesses[0][0] for guesses in by_depth]
            found = best_guesses(session, row, len(session.tokens) + depth, likeliest, WIDTH)
            if not found:
                break
            by_depth.append(found)

        def below(depth: int) -> Iterable[tuple[int, float, int]]:
            guesses = by_depth[depth] if depth < len(by_depth) else []
            return [(token_id, confidence, depth + 1) for token_id, confidence in guesses]

        grow_best_first(turn, self.name, 0, below)

"""Acceptance rules: which one judges a session's guesses, and what comes of a round.

The rules themselves are loops over the target's rows: `paceline.engine.judging`. Rejection sampling: Leviathan et al.
2211.17192, algorithm 1, and Chen et al. 2302.01318, algorithm 2; its guesses are drawn from distributions over few ids,
sent as they are sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.params import ACCEPTANCE_RULES, COUPLED, TIER_METHODS, SpeculationParams


def served_rules(default: str, methods: Sequence[str]) -> tuple[str, ...]:
    """Names of the rules that can be asked for, the default first, where a verifier drafts by these methods."""
    # Chains come from drafters of the tier only.
    served = ACCEPTANCE_RULES if set(methods) & set(TIER_METHODS) else (COUPLED,)
    return (default, *(name for name in served if name != default))


def rule_of(speculation: SpeculationParams, default: str) -> str:
    """The name of a session's rule; `coupled` without speculation, where there is nothing to accept."""
    return COUPLED if speculation.cap == 0 else speculation.acceptance or default


MAX_WEIGHT = 65535
DEFAULT_KEEP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseDraft:
    """A draft distribution as it is sampled and as it is sent: integer weights over few ids, best first.

    The probability of `token_ids[i]` is `weights[i] / sum(weights)`; every other id has none. Weights fit 16
    bits.
    """

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]

    def sample(self, uniform: float) -> int:
        """Returns the token whose interval of cumulative weight holds `uniform` in [0, 1)."""
        cumulative = np.cumsum(self.weights, dtype=np.float64)
        place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return self.token_ids[min(place, len(self.token_ids) - 1)]


def sparse_draft(draft_probs: npt.NDArray[np.float64], keep: int = DEFAULT_KEEP) -> SparseDraft:
    """Returns the `keep` most probable ids, the lowest first among equals; weights that round to 0 go.

    The drafter samples from the result and sends it, so what is lost here costs acceptance, never exactness.
    """
    rest = max(0, len(draft_probs) - keep)
    candidates = np.flatnonzero((draft_probs >= np.partition(draft_probs, rest)[rest]) & (draft_probs > 0.0))
    order = candidates[np.argsort(-draft_probs[candidates], kind="stable")][:keep]
    weights = np.rint(draft_probs[order] * (MAX_WEIGHT / draft_probs[order[0]])).astype(np.int64)
    kept = weights > 0
    return SparseDraft(token_ids=tuple(order[kept].tolist()), weights=tuple(weights[kept].tolist()))

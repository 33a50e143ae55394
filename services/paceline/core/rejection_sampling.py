"""The mathematics of acceptance: which draft tokens become committed tokens.

Randomness comes in as an argument (noise or uniforms), probabilities are those after all processors. The coupled rule
chooses the target's token without a look at any draft; the rejection rule is Leviathan et al. 2211.17192, algorithm 1,
and Chen et al. 2302.01318, algorithm 2. `paceline.core.acceptance_rules` applies them to draft trees; nothing here
knows models, sessions, or how random numbers are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.errors import LocalProtocolError

FloatArray = npt.NDArray[np.float64]

MAX_WEIGHT = 65535
DEFAULT_KEEP = 64


def overlap(target_probs: FloatArray, draft_probs: FloatArray) -> float:
    """Returns the probability that a token drawn from `draft_probs` is accepted by the rejection rule: 1 - TV.

    2211.17192, theorem 3.5; what a row shows of its drafter, whatever token was drawn.
    """
    return float(np.minimum(target_probs, draft_probs).sum())


def residual(target_probs: FloatArray, draft_probs: FloatArray) -> FloatArray:
    """Returns norm(max(target_probs - draft_probs, 0)), [vocab]: the distribution after a rejection.

    Where nothing is left, the two are equal up to rounding, no rejection can happen, and the target's
    comes back.
    """
    excess = np.maximum(target_probs - draft_probs, 0.0)
    mass = float(excess.sum())
    return excess / mass if mass > 0.0 else target_probs / float(target_probs.sum())


def pick(probs: FloatArray, uniform: float) -> int:
    """Returns the token whose interval of cumulative mass holds `uniform` in [0, 1), never one of mass 0."""
    cumulative = np.cumsum(probs)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(probs)[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseDraft:
    """A draft distribution as it is sampled and as it is sent: integer weights over few ids, best first.

    The probability of `token_ids[i]` is `weights[i] / sum(weights)`; every other id has none. Weights fit 16
    bits.
    """

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]

    def probs(self, vocab_size: int) -> FloatArray:
        """Returns the distribution over the whole vocabulary, [vocab_size]."""
        dense = np.zeros(vocab_size)
        dense[list(self.token_ids)] = np.array(self.weights, dtype=np.float64) / sum(self.weights)
        return dense

    def sample(self, uniform: float) -> int:
        """Returns the token that `uniform` in [0, 1) selects."""
        return self.token_ids[pick(np.array(self.weights, dtype=np.float64), uniform)]


def sparse_draft(draft_probs: FloatArray, keep: int = DEFAULT_KEEP) -> SparseDraft:
    """Returns the `keep` most probable ids, the lowest first among equals; weights that round to 0 go.

    The drafter samples from the result and sends it, so what is lost here costs acceptance, never exactness.
    """
    rest = max(0, len(draft_probs) - keep)
    candidates = np.flatnonzero((draft_probs >= np.partition(draft_probs, rest)[rest]) & (draft_probs > 0.0))
    order = candidates[np.argsort(-draft_probs[candidates], kind="stable")][:keep]
    weights = np.rint(draft_probs[order] * (MAX_WEIGHT / draft_probs[order[0]])).astype(np.int64)
    kept = weights > 0
    return SparseDraft(token_ids=tuple(order[kept].tolist()), weights=tuple(weights[kept].tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutcome:
    """How many draft tokens were accepted, and the one token that follows them."""

    num_accepted: int
    next_token_id: int


def reject_walk(
    target_rows: Sequence[FloatArray],
    draft_rows: Sequence[FloatArray],
    draft_tokens: Sequence[int],
    uniforms: Sequence[float],
) -> VerifyOutcome:
    """Verifies a chain of draft tokens by the rejection rule (2211.17192, algorithm 1).

    Args:
        target_rows: gamma + 1 rows [vocab]; row i is the target's distribution after the first i draft tokens.
        draft_rows: gamma rows [vocab]; row i is the distribution that `draft_tokens[i]` was sampled from.
        draft_tokens: gamma token ids.
        uniforms: gamma + 1 fresh numbers in [0, 1): one per draft token, the last for the token that follows.

    Raises:
        LocalProtocolError: The lengths do not fit together.
    """
    gamma = len(draft_tokens)
    if (len(target_rows), len(draft_rows), len(uniforms)) != (gamma + 1, gamma, gamma + 1):
        raise LocalProtocolError(
            f"{gamma} draft tokens came with {len(target_rows)} target rows, {len(draft_rows)} draft rows"
            f" and {len(uniforms)} uniforms"
        )
    for index, token_id in enumerate(draft_tokens):
        target_probs, draft_probs = target_rows[index], draft_rows[index]
        if not uniforms[index] * draft_probs[token_id] < target_probs[token_id]:
            recovered = pick(residual(target_probs, draft_probs), uniforms[gamma])
            return VerifyOutcome(num_accepted=index, next_token_id=recovered)
    bonus = pick(target_rows[gamma], uniforms[gamma])
    return VerifyOutcome(num_accepted=gamma, next_token_id=bonus)

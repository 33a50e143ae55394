"""Acceptance rules: which one judges a session's guesses, and what comes of a round.

The rules themselves are loops over the target's rows: `paceline.engine.judging`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.params import ACCEPTANCE_RULES, COUPLED, TIER_METHODS, SpeculationParams


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


def served_rules(default: str, methods: Sequence[str]) -> tuple[str, ...]:
    """Names of the rules that can be asked for, the default first, where a verifier drafts by these methods."""
    # Chains come from drafters of the tier only.
    served = ACCEPTANCE_RULES if set(methods) & set(TIER_METHODS) else (COUPLED,)
    return (default, *(name for name in served if name != default))


def rule_of(speculation: SpeculationParams, default: str) -> str:
    """The name of a session's rule; `coupled` without speculation, where there is nothing to accept."""
    return COUPLED if speculation.cap == 0 else speculation.acceptance or default

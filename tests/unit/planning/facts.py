"""Profiles that tests plan with: round figures, no luck unless asked for."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.step_time import StepCost
from paceline.simulated.guesses import GuessLaw
from paceline.simulated.profile import MEASURED, DeviceFacts, DrafterFacts, Profile

# A step of one row, and what every row more takes.
STEP_S, ROW_S = 0.010, 0.0001
TARGET_COST = StepCost(rows=(1, 1025), seconds=(STEP_S, STEP_S + 1024 * ROW_S))
DRAFT_COST = StepCost(rows=(1, 1025), seconds=(0.001, 0.001 + 1024 * 1e-5))


def sure_guesses(*, right: bool) -> GuessLaw:
    """A drafter that is sure of its first guess, and always right or always wrong."""
    return GuessLaw(slope=0.0, intercept=50.0 if right else -50.0, confidence_mean=3.0, confidence_spread=0.0)


def profile(
    acceptance: GuessLaw | None = None,
    *,
    cost: StepCost = TARGET_COST,
    kv_tokens: int = 32_768,
    noise: float = 0.0,
    draft_cost: StepCost = DRAFT_COST,
    link_s: float = 0.0002,
) -> Profile:
    """A pair whose steps take round figures."""
    drafter = DrafterFacts(
        name="small", rows=draft_cost.rows, seconds=draft_cost.seconds, price_per_hour=1.0, max_sessions=256
    )
    target = DeviceFacts(
        name="large", rows=cost.rows, seconds=cost.seconds, kv_tokens=kv_tokens, noise=noise, price_per_hour=4.0
    )
    return Profile(
        name="test pair",
        kind=MEASURED,
        origin="a test",
        target=target,
        drafter=drafter,
        colocated=drafter,
        colocated_kv_tokens=kv_tokens,
        acceptance=acceptance or GuessLaw(),
        link_s=link_s,
    )


def equal(count: int, num_prompt_tokens: int = 20, num_output_tokens: int = 24) -> Sequence[tuple[int, int]]:
    """Lengths of so many equal requests."""
    return [(num_prompt_tokens, num_output_tokens)] * count

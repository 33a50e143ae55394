"""How many users there are over a run of Locust. Pure: it knows neither Locust nor clocks."""

from __future__ import annotations

import math

STEADY, RAMP, SPIKE = "steady", "ramp", "spike"
SHAPES = (STEADY, RAMP, SPIKE)
# A spike: all users for a tenth of the run, twice; between, this share of them.
SPIKES = ((0.3, 0.4), (0.7, 0.8))
CALM_SHARE = 0.25
# A user of each kind.
FEWEST = 2


def num_users(shape: str, share: float, most: int) -> int | None:
    """Returns the users at a moment of the run.

    Args:
        shape: Name in `SHAPES`: always all, up to all and down again, or few with two spikes.
        share: Share of the run that is over.
        most: Most users at once.

    Returns:
        At least `FEWEST`; None when the run is over.
    """
    if share >= 1.0:
        return None
    if shape == RAMP:
        return max(FEWEST, math.ceil(most * (1.0 - abs(2.0 * share - 1.0))))
    if shape == SPIKE and not any(start <= share < end for start, end in SPIKES):
        return max(FEWEST, math.ceil(most * CALM_SHARE))
    return most

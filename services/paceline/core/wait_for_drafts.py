"""What a step gains by waiting for drafters: the children of what its sessions have in hand.

A step waits where that is worth the time (`paceline.core.goodput.is_worth`); `Forest.prospects` looks at trees.
"""

from __future__ import annotations

# Share of a promising leaf's survival that its best child keeps, until a drafter's first guesses show what it is: the
# mean confidence of a fair one.
CHILD_SHARE = 0.75

"""The draft trees of all sessions of a process, as arrays with compiled loops; see `paceline.forest.forest`."""

from paceline.forest.forest import UNLEARNED, Forest, warm_up
from paceline.forest.links import Links
from paceline.forest.records import (
    NO_GUESSES,
    NONE,
    ROOT,
    Bools,
    Calls,
    Committed,
    Floats,
    Gathered,
    Guesses,
    Ints,
    Merged,
    Picked,
    Standing,
    rows_of,
)

__all__ = [
    "NONE",
    "NO_GUESSES",
    "ROOT",
    "UNLEARNED",
    "Bools",
    "Calls",
    "Committed",
    "Floats",
    "Forest",
    "Gathered",
    "Guesses",
    "Ints",
    "Links",
    "Merged",
    "Picked",
    "Standing",
    "rows_of",
    "warm_up",
]

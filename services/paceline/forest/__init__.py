"""The draft trees of all sessions of a process, as arrays with compiled loops; see `paceline.forest.forest`."""

from paceline.forest.columns import NO_GUESSES, Calls, Coming, Committed, Gathered, Guesses, Merged, Picked, rows_of
from paceline.forest.forest import UNLEARNED, Forest
from paceline.forest.links import Links
from paceline.forest.records import NONE, ROOT, Bools, Floats, Ints
from paceline.forest.warming import warm_up

__all__ = [
    "NONE",
    "NO_GUESSES",
    "ROOT",
    "UNLEARNED",
    "Bools",
    "Calls",
    "Coming",
    "Committed",
    "Floats",
    "Forest",
    "Gathered",
    "Guesses",
    "Ints",
    "Links",
    "Merged",
    "Picked",
    "rows_of",
    "warm_up",
]

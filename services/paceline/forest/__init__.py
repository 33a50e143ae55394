"""The draft trees of all sessions of a process, as arrays with compiled loops; see `paceline.forest.forest`."""

from paceline.forest.forest import Calls, Committed, Forest, Grafts, Picked, Pushed, path, rows_of, show
from paceline.forest.records import FULL, NONE, ROOT, Bools, Floats, Ints

__all__ = [
    "FULL",
    "NONE",
    "ROOT",
    "Bools",
    "Calls",
    "Committed",
    "Floats",
    "Forest",
    "Grafts",
    "Ints",
    "Picked",
    "Pushed",
    "path",
    "rows_of",
    "show",
]

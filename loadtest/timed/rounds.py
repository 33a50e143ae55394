"""Where the time of a round goes: a commit, drafts after it, and the step that verifies them."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.timed.drafter import HEARD, OUT
from loadtest.timed.marks import read_marks
from loadtest.timed.verifier import ARRIVED, BEGUN, DONE, SENT, TAKEN_IN

VERIFIER, DRAFTER = "verifier", "drafter"
# A round begins when the target's device is done; its pieces, and the marks with which they end, in their order.
PIECES = {
    "judging": (VERIFIER, SENT),
    "commit": (DRAFTER, HEARD),
    "planning_drafts": (DRAFTER, BEGUN),
    "drafting": (DRAFTER, DONE),
    "handing_on": (DRAFTER, OUT),
    "drafts": (VERIFIER, ARRIVED),
    "taking_in": (VERIFIER, TAKEN_IN),
    "planning": (VERIFIER, BEGUN),
    "device": (VERIFIER, DONE),
}


def anatomy(folder: Path) -> dict[str, float]:
    """Median milliseconds of each piece, of the rounds in which all of them come in turn, and of these rounds."""
    times: Mapping[tuple[str, str], list[float]] = defaultdict(list)
    for role in (VERIFIER, DRAFTER):
        for at_s, what in read_marks(folder, role):
            times[role, what].append(at_s)
    pieces: Mapping[str, list[float]] = defaultdict(list)
    for begun_s, done_s in zip(times[VERIFIER, DONE], times[VERIFIER, DONE][1:], strict=False):
        ends = _ends(times, begun_s)
        # Otherwise the step had not waited for drafts.
        if ends and ends[-1] == done_s:
            for piece, since_s, until_s in zip(PIECES, [begun_s, *ends], ends, strict=False):
                pieces[piece].append(until_s - since_s)
            pieces["round"].append(done_s - begun_s)
    return {piece: round(1e3 * statistics.median(found), 2) for piece, found in pieces.items()}


def _ends(times: Mapping[tuple[str, str], Sequence[float]], begun_s: float) -> list[float]:
    """When the pieces of a round ended, each the first of its kind after the one before; empty: one never did."""
    ends = [begun_s]
    for mark in PIECES.values():
        place = bisect_right(times[mark], ends[-1])
        if place == len(times[mark]):
            return []
        ends.append(times[mark][place])
    return ends[1:]

"""What a verifier knows of its sessions' drafters, in columns: a session has the row of its tree.

Time comes in as an argument; nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.forest import linking
from paceline.forest.linking import CHILD_SHARE
from paceline.forest.records import (
    DRAFTER,
    LINK,
    NONE,
    TRACKED,
    Bools,
    Floats,
    Ints,
    LinkArrays,
    Standing,
    grown,
    records,
)

# Expected seconds between two messages with nodes of one session, before there were some.
INTERVAL_S = 0.002
FIRST_DRAFTERS = 4


class Links:
    """The links of all sessions of a forest, and every change of them.

    Args:
        trees: Returns the forest's, TREE `[rows]`.

    Attributes:
        arrays: What kernels take.
    """

    def __init__(self, trees: Callable[[], Any]) -> None:
        self._trees = trees
        self.arrays = LinkArrays(
            records(0, LINK),
            np.zeros((0, TRACKED), np.int32),
            np.zeros((0, TRACKED)),
            records(0, DRAFTER),
        )
        self._free: list[int] = []

    def add_rows(self, more: int) -> None:
        """Makes place for more sessions."""
        links, sent_lens, sent_s = (grown(each, more) for each in self.arrays[:-1])
        links["drafter"][-more:] = NONE
        self.arrays = LinkArrays(links, sent_lens, sent_s, self.arrays.drafters)

    # Drafters

    def new_drafter(self, response_s: float) -> int:
        """Number of a drafter that usually answers in so many seconds."""
        if not self._free:
            first = len(self.arrays.drafters)
            more = max(FIRST_DRAFTERS, first)
            self.arrays = self.arrays._replace(drafters=grown(self.arrays.drafters, more))
            self._free += range(first + more - 1, first - 1, -1)
        number = self._free.pop()
        self.arrays.drafters[number] = (response_s, INTERVAL_S, CHILD_SHARE, False)
        return number

    def drop_drafter(self, number: int) -> None:
        """A drafter is gone, and no session is linked to it any more."""
        self._free.append(number)

    # One session

    def begin(self, row: int, number: int, price: float) -> None:
        """A session begins under its number, without a drafter, at a price."""
        link, committed_len = self.arrays.links[row], self._trees()["committed_len"][row]
        link["number"], link["drafter"], link["room"], link["answered"] = number, NONE, 0, False
        link["sent_len"], link["unsent_from"] = 0, NONE
        link["answered_len"] = link["activated_len"] = committed_len
        link["price"], link["sent_price"] = price, 1.0
        link["num_unanswered"], link["oldest"], link["received_s"] = 0, 0, math.nan

    def bound(
        self, row: int, *, most_guesses: int, last_len: int, waits_up_to: int, takes_chains: bool = False
    ) -> None:
        """What a session's guesses are bounded by.

        Args:
            row: Of the session.
            most_guesses: Of a step.
            last_len: Tokens with which its text ends at the latest.
            waits_up_to: Committed tokens up to which it may be delayed for drafts.
            takes_chains: Whether a step verifies one chain of it instead of a tree.
        """
        link = self.arrays.links[row]
        link["most_guesses"], link["last_len"], link["waits_up_to"] = most_guesses, last_len, waits_up_to
        link["takes_chains"], link["has_sources"] = takes_chains, False

    def guess_inside(self, row: int) -> None:
        """Sources inside the verifier guess for a session."""
        self.arrays.links["has_sources"][row] = True

    def connect(self, row: int, drafter: int) -> None:
        """The stream to its drafter is up, anew, so that it knows nothing of the session; NONE: the stream is lost."""
        self.arrays.links["drafter"][row] = drafter
        if drafter != NONE:
            self.forget(row)

    def forget(self, row: int) -> None:
        """Its drafter does not know the session, or no longer."""
        link = self.arrays.links[row]
        link["sent_len"], link["unsent_from"] = 0, NONE

    def open(self, row: int) -> tuple[float, int]:
        """Its drafter gets to know the session, with all that is committed; returns the price and the room to send."""
        link = self.arrays.links[row]
        link["sent_len"], link["unsent_from"] = self._trees()["committed_len"][row], NONE
        link["sent_price"] = link["price"]
        return self.terms(row)

    def resend_from(self, row: int, have_len: int) -> None:
        """Its drafter has so many committed tokens, and is told all since."""
        link = self.arrays.links[row]
        link["sent_len"], link["unsent_from"] = self._trees()["committed_len"][row], have_len
        link["sent_price"] = link["price"]

    def terms(self, row: int) -> tuple[float, int]:
        """Its present price and room."""
        link = self.arrays.links[row]
        return float(link["price"]), int(link["room"])

    def sent_len(self, row: int) -> int:
        """Committed tokens that its drafter knows; 0: it does not know the session."""
        return int(self.arrays.links["sent_len"][row])

    # Many sessions

    def standing(self, rows: Ints, most: int) -> Standing:
        """Where sessions stand whose steps verify at most so many guesses of each."""
        size = len(rows)
        at = Standing(np.empty(size, np.int32), *np.empty((5, size), np.bool_), *np.empty((2, size)))
        linking.stand(self.arrays, self._trees(), rows, most, at)
        return at

    def lens(self, rows: Ints) -> Ints:
        """Committed tokens of the sessions `[sessions]`."""
        return np.asarray(self._trees()["committed_len"][rows])

    def may_wait(self, rows: Ints) -> Bools:
        """Which of the sessions `[sessions]` may be delayed for drafts."""
        return np.asarray(self._trees()["committed_len"][rows] <= self.arrays.links["waits_up_to"][rows])

    def response_s(self, rows: Ints) -> Floats:
        """Usual seconds from a commit to the first nodes that know it, `[sessions]`; NaN: none are to come."""
        drafters = self.arrays.links["drafter"][rows]
        if not len(self.arrays.drafters):
            return np.full(len(rows), math.nan)
        known = self.arrays.drafters[drafters]
        return np.where((drafters == NONE) | (known["silent"] != 0), math.nan, known["response_s"])

    def idle(self, rows: Ints) -> None:
        """Nothing is drafted for sessions until `look_ahead`."""
        self.arrays.links["price"][rows] = 1.0

    def look_ahead(self, rows: Ints, caps: Ints, *, prices: Floats, step_s: float) -> None:
        """Sets prices and rooms for what is drafted now: a later step verifies it, as many on as an answer takes.

        Args:
            rows: int32 `[sessions]`.
            caps: int32 `[sessions]`, most nodes of each in a step.
            prices: Least survival worth verifying in the next step, `[sessions]`.
            step_s: Seconds of a step.
        """
        linking.look_ahead(self.arrays, rows, caps, prices, step_s)

    def due(self, rows: Ints, now_s: float) -> tuple[Bools, int]:
        """What drafters do not know yet counts as sent.

        Returns:
            Which sessions are to be opened at their drafters, `[sessions]`; and how many others are told what they have
            committed, see `drain_commits`.
        """
        opens = np.empty(len(rows), np.bool_)
        return opens, int(linking.due(self.arrays, self._trees(), rows, now_s, opens))

    def drain_commits(self, rows: Ints, drafter: int) -> tuple[Ints, Ints, Floats, Ints]:
        """Those of the sessions `[sessions]` that a drafter is to be told of, which counts as done.

        Returns:
            Their numbers, the committed tokens from which on it is told, prices and rooms.
        """
        links = self.arrays.links[rows]
        mine = (links["drafter"] == drafter) & (links["unsent_from"] != NONE)
        self.arrays.links["unsent_from"][rows[mine]] = NONE
        links = links[mine]
        return links["number"], links["unsent_from"], links["sent_price"], links["room"]

    def serve(self, rows: Ints, bases: Ints, drafter: int, *, has_distributions: bool) -> int:
        """Sets rows of sessions that a drafter does not draft for to NONE; see `linking.serve`."""
        return int(linking.serve(self.arrays, self._trees(), rows, bases, drafter, has_distributions))

    def drafts_arrived(self, rows: Ints, bases: Ints, sizes: Ints, firsts: Floats, arrived_s: Floats) -> list[float]:
        """Guesses have come; returns seconds since the commits that they answer, where they are the first that do."""
        round_trips_s = np.empty(len(rows))
        count = linking.drafts_arrived(self.arrays, rows, bases, sizes, firsts, arrived_s, round_trips_s)
        return [*round_trips_s[:count].tolist()]

    def waits(self, rows: Ints, now_s: float) -> Floats:
        """Expected seconds until the next nodes of sessions that may wait, `[sessions]`; NaN: none are expected."""
        seconds = np.empty(len(rows))
        linking.waits(self.arrays, self._trees(), rows, now_s, seconds)
        return seconds

    def mark_silent(self, rows: Ints, now_s: float) -> int:
        """Marks drafters as silent whose answers sessions that may wait should have; returns how many were not."""
        return int(linking.mark_silent(self.arrays, self._trees(), rows, now_s))

    def lag_tokens(self, rows: Ints) -> int:
        """Most committed tokens of a session that its drafter has not answered; none while drafters idle."""
        return int(linking.lag(self.arrays, self._trees(), rows))

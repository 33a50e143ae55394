"""Loops over the links of sessions: what has been sent to their drafters, and how these answer.

A drafter at work receives every commit. An idle one receives none, but for the one that makes it idle; when it is
called again, it receives all that it missed in one message. Over a long way, several commits are under way at once.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.forest.records import NONE, TRACKED, Bools, Floats, Ints, LinkArrays, Standing, kernel

# Survival of the best first guess of a drafter that has not shown what it is: the mean confidence of a fair one.
CHILD_SHARE = 0.75
# Weight of a new observation.
SMOOTHING = 0.2
# Nodes are overdue after this many times the usual delay.
OVERDUE = 3.0
# A drafter that was called back may leave this number of tokens of a session unanswered while it reads what it missed;
# after that it counts as one that has answered with nothing.
MOST_UNANSWERED = 64
# Nodes that a drafter may have in a tree per node that may be verified in a step: for the branches that the text will
# not take.
ROOM_PER_NODE = 8
# Nothing is drafted for more steps ahead: after one long silence a drafter would otherwise grow what no step verifies.
MOST_STEPS_AHEAD = 4.0
# Least share of the usual time that the next nodes are still expected to take.
LEAST_LEFT = 0.25


@kernel
def stop(link: Any) -> None:
    """The drafter idles, or starts anew: no answers are expected."""
    link.num_unanswered = 0
    link.received_s = math.nan


@kernel
def drafts_arrived(
    a: LinkArrays, rows: Ints, bases: Ints, sizes: Ints, firsts: Floats, arrived_s: Floats, round_trips_s: Floats
) -> int:
    """Guesses of sessions have come, and are in their trees; learns how long they took.

    Args:
        rows: int32 `[messages]`; NONE: passed over.
        bases: int32 `[messages]`, committed tokens that the drafter knew.
        sizes: int32 `[messages]`, guesses; of a message without any nothing is learned.
        firsts: float64 `[messages]`, best survival of a guess below the root; below 0: they know other tokens.
        arrived_s: float64 `[messages]`, when they came.
        round_trips_s: Filled with the seconds since the commits that they answer, of the first that do.

    Returns:
        How many these are.
    """
    count = 0
    for index in range(len(rows)):
        row, base, now_s = rows[index], bases[index], arrived_s[index]
        if row == NONE or sizes[index] == 0:
            continue
        link = a.links[row]
        drafter = a.drafters[link.drafter]
        link.answered_len = max(link.answered_len, base)
        # What it guessed from the first of what it had missed came late.
        link.answered |= base > link.activated_len
        sent_len, sent_s = 0, 0.0
        while link.num_unanswered and a.sent_lens[row, link.oldest] <= base:
            sent_len, sent_s = a.sent_lens[row, link.oldest], a.sent_s[row, link.oldest]
            link.oldest = (link.oldest + 1) % TRACKED
            link.num_unanswered -= 1
        received_s = link.received_s
        if not link.num_unanswered:
            link.received_s = now_s
        if sent_len == base:
            delay_s = max(0.0, now_s - sent_s)
            drafter.response_s += SMOOTHING * (delay_s - drafter.response_s)
            if firsts[index] >= 0.0:
                drafter.child_share += SMOOTHING * (firsts[index] - drafter.child_share)
            round_trips_s[count] = delay_s
            count += 1
        elif not math.isnan(received_s):
            drafter.interval_s += SMOOTHING * (max(0.0, now_s - received_s) - drafter.interval_s)
    return count


@kernel
def left_s(elapsed_s: float, usual_s: float) -> float:
    """Expected seconds until something that usually takes some; NaN: it is overdue."""
    return math.nan if elapsed_s > OVERDUE * usual_s else max(usual_s - elapsed_s, LEAST_LEFT * usual_s)


@kernel
def may_wait(link: Any, tree: Any) -> bool:
    """Whether a session has a drafter, and may be delayed for its drafts."""
    waits: bool = link.drafter != NONE and tree.committed_len <= link.waits_up_to
    return waits


@kernel
def waits(a: LinkArrays, trees: Any, rows: Ints, now_s: float, seconds: Floats) -> None:
    """Expected seconds until the next nodes: the answer to the oldest commit without one, or some beyond the last.

    NaN: they are overdue, none are to come, the drafter is silent, or away, or the session may not be delayed.
    """
    for index in range(len(rows)):
        row = rows[index]
        link = a.links[row]
        seconds[index] = math.nan
        if not may_wait(link, trees[row]) or a.drafters[link.drafter].silent:
            continue
        drafter = a.drafters[link.drafter]
        if not math.isnan(link.received_s):
            seconds[index] = left_s(now_s - link.received_s, drafter.interval_s)
            continue
        # A drafter whose tree was full does not answer a commit.
        while link.num_unanswered > 1 and now_s - a.sent_s[row, link.oldest] > OVERDUE * drafter.response_s:
            link.oldest = (link.oldest + 1) % TRACKED
            link.num_unanswered -= 1
        if link.num_unanswered:
            seconds[index] = left_s(now_s - a.sent_s[row, link.oldest], drafter.response_s)


@kernel
def mark_silent(a: LinkArrays, trees: Any, rows: Ints, now_s: float) -> int:
    """Marks drafters as silent when an answer is overdue that may be waited for; returns how many were not before."""
    count = 0
    for index in range(len(rows)):
        row = rows[index]
        link = a.links[row]
        if not may_wait(link, trees[row]) or not link.num_unanswered or a.drafters[link.drafter].silent:
            continue
        last = (link.oldest + link.num_unanswered - 1) % TRACKED
        drafter = a.drafters[link.drafter]
        if now_s - a.sent_s[row, last] > OVERDUE * drafter.response_s:
            drafter.silent = True
            count += 1
    return count


@kernel
def look_ahead(a: LinkArrays, rows: Ints, caps: Ints, prices: Floats, step_s: float) -> None:
    """What is drafted now is verified by a later step, as many on as an answer takes; see `Links.look_ahead`."""
    for index in range(len(rows)):
        link = a.links[rows[index]]
        steps = 1.0
        if link.drafter != NONE:
            steps = min(1.0 + a.drafters[link.drafter].response_s / step_s, MOST_STEPS_AHEAD)
        # Survival multiplies with every step, and 1 stays 1.
        link.price = prices[index] ** steps if caps[index] else 1.0
        link.room = round(ROOM_PER_NODE * caps[index] * steps)


@kernel
def due(a: LinkArrays, trees: Any, rows: Ints, now_s: float, opens: Bools) -> int:
    """What drafters do not know yet counts as sent.

    Args:
        trees: Of the forest.
        rows: int32 `[sessions]`.
        opens: Filled with whether each session is to be opened at its drafter.

    Returns:
        How many others are told of commits, from `unsent_from` on.
    """
    num_told = 0
    for index in range(len(rows)):
        row = rows[index]
        link, committed_len = a.links[row], trees[row].committed_len
        opens[index] = False
        if link.drafter == NONE:
            continue
        idles = link.price >= 1.0
        if idles or not link.sent_len:
            link.answered, link.activated_len = False, committed_len
            stop(link)
        if idles and (link.sent_price >= 1.0 or not link.sent_len):
            continue
        if not idles:
            if link.num_unanswered == TRACKED:
                link.oldest = (link.oldest + 1) % TRACKED
                link.num_unanswered -= 1
            last = (link.oldest + link.num_unanswered) % TRACKED
            a.sent_lens[row, last], a.sent_s[row, last] = committed_len, now_s
            link.num_unanswered += 1
            link.received_s = math.nan
        if not link.sent_len:
            opens[index] = True
        else:
            num_told += 1
            if link.unsent_from == NONE:
                link.unsent_from = link.sent_len
        link.sent_len, link.sent_price = committed_len, link.price
    return num_told


@kernel
def stand(a: LinkArrays, trees: Any, rows: Ints, most: int, at: Standing) -> None:
    """Fills where sessions stand; a guess beyond the last token would be wasted."""
    for index in range(len(rows)):
        link, committed_len = a.links[rows[index]], trees[rows[index]].committed_len
        drafted = link.drafter != NONE
        cap = max(0, min(link.most_guesses, most, link.last_len - committed_len - 1))
        at.caps[index], at.prices[index], at.shares[index] = cap, link.price, CHILD_SHARE
        at.drafted[index], at.sourced[index], at.chains[index] = drafted, link.has_sources != 0, link.takes_chains != 0
        at.works[index] = drafted and link.price < 1.0 and cap > 0
        waited = committed_len - link.activated_len
        at.answered[index] = drafted and (link.answered != 0 or waited > MOST_UNANSWERED)
        if drafted:
            at.shares[index] = a.drafters[link.drafter].child_share


@kernel
def serve(a: LinkArrays, trees: Any, rows: Ints, bases: Ints, drafter: int, has_distributions: bool) -> int:
    """Sets the rows of messages to NONE that are about sessions of others than a drafter.

    Args:
        trees: Of the forest.
        rows: int32 `[messages]`.
        bases: int32 `[messages]`, committed tokens that the drafter says it knew.
        has_distributions: Whether each guess has one, as a chain needs.

    Returns:
        The first message that cannot be of a drafter that follows its session, or NONE.
    """
    for index in range(len(rows)):
        if rows[index] == NONE or a.links[rows[index]].drafter != drafter:
            rows[index] = NONE
            continue
        tree = trees[rows[index]]
        if bases[index] < 1 or bases[index] > tree.committed_len or (tree.chain and not has_distributions):
            return index
    return NONE


@kernel
def lag(a: LinkArrays, trees: Any, rows: Ints) -> int:
    """Most committed tokens of a session since it was called that its drafter has not answered; none while it idles."""
    most = 0
    for index in range(len(rows)):
        link = a.links[rows[index]]
        if link.drafter != NONE and link.price < 1.0:
            known = max(link.answered_len, link.activated_len)
            most = max(most, trees[rows[index]].committed_len - known)
    return most

"""Histories of a client's requests and answers, event by event, and their faults; judged from histories alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise

GRPC = "grpc"
HTTP = "http"


class Kind(StrEnum):
    """Events of a client: it asked anew, had no place and was not begun, got something, has all, or nothing."""

    ASKED = "asked"
    REFUSED = "refused"
    PIECE = "piece"
    ENDED = "ended"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of a client.

    Attributes:
        at_s: When, in monotonic seconds.
        token_ids: New tokens; a door may bring text alone.
        text: New text.
        why: How it ended, or what made it fail.
    """

    kind: Kind
    at_s: float
    token_ids: tuple[int, ...] = ()
    text: str = ""
    why: str = ""


@dataclass(slots=True, kw_only=True)
class History:
    """All that happened to the client of one request.

    Attributes:
        index: Index of its request.
        door: Through which it came.
        events: In their order.
        prefill_s: Prefill time at the verifier that ended it; after a failover, the recomputed part.
        clock: Monotonic seconds.
    """

    index: int = 0
    door: str = GRPC
    events: list[Event] = field(default_factory=list)
    prefill_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter

    def note(self, kind: Kind, why: str = "", *, token_ids: Iterable[int] = (), text: str = "") -> None:
        """Adds what happens now."""
        self.events.append(Event(kind=kind, at_s=self.clock(), token_ids=tuple(token_ids), text=text, why=why))

    @property
    def pieces(self) -> list[Event]:
        """Pieces that have come."""
        return [event for event in self.events if event.kind is Kind.PIECE]

    @property
    def token_ids(self) -> list[int]:
        """All tokens; none where the door brings text alone."""
        return [token_id for event in self.pieces for token_id in event.token_ids]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(event.text for event in self.pieces)

    @property
    def last(self) -> Kind | None:
        """The last event; None: nothing yet."""
        return self.events[-1].kind if self.events else None

    @property
    def error(self) -> str:
        """Why it failed; empty: it did not."""
        return self.events[-1].why if self.last is Kind.FAILED else ""

    @property
    def whole(self) -> bool:
        """Whether the answer has come to its end."""
        return self.last is Kind.ENDED

    @property
    def never_begun(self) -> bool:
        """Whether it was refused to the last, so that nobody owes it an answer."""
        return self.last is Kind.REFUSED and not self.pieces

    def pause_after(self, at_s: float, within_s: float = 0.25) -> float | None:
        """The longest gap between pieces that began at most `within_s` after a time; None if it did not run then."""
        times_s = [event.at_s for event in self.pieces]
        around = [end - start for start, end in pairwise(times_s) if start <= at_s + within_s and end > at_s]
        return max(around, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Faults of histories; all 0 is none.

    Attributes:
        lost: Tokens that never came; characters, of texts that come without tokens.
        doubled: Tokens that came and should not have, or not again.
        changed: Tokens that came instead of others.
        unanswered: Requests that were taken and did not get their whole answer.
        disordered: Histories that cannot be: something before the question, after the end, or out of its place.
    """

    lost: int = 0
    doubled: int = 0
    changed: int = 0
    unanswered: int = 0
    disordered: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return self == Verdict()

    def __add__(self, other: Verdict) -> Verdict:
        """Returns both together."""
        return Verdict(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


def judge(histories: Iterable[History], reference: Sequence[History]) -> Verdict:
    """Compares histories with those of undisturbed requests.

    Args:
        histories: Histories of clients that gave up or ended.
        reference: By the index of the request, each whole.
    """
    return sum((judge_one(history, reference[history.index]) for history in histories), Verdict())


def judge_one(history: History, wanted: History) -> Verdict:
    """Compares one history with an undisturbed one of the same request."""
    owed = not (history.whole or history.never_begun)
    verdict = Verdict(unanswered=int(owed), disordered=int(not in_order(history)))
    if history.token_ids or not history.text:
        verdict += _compared(history.token_ids, wanted.token_ids, whole=history.whole)
        if not verdict.clean:
            return verdict
    # Right tokens with a wrong text are no right answer either.
    return verdict + _compared(history.text, wanted.text, whole=history.whole)


def _compared(got: Sequence[object], wanted: Sequence[object], *, whole: bool) -> Verdict:
    """How one sequence differs from another; of one that is not whole only what has come counts."""
    same = _num_same(got, wanted)
    if not whole:
        return Verdict(changed=len(got) - same)
    got, wanted = got[same:], wanted[same:]
    same = _num_same(got[::-1], wanted[::-1])
    extra, missing = len(got) - same, len(wanted) - same
    changed = min(extra, missing)
    return Verdict(lost=missing - changed, doubled=extra - changed, changed=changed)


def _num_same(a: Sequence[object], b: Sequence[object]) -> int:
    """Entries at the beginning in which both agree."""
    return next((count for count, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def in_order(history: History) -> bool:
    """Whether events follow one another as they can."""
    asked, over, at_s = False, False, float("-inf")
    for event in history.events:
        if over or event.at_s < at_s or (not asked and event.kind is not Kind.ASKED):
            return False
        asked = event.kind is not Kind.REFUSED
        over = event.kind in (Kind.ENDED, Kind.FAILED)
        at_s = event.at_s
    return True

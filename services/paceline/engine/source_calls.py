"""Calls the sources inside the verifier for guesses once a step has committed its tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from paceline.core.acceptance_rules import rule_of
from paceline.core.draft_policy import Goodput
from paceline.core.goodput import LEAST_SURVIVAL, MovingAverage, num_tried
from paceline.core.messages import GenerateRequest
from paceline.core.params import REJECTION
from paceline.core.source_record import Gain, SourceRecord
from paceline.core.target_events import StepReport
from paceline.engine.source_interface import AnySource, Turn
from paceline.engine.target_session import TargetSession
from paceline.forest import Forest, Ints, rows_of

logger = logging.getLogger(__name__)

_gain_of = attrgetter("gain")


# Not frozen, and made by position: a step makes one for each of its sessions.
@dataclass(slots=True)
class _Candidate:
    """A session that a costly source may be called for; it has `held` expected draft tokens in hand, and gains some."""

    session: TargetSession
    known: Gain
    held: float
    gain: float


class SourceCalls:
    """All sources of an engine, each called for the sessions where that pays.

    Args:
        sources: Called in the order of what they bring a second.
        policy: Decides what guesses are worth.
        default_rule: Acceptance rule of requests that name none.
        clock: Seconds, monotonic.
        forest: The trees of all sessions.
    """

    def __init__(
        self,
        sources: Sequence[AnySource],
        policy: Goodput,
        default_rule: str,
        clock: Callable[[], float],
        forest: Forest,
    ) -> None:
        self._sources = sources
        self._default_rule = default_rule
        self._policy = policy
        self._clock = clock
        self._forest = forest
        self._records = {source.name: SourceRecord() for source in sources}
        self._sessions: list[TargetSession] = []
        self._usual_step: MovingAverage | None = None

    @property
    def names(self) -> Collection[str]:
        return self._records

    def sources_of(self, request: GenerateRequest) -> list[AnySource]:
        """Those that a request lets draft."""
        speculation = request.speculation
        if rule_of(speculation, self._default_rule) == REJECTION:
            # It needs the distribution of every guess, and only drafters send it.
            return []
        methods = speculation.methods or [source.name for source in self._sources]
        return [source for source in self._sources if speculation.cap and source.name in methods]

    def add(self, session: TargetSession) -> None:
        """A session got tokens in this step, and goes on."""
        self._sessions.append(session)

    def grow(self, report: StepReport, seconds: float) -> None:
        """Has guesses added to the trees of the sessions of this step, which has taken `seconds` so far."""
        sessions, self._sessions = self._sessions, []
        if not sessions or not self._policy.drafts:
            return
        if self._usual_step is None:
            self._usual_step = MovingAverage(seconds)
        if not report.num_prefill_rows:
            self._usual_step.add(seconds)
        for source in sorted(self._sources, key=lambda each: -self._records[each.name].merit):
            self._ask_where_it_pays(source, sessions, self._usual_step.value, report)

    def _ask(self, source: AnySource, sessions: Sequence[TargetSession]) -> None:
        least, caps = self._policy.least_survival, self._caps(sessions).tolist()
        turns = [
            Turn(follower=session.followers[source.name], tree=session.tree, limit=cap, least=least)
            for session, cap in zip(sessions, caps, strict=True)
        ]
        try:
            if turns:
                source.grow(turns)
        except MemoryError as error:
            # It costs guesses, and no session.
            logger.warning("%s finds no room in the device's memory", source.name, exc_info=error)

    def _ask_where_it_pays(
        self, source: AnySource, sessions: Sequence[TargetSession], step_s: float, report: StepReport
    ) -> None:
        record = self._records[source.name]
        if not record.begin_step():
            return
        held = self._in_hand(sessions)
        served = (self._caps(sessions) > 0) & self._forest.links.may_wait(_rows_of(sessions))
        candidates = [
            self._candidate(source, record, session, in_hand_now)
            for session, in_hand_now, is_served in zip(sessions, held, served.tolist(), strict=True)
            if source.name in session.followers and is_served
        ]
        if not candidates:
            return
        candidates.sort(key=_gain_of, reverse=True)
        count = self._num_asked(record, candidates, len(sessions) + sum(held), step_s)
        if count:
            self._call(source, record, candidates[:count], report)
        else:
            record.was_worth_none()
        for each in candidates[count:]:
            record.left_out(each.known, each.held)

    @staticmethod
    def _candidate(source: AnySource, record: SourceRecord, session: TargetSession, held: float) -> _Candidate:
        known = session.gains.get(source.name)
        if known is None:
            known = session.gains[source.name] = record.new_session()
        return _Candidate(session, known, held, known.of(held))

    def _num_asked(self, record: SourceRecord, candidates: Sequence[_Candidate], expected: float, step_s: float) -> int:
        gains = [each.gain for each in candidates]
        count = self._policy.num_asked(gains, expected=expected, step_s=step_s, call_s=record.call_s)
        some = num_tried(len(gains))
        return some if not count and record.is_due(some, self._clock()) else count

    def _call(
        self, source: AnySource, record: SourceRecord, candidates: Sequence[_Candidate], report: StepReport
    ) -> None:
        started_s = self._clock()
        self._ask(source, [each.session for each in candidates])
        now_s = self._clock()
        record.called(len(candidates), seconds=now_s - started_s, now_s=now_s)
        for each, held in zip(candidates, self._in_hand([each.session for each in candidates]), strict=True):
            record.gained(each.known, each.held, held - each.held)
        report.asked_of[source.name] += len(candidates)
        report.asked_s[source.name] = now_s - started_s

    def _in_hand(self, sessions: Sequence[TargetSession]) -> list[float]:
        """Draft tokens that trees are worth: what their best survivals are above the price of their rows."""
        price = max(LEAST_SURVIVAL, self._policy.least_survival)
        best = self._forest.best(_rows_of(sessions), self._caps(sessions))
        worth: list[float] = np.maximum(best.survivals - price, 0.0).sum(axis=1).tolist()
        return worth

    def _caps(self, sessions: Sequence[TargetSession]) -> Ints:
        return self._forest.links.caps(_rows_of(sessions), self._policy.max_nodes)


def _rows_of(sessions: Sequence[TargetSession]) -> Ints:
    return rows_of(session.tree.row for session in sessions)

"""While steps verify guesses, calls all sources inside the verifier once a step has committed its tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from paceline.core.acceptance import rule_of
from paceline.core.draft_policy import Goodput
from paceline.core.messages import GenerateRequest
from paceline.core.params import REJECTION
from paceline.core.target_events import StepReport
from paceline.engine.source_interface import AnySource, Turn
from paceline.engine.target_session import TargetSession
from paceline.forest import Forest, rows_of

logger = logging.getLogger(__name__)


class SourceCalls:
    """All sources of an engine; whether they pay is measured, beside drafters and without them (`Goodput`).

    Args:
        sources: Called in this order.
        policy: Says whether steps verify guesses, and what one must be worth.
        default_rule: Acceptance rule of requests that name none.
        clock: Seconds, monotonic.
        forest: The trees of all sessions.

    Attributes:
        need_device: Whether one of them computes where the model is.
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
        self.need_device = any(source.needs_device for source in sources)
        self._sessions: list[TargetSession] = []

    @property
    def names(self) -> Collection[str]:
        return [source.name for source in self._sources]

    def sources_of(self, request: GenerateRequest) -> list[AnySource]:
        """Sources that a request lets draft."""
        speculation = request.speculation
        if rule_of(speculation, self._default_rule) == REJECTION:
            # It needs the distribution of every guess, and only drafters send it.
            return []
        methods = speculation.methods or [source.name for source in self._sources]
        return [source for source in self._sources if speculation.cap and source.name in methods]

    @property
    def has_work(self) -> bool:
        """Whether some are to be asked."""
        return bool(self._sessions)

    def add(self, sessions: Sequence[TargetSession]) -> None:
        """These sessions got tokens in this step."""
        if self._sources and self._policy.guesses:
            self._sessions += [each for each in sessions if not each.ended]

    def grow(self, report: StepReport) -> None:
        """Has guesses added to the trees of the sessions of this step."""
        sessions, self._sessions = self._sessions, []
        if not sessions:
            return
        links, rows = self._forest.links, rows_of([session.tree.row for session in sessions])
        caps = (links.standing(rows, self._policy.max_nodes).caps * links.may_wait(rows)).tolist()
        for source in self._sources:
            name = source.name
            asked = [
                (session, cap) for session, cap in zip(sessions, caps, strict=True) if cap and name in session.followers
            ]
            if asked:
                self._ask(source, asked, report)

    def _ask(self, source: AnySource, asked: Sequence[tuple[TargetSession, int]], report: StepReport) -> None:
        started_s, name, least = self._clock(), source.name, self._policy.least_survival
        turns = [
            Turn(follower=follower, tree=session.tree, limit=cap, least=least)
            for session, cap in asked
            if source.may_guess(follower := session.followers[name])
        ]
        try:
            if turns:
                source.grow(turns)
        except MemoryError as error:
            # It costs guesses, and no session.
            logger.warning("%s finds no room in the device's memory", name, exc_info=error)
        report.count("paceline:source_turns", name, by=len(asked))
        report.count("paceline:source_seconds", name, by=self._clock() - started_s)

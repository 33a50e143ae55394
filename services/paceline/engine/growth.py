"""Asks the sources inside the verifier for guesses once a step has committed its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from paceline.core.allocator import Allocator
from paceline.core.messages import GenerateRequest
from paceline.core.params import CHAIN_RULES
from paceline.core.rules import Rules
from paceline.engine.sources import AnySource, Follower, Turn
from paceline.engine.target_session import TargetSession


class Growth:
    """All sources of an engine.

    Args:
        sources: In the order in which they are asked.
        allocator: Says what guesses are worth.
        rules: Acceptance rules.
    """

    def __init__(self, sources: Sequence[AnySource], allocator: Allocator, rules: Rules) -> None:
        self._sources = sources
        self._rules = rules
        self._allocator = allocator
        self._sessions: list[TargetSession] = []

    def sources_of(self, request: GenerateRequest) -> list[AnySource]:
        """Those that a request lets draft."""
        speculation = request.speculation
        if self._rules.of(speculation).name in CHAIN_RULES:
            # These rules need the distribution of every guess, and only drafters send it.
            return []
        methods = speculation.methods or [source.name for source in self._sources]
        return [source for source in self._sources if speculation.cap and source.name in methods]

    def add(self, session: TargetSession) -> None:
        """A session got tokens in this step, and goes on."""
        self._sessions.append(session)

    def grow(self) -> None:
        """Has guesses hung into the trees of the sessions of this step."""
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.own_survivals = []
        for source in self._sources if self._allocator.least_survival < 1.0 else ():
            self._ask(source, [session for session in sessions if source.name in session.followers])

    def _ask(self, source: AnySource, sessions: Sequence[TargetSession]) -> None:
        turns = [(session, self._turn(source, session)) for session in sessions if self._cap(session)]
        grown = source.grow([turn for _, turn in turns]) if turns else ()
        for (session, _), survivals in zip(turns, grown, strict=True):
            # Sources guess the same tokens more often than not: the surer one counts, rank by rank.
            pairs = zip_longest(session.own_survivals, survivals, fillvalue=0.0)
            session.own_survivals = [max(pair) for pair in pairs]

    def _turn(self, source: AnySource, session: TargetSession) -> Turn[Follower]:
        return Turn(
            follower=session.followers[source.name],
            tree=session.draft.tree,
            limit=self._cap(session),
            least=self._allocator.least_survival,
        )

    def _cap(self, session: TargetSession) -> int:
        return min(session.cap(), self._allocator.max_nodes)

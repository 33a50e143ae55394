"""The drafter tier as a target engine sees it: links that are up, what they say, and what they are still to be told.

It knows sessions and messages as plain values, never a socket; it runs in the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.core.errors import RemoteProtocolError
from paceline.core.messages import (
    CloseSession,
    CommittedStates,
    DraftNodes,
    LaggingSession,
    OpenSession,
    ToDrafter,
    ToVerifier,
)
from paceline.core.pace import LinkPace
from paceline.core.params import DRAFT_MODEL, EAGLE3
from paceline.engine.kv import KVCache
from paceline.engine.states import StateLayout
from paceline.engine.target_events import DraftsArrived, LinkChanged, StepReport
from paceline.engine.target_session import TargetSession

# Hidden states that a step hands to drafters at most, far within one message; and what a number of them takes.
STATE_BYTES, WIRE_BYTES = 4 * 1024 * 1024, 2
# A drafter that was called back may leave so many tokens of a session unanswered while it reads what it was not told;
# after that it counts as one that has nothing to say.
MOST_UNANSWERED = 64


@dataclass(slots=True, kw_only=True)
class _Link:
    """A drafter whose stream is up.

    Attributes:
        wants_states: Whether it drafts from hidden states.
        pace: How fast it answers.
    """

    wants_states: bool
    pace: LinkPace = field(default_factory=LinkPace)

    @property
    def source(self) -> str:
        """The method that its guesses are known by."""
        return EAGLE3 if self.wants_states else DRAFT_MODEL


class DrafterTier:
    """All drafters of an engine.

    Args:
        vocab_size: Of the target.
        cache: Where hidden states lie.
        layout: What they are made of.
        clock: Seconds, monotonic.
    """

    def __init__(self, vocab_size: int, cache: KVCache, layout: StateLayout, clock: Callable[[], float]) -> None:
        self._vocab_size = vocab_size
        self._cache = cache
        self._width = layout.fused_width
        self._clock = clock
        self._links: dict[str, _Link] = {}
        self._outgoing: dict[str, list[ToDrafter]] = {}
        self._broken: dict[str, RemoteProtocolError] = {}
        self._answered: list[TargetSession] = []

    @property
    def has_work(self) -> bool:
        """True while something is left to say, or a link to be reported as broken."""
        return bool(self._outgoing or self._broken)

    def drafts_for(self, session: TargetSession) -> bool:
        """Whether the session has a drafter, and its link is up."""
        return session.drafter_address in self._links

    def pace_of(self, session: TargetSession) -> LinkPace | None:
        """How fast the session's drafter answers; None without one."""
        link = self._links.get(session.drafter_address)
        return None if link is None else link.pace

    def change(self, event: LinkChanged, sessions: Mapping[str, TargetSession]) -> None:
        """A drafter was reached, and its sessions are opened anew, or lost."""
        if not event.up:
            self._links.pop(event.address, None)
            return
        self._links[event.address] = _Link(wants_states=event.wants_states)
        for session in sessions.values():
            if session.drafter_address == event.address:
                session.told_len = 0
                self.tell(session)

    def say(self, session: TargetSession, message: ToDrafter) -> None:
        """Queues a message for the session's drafter, if there is one."""
        if self.drafts_for(session):
            self._outgoing.setdefault(session.drafter_address, []).append(message)

    def receive(self, event: DraftsArrived, sessions: Mapping[str, TargetSession], report: StepReport) -> None:
        """Takes in what a drafter said; one that breaks the protocol is heard no more."""
        link = self._links.get(event.address)
        if link is None:
            return
        link.pace.silent = False
        try:
            for message in event.messages:
                session = sessions.get(message.session_id)
                if session is not None and session.drafter_address == event.address:
                    self._receive_one(session, message, event.arrived_s, link, report)
        except RemoteProtocolError as error:
            self._broken[event.address] = error
            self._links.pop(event.address, None)

    def _receive_one(
        self, session: TargetSession, message: ToVerifier, arrived_s: float, link: _Link, report: StepReport
    ) -> None:
        match message:
            case DraftNodes():
                self._graft(session, message, arrived_s, link, report)
            case LaggingSession() if session not in self._answered:
                # Once a step is enough; a drafter that asks more often gets no more work out of us.
                self._answered.append(session)
                answer = session.draft.catch_up(message)
                if isinstance(answer, OpenSession):
                    session.told_states = 0
                if answer is not None:
                    session.told_len = session.draft.committed_len
                    self.say(session, answer)
            case LaggingSession():
                pass

    def _graft(
        self, session: TargetSession, message: DraftNodes, arrived_s: float, link: _Link, report: StepReport
    ) -> None:
        known = [node for node in message.nodes if node.within(self._vocab_size)]
        num_strange = len(message.nodes) - len(known)
        outcome = session.draft.receive(replace(message, nodes=tuple(known)) if num_strange else message, link.source)
        num_lost = outcome.num_late + outcome.num_stale + num_strange
        if num_lost:
            report.late_by[link.source] += num_lost
        if message.epoch != session.draft.epoch or not message.nodes:
            return
        session.heard_len = max(session.heard_len, message.base_len)
        session.answered = True
        round_trip_s = session.answers.heard(message.base_len, arrived_s, link.pace)
        if round_trip_s is not None:
            report.round_trips_s.append(round_trip_s)
            if message.base_len == session.draft.committed_len:
                tree = session.draft.tree
                link.pace.heard_guess(max(map(tree.survival, tree.root.children.values()), default=0.0))

    def answers(self, session: TargetSession) -> bool:
        """Whether the session's drafter has answered since it was called, or should have."""
        waited = session.draft.committed_len - session.called_len
        return self.drafts_for(session) and (session.answered or waited > MOST_UNANSWERED)

    def tell(self, session: TargetSession) -> None:
        """Tells a session's drafter what it does not know yet; at rest it is told that, and no more."""
        draft = session.draft
        rests = draft.price >= 1.0
        if rests or not session.told_len:
            session.answered, session.called_len = False, draft.committed_len
            session.answers.stop()
        if rests and (session.told_price >= 1.0 or not session.told_len):
            return
        self.say(session, draft.commit_message(session.told_len) if session.told_len else session.open())
        session.told_len, session.told_price = draft.committed_len, draft.price
        if not rests:
            session.answers.ask(draft.committed_len, self._clock())

    def part(self, session: TargetSession) -> None:
        """Closes a session at its drafter, which need know of it no more."""
        if session.told_len:
            self.say(session, CloseSession(session_id=session.draft.session_id, epoch=session.draft.epoch))
        session.told_len = 0

    def tell_states(self, sessions: Sequence[TargetSession]) -> None:
        """Hands hidden states to drafters that draft from them, so many bytes a step; the rest follows."""
        left = STATE_BYTES // max(1, WIRE_BYTES * self._width)
        for session in sessions:
            link = self._links.get(session.drafter_address)
            if link is None or not link.wants_states:
                continue
            positions = session.next_states(left)
            left -= len(positions)
            if positions:
                self.say(session, self._states(session, positions))

    def _states(self, session: TargetSession, positions: range) -> CommittedStates:
        slots = torch.tensor([session.pages.slot(position) for position in positions])
        states = self._cache.states[slots.to(self._cache.device), : self._width]
        values = states.to(device="cpu", dtype=torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
        return CommittedStates(
            session_id=session.draft.session_id,
            epoch=session.draft.epoch,
            start=positions.start,
            width=self._width,
            values=values,
        )

    def lag_tokens(self, sessions: Sequence[TargetSession]) -> int:
        """Committed tokens that a drafter has not answered, of the session where these are most."""
        return max((each.lag_tokens for each in sessions if self.drafts_for(each)), default=0)

    def take(self) -> tuple[dict[str, list[ToDrafter]], dict[str, RemoteProtocolError]]:
        """What is to be said after a step, and the links that are to be reset."""
        to_drafters, self._outgoing = self._outgoing, {}
        broken, self._broken = self._broken, {}
        self._answered.clear()
        return to_drafters, broken

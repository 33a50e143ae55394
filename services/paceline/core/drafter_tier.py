"""The drafter tier as a verifier sees it: drafters whose streams are up, and the messages from and to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from paceline.core.errors import RemoteProtocolError
from paceline.core.link import ConnectedDrafter, SessionLink
from paceline.core.messages import DraftNodes, ToDrafter
from paceline.core.scheduled_session import ScheduledSession
from paceline.core.session import graft
from paceline.core.target_events import DraftsArrived, LinkChanged, StepReport
from paceline.core.tree import DraftTree

# Hidden states that a step hands to drafters at most, far within one message.
STATE_BYTES = 4 * 1024 * 1024


class LinkedSession(Protocol):
    """A session that a drafter may draft for."""

    session_id: str
    link: SessionLink
    tree: DraftTree

    def check(self, message: DraftNodes) -> bool:
        """See `VerifierSession.check`."""
        ...


class DrafterTier:
    """All drafters of an engine.

    Args:
        vocab_size: Of the target.
        state_bytes: Of the hidden states of one token, on the wire.
    """

    def __init__(self, vocab_size: int, state_bytes: int = 0) -> None:
        self._vocab_size = vocab_size
        self._states_a_step = STATE_BYTES // max(1, state_bytes)
        self._drafters: dict[str, ConnectedDrafter] = {}
        self._outgoing: dict[str, list[ToDrafter]] = {}
        self._broken: dict[str, RemoteProtocolError] = {}
        self._answered: list[LinkedSession] = []

    @property
    def has_work(self) -> bool:
        """True while messages are left to send, or a link is to be reported as broken."""
        return bool(self._outgoing or self._broken)

    def connect(self, session: LinkedSession) -> None:
        """A session begins, and its drafter may be up already."""
        drafter = self._drafters.get(session.link.address)
        if drafter is not None:
            session.link.connect(drafter)

    def pair(self, session: LinkedSession, address: str, now_s: float) -> None:
        """Closes a session at its drafter, and opens it at another."""
        self.queue(session.link.address, session.link.pair(address, self._drafters.get(address)))
        self.update(session, now_s)

    def part(self, session: LinkedSession) -> None:
        """Closes a session at its drafter."""
        self.queue(session.link.address, session.link.close())

    def change(self, event: LinkChanged, sessions: Mapping[str, LinkedSession], now_s: float) -> None:
        """A drafter was reached, and its sessions are opened anew, or lost."""
        if not event.up:
            self._lose(event.address, sessions)
            return
        drafter = self._drafters[event.address] = ConnectedDrafter(wants_states=event.wants_states)
        for session in _of(event.address, sessions):
            session.link.connect(drafter)
            self.update(session, now_s)

    def _lose(self, address: str, sessions: Mapping[str, LinkedSession]) -> None:
        self._drafters.pop(address, None)
        for session in _of(address, sessions):
            session.link.disconnect()

    def receive(self, event: DraftsArrived, sessions: Mapping[str, LinkedSession], report: StepReport) -> None:
        """Takes in a drafter's messages; the link to one that breaks the protocol is reset."""
        drafter = self._drafters.get(event.address)
        if drafter is None:
            return
        drafter.silent = False
        drafts: list[tuple[LinkedSession, DraftNodes]] = []
        try:
            for message in event.messages:
                session = sessions.get(message.session_id)
                if session is None or session.link.drafter is not drafter:
                    continue
                if isinstance(message, DraftNodes):
                    self._collect(session, message, drafter.source, drafts, report)
                elif session not in self._answered:
                    # An answer may begin the tree anew.
                    self._graft(drafts, drafter.source, event.arrived_s, report)
                    # One answer a step is enough: a drafter cannot make us work by asking more often.
                    self._answered.append(session)
                    self.queue(session.link.address, session.link.catch_up(message))
        except RemoteProtocolError as error:
            self._broken[event.address] = error
        self._graft(drafts, drafter.source, event.arrived_s, report)
        if event.address in self._broken:
            self._lose(event.address, sessions)

    def _collect(
        self,
        session: LinkedSession,
        message: DraftNodes,
        source: str,
        drafts: list[tuple[LinkedSession, DraftNodes]],
        report: StepReport,
    ) -> None:
        """Adds a message to those to be taken in, as far as it is of use."""
        num_known = 0
        if session.check(message):
            known = [node for node in message.nodes if node.within(self._vocab_size)]
            num_known = len(known)
            whole = num_known == len(message.nodes)
            drafts.append((session, message if whole else replace(message, nodes=tuple(known))))
        if num_known < len(message.nodes):
            report.late_by[source] += len(message.nodes) - num_known

    @staticmethod
    def _graft(
        drafts: list[tuple[LinkedSession, DraftNodes]], source: str, arrived_s: float, report: StepReport
    ) -> None:
        """Takes messages in, all at once but for those of sessions that look at each guess."""
        alone = [[each] for each in drafts if each[0].tree.looks_at_guesses]
        together = [each for each in drafts if not each[0].tree.looks_at_guesses]
        drafts.clear()
        for batch in (*alone, together) if together else alone:
            grafts = graft(batch[0][0].tree.forest, source, batch)
            if num_lost := int(grafts.counts[:, 1:].sum()):
                report.late_by[source] += num_lost
            for (session, message), first in zip(batch, grafts.firsts.tolist(), strict=True):
                round_trip_s = session.link.take_in(message, first, arrived_s)
                if round_trip_s is not None:
                    report.round_trips_s.append(round_trip_s)

    def update(self, session: LinkedSession, now_s: float) -> None:
        """Queues what a session's drafter does not know yet."""
        self.queue(session.link.address, session.link.next_message(now_s))

    def queue(self, address: str, message: ToDrafter | None) -> None:
        """Queues a message for a drafter, if there is one to send."""
        if message is not None:
            self._outgoing.setdefault(address, []).append(message)

    def next_states(self, sessions: Iterable[ScheduledSession]) -> list[tuple[ScheduledSession, range]]:
        """Positions whose hidden states go out, to drafters that use them; at most `STATE_BYTES` a step."""
        left = self._states_a_step
        due: list[tuple[ScheduledSession, range]] = []
        for session in sessions:
            if session.link.drafter is None or not session.link.drafter.wants_states:
                continue
            positions = session.link.next_states(session.pages.num_computed, left)
            left -= len(positions)
            if positions:
                due.append((session, positions))
        return due

    def take(self) -> tuple[dict[str, list[ToDrafter]], dict[str, RemoteProtocolError]]:
        """Messages to send after a step, and the links that are to be reset."""
        to_drafters, self._outgoing = self._outgoing, {}
        broken, self._broken = self._broken, {}
        self._answered.clear()
        return to_drafters, broken


def _of(address: str, sessions: Mapping[str, LinkedSession]) -> list[LinkedSession]:
    return [session for session in sessions.values() if session.link.address == address]

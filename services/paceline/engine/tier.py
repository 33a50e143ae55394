"""The drafter tier as a target engine sees it: links that are up, what they say, and what they are still to be told.

It knows sessions and messages as plain values, never a socket; it runs in the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from paceline.core.errors import RemoteProtocolError
from paceline.core.link import Drafter
from paceline.core.messages import CommittedStates, DraftNodes, LaggingSession, ToDrafter, ToVerifier
from paceline.engine.kv import KVCache
from paceline.engine.states import StateLayout
from paceline.engine.target_events import DraftsArrived, LinkChanged, StepReport
from paceline.engine.target_session import TargetSession

# Hidden states that a step hands to drafters at most, far within one message; and what a number of them takes.
STATE_BYTES, WIRE_BYTES = 4 * 1024 * 1024, 2


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
        self._drafters: dict[str, Drafter] = {}
        self._outgoing: dict[str, list[ToDrafter]] = {}
        self._broken: dict[str, RemoteProtocolError] = {}
        self._answered: list[TargetSession] = []

    @property
    def has_work(self) -> bool:
        """True while something is left to say, or a link to be reported as broken."""
        return bool(self._outgoing or self._broken)

    def connect(self, session: TargetSession) -> None:
        """A session begins, and its drafter may be up already."""
        drafter = self._drafters.get(session.link.address)
        if drafter is not None:
            session.link.connect(drafter)

    def pair(self, session: TargetSession, address: str) -> None:
        """Closes a session at its drafter, and opens it at another."""
        self._queue(session.link.address, session.link.pair(address, self._drafters.get(address)))
        self.tell(session)

    def part(self, session: TargetSession) -> None:
        """Closes a session at its drafter."""
        self._queue(session.link.address, session.link.close())

    def change(self, event: LinkChanged, sessions: Mapping[str, TargetSession]) -> None:
        """A drafter was reached, and its sessions are opened anew, or lost."""
        if not event.up:
            self._lose(event.address, sessions)
            return
        drafter = self._drafters[event.address] = Drafter(wants_states=event.wants_states)
        for session in _of(event.address, sessions):
            session.link.connect(drafter)
            self.tell(session)

    def _lose(self, address: str, sessions: Mapping[str, TargetSession]) -> None:
        self._drafters.pop(address, None)
        for session in _of(address, sessions):
            session.link.disconnect()

    def receive(self, event: DraftsArrived, sessions: Mapping[str, TargetSession], report: StepReport) -> None:
        """Takes in what a drafter said; one that breaks the protocol is heard no more."""
        drafter = self._drafters.get(event.address)
        if drafter is None:
            return
        drafter.silent = False
        try:
            for message in event.messages:
                session = sessions.get(message.session_id)
                if session is not None and session.link.drafter is drafter:
                    self._receive_one(session, message, event.arrived_s, report)
        except RemoteProtocolError as error:
            self._broken[event.address] = error
            self._lose(event.address, sessions)

    def _receive_one(self, session: TargetSession, message: ToVerifier, arrived_s: float, report: StepReport) -> None:
        match message:
            case DraftNodes():
                self._graft(session, message, arrived_s, report)
            case LaggingSession() if session not in self._answered:
                # Once a step is enough; a drafter that asks more often gets no more work out of us.
                self._answered.append(session)
                self._queue(session.link.address, session.link.catch_up(message))
            case LaggingSession():
                pass

    def _graft(self, session: TargetSession, message: DraftNodes, arrived_s: float, report: StepReport) -> None:
        known = [node for node in message.nodes if node.within(self._vocab_size)]
        num_strange = len(message.nodes) - len(known)
        if num_strange:
            message = replace(message, nodes=tuple(known))
        outcome, round_trip_s = session.link.receive(message, arrived_s)
        num_lost = outcome.num_late + outcome.num_stale + num_strange
        if num_lost and session.link.drafter is not None:
            report.late_by[session.link.drafter.source] += num_lost
        if round_trip_s is not None:
            report.round_trips_s.append(round_trip_s)

    def tell(self, session: TargetSession) -> None:
        """Tells a session's drafter what it does not know yet."""
        self._queue(session.link.address, session.link.tell(self._clock()))

    def _queue(self, address: str, message: ToDrafter | None) -> None:
        if message is not None:
            self._outgoing.setdefault(address, []).append(message)

    def tell_states(self, sessions: Sequence[TargetSession]) -> None:
        """Hands hidden states to drafters that draft from them, so many bytes a step; the rest follows."""
        left = STATE_BYTES // max(1, WIRE_BYTES * self._width)
        for session in sessions:
            if session.link.drafter is None or not session.link.drafter.wants_states:
                continue
            positions = session.link.next_states(session.pages.num_computed, left)
            left -= len(positions)
            if positions:
                self._queue(session.link.address, self._states(session, positions))

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

    def take(self) -> tuple[dict[str, list[ToDrafter]], dict[str, RemoteProtocolError]]:
        """What is to be said after a step, and the links that are to be reset."""
        to_drafters, self._outgoing = self._outgoing, {}
        broken, self._broken = self._broken, {}
        self._answered.clear()
        return to_drafters, broken


def _of(address: str, sessions: Mapping[str, TargetSession]) -> list[TargetSession]:
    return [session for session in sessions.values() if session.link.address == address]

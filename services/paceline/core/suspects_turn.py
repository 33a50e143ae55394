"""Whose turn the next step is: a suspect's alone, or that of all sessions that are none.

A step that a suspect ends is its own, it waits for nobody for ever, and nobody for it. Its gateway hears before that it
is computed now: a process that dies says nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from paceline.core.scheduled_session import ScheduledSession

# Longest wait until a suspect's gateway has heard that it is computed.
HEARD_S = 1.0


SessionT = TypeVar("SessionT", bound=ScheduledSession)


class Turns(Generic[SessionT]):
    """Which of the running sessions a step is planned over.

    Attributes:
        called_up: The suspect whose turn it is, if any; its gateway is to hear that it runs now.
    """

    def __init__(self) -> None:
        self.called_up: SessionT | None = None
        self._was_alone = False

    def next(self, running: Sequence[SessionT], now_s: float) -> Sequence[SessionT]:
        """Returns the sessions to compute; none while a suspect's gateway is yet to hear of it, and nobody else runs.

        Args:
            running: Those that have a place, in the order of their arrival.
            now_s: The time.
        """
        self.called_up = suspect = _next_suspect(running)
        if suspect is None:
            return running
        suspect.call_up(now_s)
        others = [session for session in running if not session.is_suspect]
        self._was_alone = _heard_in_s(suspect, now_s) <= 0.0 and not (self._was_alone and others)
        return [suspect] if self._was_alone else others


def _next_suspect(running: Sequence[SessionT]) -> SessionT | None:
    """The suspect that is computed before all other suspects."""
    return next((session for session in running if session.is_suspect), None)


def pause_s(running: Sequence[ScheduledSession], now_s: float) -> float:
    """Seconds with nothing to compute: a suspect's gateway is yet to hear of it, and nobody else runs."""
    suspect = _next_suspect(running)
    if suspect is None or not all(session.is_suspect for session in running):
        return 0.0
    return _heard_in_s(suspect, now_s)


def _heard_in_s(suspect: ScheduledSession, now_s: float) -> float:
    """Seconds that are left for its gateway to hear that it is computed now."""
    if suspect.heard or suspect.called_up_s is None:
        return 0.0
    return max(0.0, HEARD_S - (now_s - suspect.called_up_s))

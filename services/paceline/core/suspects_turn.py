"""Whose turn the next step is: that of a suspect alone, or that of all sessions that are not suspects.

A suspect ran in an engine that died, so it may end this one too; a step that it ends is its own. Suspects and others
take turns, so neither delays the other without end. Its gateway learns that it runs before it does: a process that
dies sends nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from paceline.core.scheduled_session import ScheduledSession

# Longest wait until a suspect's gateway knows that it runs.
HEARD_S = 1.0

SessionT = TypeVar("SessionT", bound=ScheduledSession)


class Suspect(Protocol):
    """What decides when a suspect may run.

    Attributes:
        heard: Whether its gateway knows that its turn has come.
        called_up_s: When it came; None before.
    """

    heard: bool
    called_up_s: float | None


def heard_in_s(suspect: Suspect, now_s: float) -> float:
    """Seconds for which a suspect whose turn has come still waits, so that its gateway learns of it."""
    if suspect.heard or suspect.called_up_s is None:
        return 0.0
    return max(0.0, HEARD_S - (now_s - suspect.called_up_s))


class Turns(Generic[SessionT]):
    """Which of the running sessions a step is planned over.

    Attributes:
        called_up: The suspect whose turn it is, if any; its gateway is to learn that it runs now.
    """

    def __init__(self) -> None:
        self.called_up: SessionT | None = None
        self._was_alone = False

    def next(self, running: Sequence[SessionT], now_s: float) -> Sequence[SessionT]:
        """Returns the sessions to compute; none while a suspect waits for its gateway and nobody else runs.

        Args:
            running: Those that have a place, in the order of their arrival.
            now_s: The time.
        """
        self.called_up = suspect = _next_suspect(running)
        if suspect is None:
            return running
        suspect.call_up(now_s)
        others = [session for session in running if not session.is_suspect]
        self._was_alone = heard_in_s(suspect, now_s) <= 0.0 and not (self._was_alone and others)
        return [suspect] if self._was_alone else others


def pause_s(running: Sequence[ScheduledSession], now_s: float) -> float:
    """Seconds with nothing to compute: a suspect waits for its gateway, and nobody else runs."""
    suspect = _next_suspect(running)
    if suspect is None or not all(session.is_suspect for session in running):
        return 0.0
    return heard_in_s(suspect, now_s)


def _next_suspect(running: Sequence[SessionT]) -> SessionT | None:
    """The suspect that runs before all other suspects."""
    return next((session for session in running if session.is_suspect), None)

"""Who sent the request that a task serves: known by name at the doors, asked for where sessions are made.

It knows no keys: these end at the doors.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request.

    Attributes:
        name: The API key's name; empty where no keys are asked for.
        max_sessions: Most sessions of this caller at once; None: no limit of its own.
        num_keys: Callers there could be, this one included.
    """

    name: str = ""
    max_sessions: int | None = None
    num_keys: int = 1


ANYONE = Caller()

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYONE)


def current_caller() -> Caller:
    """Returns who sent the request that this task serves."""
    return _caller.get()


def become(caller: Caller) -> None:
    """Makes a caller the current one, for the rest of this task."""
    _caller.set(caller)

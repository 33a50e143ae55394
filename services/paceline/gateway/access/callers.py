"""Who sent the request that a task serves: set at the doors, read where sessions are made. Keys stay at the doors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field


async def _nothing() -> None:
    """Gives nothing back, as nothing was counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request.

    Attributes:
        name: The API key's name; empty if the gateway asks for none.
        max_sessions: Most sessions of this caller at once; None: no limit of its own.
        num_keys: Callers that could exist, this one included.
        give_back: Takes back what the request has cost of the caller's rate.
    """

    name: str = ""
    max_sessions: int | None = None
    num_keys: int = 1
    give_back: Callable[[], Awaitable[None]] = field(default=_nothing, compare=False, repr=False)


ANYONE = Caller()

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYONE)


def current_caller() -> Caller:
    """Returns who sent the request that this task serves."""
    return _caller.get()


def become(caller: Caller) -> None:
    """Makes a caller the current one, for the rest of this task."""
    _caller.set(caller)

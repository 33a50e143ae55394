"""Sessions of columns one by one: what an engine, a verifier or a gateway's reader says of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from paceline.core.errors import PacelineError
from paceline.core.messages import (
    NO_EVENT,
    GenerateResult,
    PositionLogprobs,
    SessionEvent,
    SpeculationRecord,
    StepCommit,
)
from paceline.wire import LogPart
from paceline.wire.sessions import Received


class Step(NamedTuple):
    """What one message says of one session: its tokens, and the fields of the event beside them."""

    token_ids: tuple[int, ...] = ()
    origins: bytes = b""
    offset: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    result: GenerateResult | None = None
    lossy: bool = False
    running: bool = False
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_offset: int = 0
    speculation: SpeculationRecord | None = None

    @property
    def event(self) -> SessionEvent:
        return SessionEvent(*self[3:])


def said(outcomes: Iterable[tuple[int, Step | PacelineError]], **fields: Any) -> LogPart:
    """What a verifier says of some sessions."""
    part = LogPart(**fields)
    for number, each in outcomes:
        if isinstance(each, PacelineError):
            part.commit.errors[number] = each
            continue
        part.commit.add(number, each.offset, each.token_ids, each.origins)
        if each.event != NO_EVENT:
            part.commit.events[number] = each.event
    return part


def heard(read: Iterator[Received]) -> Iterator[tuple[int, Step | PacelineError]]:
    """What a gateway reads of some sessions."""
    for number, token_ids, origins, outcome in read:
        yield number, outcome if isinstance(outcome, PacelineError) else Step(token_ids, origins, 0, *outcome)


def steps_of(commit: StepCommit) -> Iterator[tuple[int, Step]]:
    """Sessions with tokens or events, one by one."""
    for number, offset, token_ids, origins in commit:
        yield number, Step(tuple(token_ids), bytes(origins), offset, *commit.events.get(number, NO_EVENT))
    for number in commit.events.keys() - commit.numbers:
        yield number, Step((), b"", 0, *commit.events[number])

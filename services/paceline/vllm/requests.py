"""Sessions by vLLM's names of requests, as its V2 model runner gives them to a speculator.

Nothing here knows vLLM itself, sockets or a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from paceline.vllm.board import SessionNumbers
from paceline.vllm.step_message import Observed, RowTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStep:
    """A step of vLLM, row by row of its batch.

    Attributes:
        names: Names of the requests.
        lengths: Tokens of each after the step; while a prompt is being read, the whole prompt's.
        sampled: Tokens that each has just committed; none while its prompt is being read.
        verified: Guesses of each that the step verified.
        text: Returns all tokens of a row, given its index; slow.
        live: Names of all requests that have not ended.
    """

    names: Sequence[str]
    lengths: Sequence[int]
    sampled: Sequence[Sequence[int]]
    verified: Sequence[int]
    text: Callable[[int], Sequence[int]]
    live: Container[str]


@dataclass(slots=True)
class _RequestSession:
    number: int
    tokens: list[int]


class RequestSessions:
    """Gives requests their sessions, step by step."""

    def __init__(self) -> None:
        self._sessions: dict[str, _RequestSession] = {}
        self._tokens: dict[int, list[int]] = {}
        self._numbers = SessionNumbers()

    def observe(self, step: RequestStep, most_opened_tokens: int) -> Observed:
        """Adds a step.

        Args:
            step: The step that vLLM has run.
            most_opened_tokens: Bound on the tokens of new sessions, in all; rows beyond it get no session yet.
        """
        closed = [self._close(name) for name in [*self._sessions] if name not in step.live]
        rows, places = [], []
        for place, (name, length) in enumerate(zip(step.names, step.lengths, strict=True)):
            sampled = step.sampled[place]
            session = self._sessions.get(name)
            if session is not None and len(session.tokens) + len(sampled) != length:
                # It was preempted, or steps were missed.
                closed.append(self._close(name))
                session = None
            if session is None:
                most_opened_tokens -= length
                if most_opened_tokens < 0:
                    continue
                rows.append(self._opened(name, step.text(place), reads=not sampled))
            else:
                rows.append(_continued(session, sampled, step.verified[place]))
            places.append(place)
        return Observed(rows, places, closed)

    def since(self, number: int, length: int) -> Sequence[int]:
        """Tokens of a session after its first `length`."""
        return self._tokens[number][length:]

    def handed_out(self, rows: Sequence[RowTokens], num_guesses: Sequence[int]) -> None:
        """Does nothing: the runner says how many guesses a step has verified."""

    def forget(self) -> None:
        """Drops all sessions, since the helper is new; they are opened again under new numbers."""
        self._sessions.clear()
        self._tokens.clear()
        self._numbers.free_all()

    def _opened(self, name: str, tokens: Sequence[int], *, reads: bool) -> RowTokens:
        session = self._sessions[name] = _RequestSession(self._numbers.take(), list(tokens))
        self._tokens[session.number] = session.tokens
        return RowTokens(session.number, 0, [*session.tokens], reads)

    def _close(self, name: str) -> int:
        session = self._sessions.pop(name)
        del self._tokens[session.number]
        self._numbers.free(session.number)
        return session.number


def _continued(session: _RequestSession, sampled: Sequence[int], num_verified: int) -> RowTokens:
    base_len = len(session.tokens)
    session.tokens += sampled
    return RowTokens(session.number, base_len, sampled, not sampled, num_verified)

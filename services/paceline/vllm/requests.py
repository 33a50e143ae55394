"""Sessions by vLLM's names of requests, as both of its model runners show them.

Nothing here knows vLLM itself, sockets or a clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.vllm.board import SessionNumbers
from paceline.vllm.step_message import Observed, RowTokens


class HandedOut(NamedTuple):
    """The guesses of a step, a list for each request.

    Attributes:
        names: Names of the requests.
        guesses: Token ids for each, in the same order.
    """

    names: Sequence[str] = ()
    guesses: Sequence[Sequence[int]] = ()


class TierDrafter:
    """The part of vLLM's drafter that both runners share: it says which guesses are whose.

    Attributes:
        handed_out: The guesses of the last step, until vLLM takes them.
    """

    def __init__(self) -> None:
        self.handed_out = HandedOut()

    def take(self) -> HandedOut:
        """Returns the guesses handed out, once: a step without guesses must not get those of the one before."""
        taken, self.handed_out = self.handed_out, HandedOut()
        return taken


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
        most_guesses: Returns the most guesses that a request takes in a step, given its name.
    """

    names: Sequence[str]
    lengths: Sequence[int]
    sampled: Sequence[Sequence[int]]
    verified: Sequence[int]
    text: Callable[[int], Sequence[int]]
    live: Container[str]
    most_guesses: Callable[[str], int]


# Four bytes a token: all texts of vLLM are held here once more.
TOKENS = "i"


@dataclass(slots=True)
class _RequestSession:
    number: int
    tokens: array[int]
    most_guesses: int


class RequestSessions:
    """Gives requests their sessions, step by step."""

    def __init__(self) -> None:
        self._sessions: dict[str, _RequestSession] = {}
        self._tokens: dict[int, array[int]] = {}
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
            added = None if session is None else _added(session, step, place)
            if session is not None and added is not None:
                rows.append(_continued(session, added, step.verified[place], reads=not sampled))
            else:
                if session is not None:
                    closed.append(self._close(name))
                most_opened_tokens -= length
                if most_opened_tokens < 0:
                    continue
                rows.append(self._opened(name, step, place))
            places.append(place)
        return Observed(rows, places, closed)

    def since(self, number: int, length: int) -> Sequence[int]:
        """Tokens of a session after its first `length`."""
        return self._tokens[number][length:].tolist()

    def forget(self) -> None:
        """Drops all sessions, since the helper is new; they are opened again under new numbers."""
        self._sessions.clear()
        self._tokens.clear()
        self._numbers.free_all()

    def _opened(self, name: str, step: RequestStep, place: int) -> RowTokens:
        tokens, most = array(TOKENS, step.text(place)), step.most_guesses(name)
        session = self._sessions[name] = _RequestSession(self._numbers.take(), tokens, most)
        self._tokens[session.number] = tokens
        return RowTokens(session.number, 0, tokens[:], reads=not step.sampled[place], most_guesses=most)

    def _close(self, name: str) -> int:
        session = self._sessions.pop(name)
        del self._tokens[session.number]
        self._numbers.free(session.number)
        return session.number


def _added(session: _RequestSession, step: RequestStep, place: int) -> Sequence[int] | None:
    """The tokens of a row after those that its session has; None: it has others."""
    base_len, sampled = len(session.tokens), step.sampled[place]
    if base_len + len(sampled) == step.lengths[place]:
        return sampled
    # Steps were missed: near the greatest length vLLM asks for no guesses, for all rows.
    text = array(TOKENS, step.text(place))
    return text[base_len:] if text[:base_len] == session.tokens else None


def _continued(session: _RequestSession, added: Sequence[int], num_verified: int, *, reads: bool) -> RowTokens:
    base_len = len(session.tokens)
    session.tokens.extend(added)
    return RowTokens(session.number, base_len, added, reads, num_verified, session.most_guesses)

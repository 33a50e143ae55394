"""Finds the session of each row of vLLM's batch by its tokens, and what is new in the row.

vLLM gives a proposer no names of requests, and its rows move, swap, vanish and come back. Nothing here knows vLLM
itself, sockets or a clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.vllm.board import SessionNumbers
from paceline.vllm.step_message import Observed, RowTokens

# The last tokens that identify a row's session from call to call; comparing all of them each time is too slow.
TAIL_TOKENS = 64
# A preempted row that comes back later is a new session.
KEPT_S = 5.0
KEPT_PER_ROW = 4
# A call may have few rows (a long prompt takes the whole step) while many others wait.
LEAST_ROWS_KEPT_FOR = 16
SWEEP_EVERY_S = 1.0
UNLIMITED_TOKENS = 1 << 62


class _RowSession:
    """The tokens of one session, as the helper knows them."""

    __slots__ = ("call", "handed", "handed_in_call", "length", "number", "seen_s", "tail", "tokens")

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens = np.empty(0, np.int32)
        self.length = 0
        self.tail = b""
        self.call = 0
        self.seen_s = 0.0
        self.handed = 0
        self.handed_in_call = 0

    def ends_as(self, row: NDArray[np.int32]) -> bool:
        """Whether a row has the same last tokens at the same place."""
        return row[max(0, self.length - TAIL_TOKENS) : self.length].tobytes() == self.tail

    def begins(self, row: NDArray[np.int32]) -> bool:
        """Whether a row begins with all the tokens; slow if there are many."""
        return self.ends_as(row) and bool(np.array_equal(self.tokens[: self.length], row[: self.length]))

    def extend(self, row: NDArray[np.int32], length: int) -> NDArray[np.int32]:
        """Adds the tokens of a row up to a length; returns the new ones."""
        added = row[self.length : length]
        if length > len(self.tokens):
            larger = np.empty(length + max(length // 2, TAIL_TOKENS), np.int32)
            larger[: self.length] = self.tokens[: self.length]
            self.tokens = larger
        self.tokens[self.length : length] = added
        self.length = length
        self.tail = row[max(0, length - TAIL_TOKENS) : length].tobytes()
        return added


class RowSessions:
    """Gives rows their sessions, call by call."""

    def __init__(self) -> None:
        self._sessions: dict[int, _RowSession] = {}
        self._of_rows: list[_RowSession | None] = []
        self._call = 0
        self._numbers = SessionNumbers()
        self._swept_s = float("-inf")

    def __len__(self) -> int:
        return len(self._sessions)

    def observe(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens: NDArray[np.integer],
        token_ids: NDArray[np.int32],
        now_s: float,
        most_opened_tokens: int = UNLIMITED_TOKENS,
    ) -> Observed:
        """Handles a call of vLLM.

        Args:
            sampled_token_ids: Tokens that each row has just committed; none while its prompt is being read.
            num_tokens: `[at least rows]`; length of each row, sampled tokens included. While a prompt is being read
                it is the whole prompt's (of a row that was preempted: prompt and output).
            token_ids: `[at least rows, max_model_len]`; only the first `num_tokens` of each row are read.
            most_opened_tokens: Bound on the tokens of new sessions, in all; rows beyond it get no session yet.
        """
        self._call += 1
        lengths: list[int] = num_tokens[: len(sampled_token_ids)].tolist()
        known = [length - len(sampled) for length, sampled in zip(lengths, sampled_token_ids, strict=True)]
        found = self._from_last_call(known, token_ids)
        self._search(found, known, lengths, token_ids, most_opened_tokens)
        self._of_rows = found
        rows, places = [], []
        for place, session in enumerate(found):
            if session is not None:
                rows.append(self._row(session, token_ids[place], lengths[place], sampled_token_ids[place], now_s))
                places.append(place)
        return Observed(rows, places, self._sweep(len(found), now_s))

    def since(self, number: int, length: int) -> Sequence[int]:
        """Tokens of a session after its first `length`."""
        session = self._sessions[number]
        tokens: list[int] = session.tokens[length : session.length].tolist()
        return tokens

    def handed_out(self, rows: Sequence[RowTokens], num_guesses: Sequence[int]) -> None:
        """Notes how many guesses vLLM got for the rows of the last call, to be verified in its next step."""
        for row, count in zip(rows, num_guesses, strict=True):
            if count:
                session = self._sessions[row.session]
                session.handed, session.handed_in_call = count, self._call

    def forget(self) -> None:
        """Drops all sessions, since the helper is new; they are opened again under new numbers."""
        self._sessions.clear()
        self._numbers.free_all()
        self._of_rows = []

    def _from_last_call(self, known: Sequence[int], token_ids: NDArray[np.int32]) -> list[_RowSession | None]:
        """Returns the session that each row had in the last call, where its tokens still fit."""
        found: list[_RowSession | None] = [None] * len(known)
        for place, session in enumerate(self._of_rows[: len(known)]):
            if session is not None and session.length == known[place] and session.ends_as(token_ids[place]):
                session.call = self._call
                found[place] = session
        return found

    def _search(
        self,
        found: list[_RowSession | None],
        known: Sequence[int],
        lengths: Sequence[int],
        token_ids: NDArray[np.int32],
        most_tokens: int,
    ) -> None:
        """Finds sessions for the rows that have none, or opens them."""
        missing = [place for place, session in enumerate(found) if session is None and known[place] > 0]
        if not missing:
            return
        unseen = _Unseen([session for session in self._sessions.values() if session.call != self._call])
        for place in missing:
            session = unseen.take(token_ids[place], known[place])
            if session is None:
                most_tokens -= lengths[place]
                session = self._opened() if most_tokens >= 0 else None
            if session is not None:
                session.call = self._call
            found[place] = session

    def _opened(self) -> _RowSession:
        session = _RowSession(self._numbers.take())
        self._sessions[session.number] = session
        return session

    def _row(
        self, session: _RowSession, row: NDArray[np.int32], length: int, sampled: Sequence[int], now_s: float
    ) -> RowTokens:
        base_len = session.length
        session.seen_s = now_s
        verified = session.handed if session.handed_in_call == self._call - 1 else 0
        added: Sequence[int] = sampled
        if length > base_len:
            new = session.extend(row, length)
            # The sampled tokens are at the row's end; usually nothing else is new.
            if length - base_len != len(sampled):
                added = array("q", new.astype(np.int64).tobytes())
        return RowTokens(session.number, base_len, added, not sampled, verified)

    def _sweep(self, num_rows: int, now_s: float) -> list[int]:
        """Closes sessions that no row has had for a while, and the oldest if there are too many."""
        most = num_rows + KEPT_PER_ROW * max(num_rows, LEAST_ROWS_KEPT_FOR)
        if len(self._sessions) <= most and now_s - self._swept_s < SWEEP_EVERY_S:
            return []
        self._swept_s = now_s
        unseen = [session for session in self._sessions.values() if session.call != self._call]
        unseen.sort(key=lambda session: session.seen_s)
        too_many = len(self._sessions) - most
        closed = [
            session.number
            for position, session in enumerate(unseen)
            if position < too_many or now_s - session.seen_s > KEPT_S
        ]
        for number in closed:
            del self._sessions[number]
            self._numbers.free(number)
        return closed


class _Unseen:
    """The sessions that no row of a call has yet, searched by content."""

    def __init__(self, sessions: Sequence[_RowSession]) -> None:
        # The longest first: then the helper knows most of the row.
        self._sessions = sorted(sessions, key=lambda session: -session.length)
        self._lengths = np.array([session.length for session in self._sessions], np.int64)
        self._lasts = np.array([session.tokens[session.length - 1] for session in self._sessions], np.int32)
        self._free = np.ones(len(self._sessions), np.bool_)

    def take(self, row: NDArray[np.int32], length: int) -> _RowSession | None:
        """Takes the longest session whose tokens a row begins with.

        It may be shorter than the row: near the greatest length vLLM skips calls, for all rows.
        """
        fits = self._free & (self._lengths <= length)
        fits &= row[np.minimum(self._lengths, length) - 1] == self._lasts
        for index in np.flatnonzero(fits).tolist():
            if self._sessions[index].begins(row):
                self._free[index] = False
                return self._sessions[index]
        return None

"""Unsent messages to gateways about their sessions: tokens of a step, or of several while many sessions run.

A gateway has one stream, and gets one message at a time for all its sessions. The cost of a session for both ends
grows with the pieces of a text: with few sessions the tokens of each step go out at once; with more they gather longer,
and those of all sessions leave together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

from paceline.core.errors import PacelineError, RemoteProtocolError, UnavailableError
from paceline.core.messages import CommittedTokens, SpeculationRecord
from paceline.core.target_events import SpeculationTally
from paceline.service.outbox import WaitingBytes
from paceline.wire import LogPart, size_of_committed
from paceline.wire.columns import MAX_SESSIONS
from paceline.wire.sessions import JUDGED_AT_ONCE

# At most 250 messages a second from a verifier, as long as the wait stays short.
GATHER_PER_SESSION_S = 0.004
# Often enough for a client that wants its text in one piece, and little is lost if the verifier dies.
GATHER_WHOLE_S = 0.5
# Bytes that may wait for a gateway that does not read; tokens have log probabilities beside them.
LOG_BYTES = 64 * 1024 * 1024
# Bytes of a message from which on the next session waits for the next one; gRPC takes 16 MiB.
# To write 64 KiB of log probabilities takes some 10 ms of the event loop, and to read them as long.
PART_BYTES = 64 * 1024
# Entries of sessions, in a message.
PART_ENTRIES = 4096
# After this silence a gateway gets a sign of life for all its sessions.
SILENCE_S = 1.0
# Between two records of what speculation did for a session; its result has one as well.
RECORD_S = 2.0


class SessionLog:
    """A session's tokens until they are sent to its gateway.

    The first tokens and the last may leave at once.

    Args:
        gateway: The gateway that gets them.
        number: By which the gateway knows it.
        whole: The client gets the text in one piece.
        offset: Generated tokens of the session so far.
        now_s: Time of the event loop.

    Attributes:
        tally: Its speculation counts; None: they come with its result alone.
    """

    def __init__(self, gateway: GatewayLog, number: int, *, whole: bool, offset: int, now_s: float) -> None:
        self.gateway = gateway
        self.number = number
        self._offset = offset
        self._gather_s = GATHER_WHOLE_S if whole else 0.0
        self._waiting: deque[tuple[CommittedTokens, int]] = deque()
        self._released_s: float | None = None
        self.tally: SpeculationTally | None = None
        self._recorded_s = now_s

    def put(self, committed: CommittedTokens, now_s: float) -> None:
        """Adds what a step committed.

        Raises:
            UnavailableError: Tokens are missing before these, or these were sent before.
            asyncio.QueueFull: The gateway does not read.
        """
        if committed.offset != self._offset:
            raise UnavailableError(f"token {self._offset} of the session was to come, not {committed.offset}")
        self._offset += len(committed.token_ids)
        pieces = [*in_pieces(committed)] if committed.prompt_logprobs else [committed]
        sizes = [*map(size_of_committed, pieces)]
        self.gateway.waiting.add(sum(sizes))
        self._waiting += zip(pieces, sizes, strict=True)
        if self._released_s is None or committed.result is not None:
            # Messages before the first token, such as that it runs, leave at once as well.
            self.release(now_s if committed.token_ids else None)

    def gathered(self, now_s: float) -> None:
        """Releases tokens that have gathered for long enough."""
        if self._waiting and (self._released_s is None or now_s - self._released_s >= self._gather_s):
            self.release(now_s)

    def release(self, now_s: float | None) -> None:
        self._released_s = now_s
        self.gateway.mark_ready(self)

    def fail(self, error: PacelineError) -> None:
        """The session has ended early; tokens committed before go out first."""
        if self._waiting:
            self.gateway.mark_ready(self)
        self.gateway.end(self.number, error)

    def leave(self) -> None:
        """The gateway wants no more of the session: it gets the record instead of tokens that wait."""
        self.gateway.waiting.remove(sum(size for _, size in self._waiting))
        self._waiting.clear()
        self._waiting.append((CommittedTokens(token_ids=(), offset=self._offset, speculation=self._record()), 0))
        self.gateway.mark_ready(self)

    def take(self, most_bytes: int, now_s: float) -> tuple[CommittedTokens, int]:
        """Returns what has gathered, in one piece, and its bytes; of very much only a part."""
        parts = [self._waiting.popleft()]
        num_bytes = parts[0][1]
        while self._waiting and num_bytes + self._waiting[0][1] <= most_bytes:
            parts.append(self._waiting.popleft())
            num_bytes += parts[-1][1]
        committed = joined([each for each, _ in parts])
        if committed.token_ids and committed.result is None and now_s - self._recorded_s >= RECORD_S:
            self._recorded_s = now_s
            committed = committed._replace(speculation=self._record())
        return committed, num_bytes

    def _record(self) -> SpeculationRecord | None:
        return None if self.tally is None else self.tally.record()

    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting


class GatewayLog:
    """The stream of one gateway: of all its sessions, what may leave, how they ended, and signs of life.

    It belongs to one event loop.

    Attributes:
        waiting: Bytes of all its sessions.
        closed: Only messages that may leave already are sent.
    """

    def __init__(self) -> None:
        self._leaving: dict[int, SessionLog] = {}
        self._ended: deque[tuple[int, PacelineError]] = deque()
        self._taken: list[int] = []
        self._last_number = 0
        self.waiting = WaitingBytes(LOG_BYTES)
        self._alive, self._step_s = False, 0.0
        # When the gateway last took a sign of life.
        self._shown_s = asyncio.get_running_loop().time()
        self._error: PacelineError | None = None
        self.closed = False
        self._ready = asyncio.Event()

    def accept(self, number: int) -> None:
        """The gateway has named a new session.

        Raises:
            RemoteProtocolError: The number is not above those before.
        """
        if number <= self._last_number:
            raise RemoteProtocolError(f"StartSession.number: must be above {self._last_number}, got {number}")
        self._last_number = number

    def taken(self, number: int) -> None:
        """Says that a session was accepted."""
        self._taken.append(number)
        self._ready.set()

    def end(self, number: int, error: PacelineError) -> None:
        """Says that a session was refused, or ended early."""
        self._ended.append((number, error))
        self._ready.set()

    @property
    def is_full(self) -> bool:
        """Whether more sessions wait to be sent than run anywhere: the gateway starts them, and does not read."""
        return max(len(self._taken), len(self._ended), len(self._leaving)) > MAX_SESSIONS

    def mark_ready(self, session: SessionLog) -> None:
        self._leaving[session.number] = session
        self._ready.set()

    def lives(self) -> None:
        """The engine has made progress; the next message says so."""
        self._alive = True

    def show_life(self, now_s: float, step_s: float = 0.0) -> None:
        """Sends a sign of life if the gateway has had none for a while.

        Args:
            step_s: Seconds for which the engine has been inside the step under way; 0: it has made progress.
        """
        if now_s - self._shown_s >= SILENCE_S:
            self._alive, self._step_s = True, step_s
            self._ready.set()

    def close(self, error: PacelineError | None = None) -> None:
        """Ends the stream: after what may leave, or at once with an error instead of it."""
        self.closed, self._error = True, error
        if error is not None:
            # A peer that does not read may hold the stream for long.
            self._leaving.clear()
            self._ended.clear()
            self._taken.clear()
        self._ready.set()

    async def take(self) -> LogPart | None:
        """Returns what may leave, once there is something; None: the stream is over.

        Raises:
            PacelineError: It ends the stream.
        """
        while True:
            await self._ready.wait()
            if self._error is not None:
                raise self._error
            part = self._part(asyncio.get_running_loop().time())
            if part is not None or self.closed:
                return part
            self._ready.clear()

    def _part(self, now_s: float) -> LogPart | None:
        outcomes: list[tuple[int, CommittedTokens | PacelineError]] = [*self._released(now_s)]
        while self._ended and self._ended[0][0] not in self._leaving and len(outcomes) < PART_ENTRIES:
            outcomes.append(self._ended.popleft())
        if not (outcomes or self._taken or self._alive):
            return None
        part = LogPart(outcomes=outcomes, taken=self._taken[:PART_ENTRIES], alive=self._alive, step_s=self._step_s)
        if self._alive:
            self._shown_s = now_s
        self._taken, self._alive, self._step_s = self._taken[PART_ENTRIES:], False, 0.0
        if not (self._leaving or self._ended or self._taken or self.closed):
            self._ready.clear()
        return part

    def _released(self, now_s: float) -> Sequence[tuple[int, CommittedTokens]]:
        outcomes: list[tuple[int, CommittedTokens]] = []
        left = PART_BYTES
        for number, session in list(self._leaving.items()):
            if left <= 0 or len(outcomes) == PART_ENTRIES:
                break
            if session.is_empty():
                del self._leaving[number]
                continue
            committed, num_bytes = session.take(left, now_s)
            outcomes.append((number, committed))
            left -= num_bytes
            self.waiting.remove(num_bytes)
            del self._leaving[number]
            if not session.is_empty():
                # Behind those that had no turn.
                self._leaving[number] = session
        return outcomes


class Gathering:
    """Empties the logs of all sessions of a verifier together.

    Args:
        longest_s: Longest time for which tokens gather; 0: those of each step go out at once.
        sessions: Running sessions.
        per_session_s: Adds up over the sessions under way, to `longest_s` at most.
    """

    def __init__(
        self,
        longest_s: float,
        sessions: Callable[[], Collection[SessionLog]],
        per_session_s: float = GATHER_PER_SESSION_S,
    ) -> None:
        self._longest_s = longest_s
        self._sessions = sessions
        self._per_session_s = per_session_s
        self._emptied_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def after_step(self) -> None:
        """Lets tokens of a step go now, or when it is time."""
        if self._timer is not None:
            return
        loop, sessions = asyncio.get_running_loop(), self._sessions()
        now_s = loop.time()
        due_s = self._emptied_s + min(self._longest_s, self._per_session_s * len(sessions))
        if now_s >= due_s:
            self._empty()
        else:
            self._timer = loop.call_at(due_s, self._empty)

    def _empty(self) -> None:
        self._timer = None
        self._emptied_s = asyncio.get_running_loop().time()
        for each in self._sessions():
            each.gathered(self._emptied_s)


def in_pieces(committed: CommittedTokens) -> Iterator[CommittedTokens]:
    """Splits a step's tokens of a session, with many log probabilities of a prompt apart."""
    judged, first, start = committed.prompt_logprobs, committed.prompt_offset, 0
    for start in range(JUDGED_AT_ONCE, len(judged), JUDGED_AT_ONCE):
        at = start - JUDGED_AT_ONCE
        some, offset = judged[at:start], committed.offset
        yield CommittedTokens(token_ids=(), offset=offset, prompt_logprobs=some, prompt_offset=first + at)
    yield committed._replace(prompt_logprobs=judged[start:], prompt_offset=first + start) if start else committed


def joined(parts: Sequence[CommittedTokens]) -> CommittedTokens:
    """Joins a session's tokens of several steps in one message, in order."""
    if len(parts) == 1:
        return parts[0]
    return CommittedTokens(
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        origins=b"".join(part.origins for part in parts),
        logprobs=tuple(position for part in parts for position in part.logprobs),
        result=parts[-1].result,
        lossy=any(part.lossy for part in parts),
        offset=parts[0].offset,
        running=any(part.running for part in parts),
        prompt_logprobs=tuple(position for part in parts for position in part.prompt_logprobs),
        prompt_offset=next((part.prompt_offset for part in parts if part.prompt_logprobs), 0),
    )

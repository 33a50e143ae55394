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
from paceline.core.messages import SessionEvent
from paceline.core.target_events import SpeculationTally
from paceline.service.outbox import WaitingBytes
from paceline.wire import LogPart, size_of_event
from paceline.wire.columns import MAX_SESSIONS
from paceline.wire.sessions import ENTRY_BYTES, JUDGED_AT_ONCE

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
    """A session's tokens and events until they are sent to its gateway.

    The first tokens and the last may leave at once.

    Args:
        gateway: The gateway that gets them.
        number: By which the gateway knows it.
        whole: The client gets the text in one piece.
        offset: Generated tokens of the session so far.
        now_s: Time of the event loop.

    Attributes:
        tally: Its speculation counts, where the engine counts.
    """

    def __init__(self, gateway: GatewayLog, number: int, *, whole: bool, offset: int, now_s: float) -> None:
        self.gateway = gateway
        self.number = number
        self.tally = SpeculationTally()
        self._num_sent = offset
        self._token_ids: list[int] = []
        self._origins = bytearray()
        # Events that wait, with the number of tokens up to each and the bytes of each.
        self._events: deque[tuple[int, SessionEvent, int]] = deque()
        self._gather_s = GATHER_WHOLE_S if whole else 0.0
        # When tokens last left; None: none have come.
        self._released_s: float | None = None
        self._recorded_s = now_s

    def put(
        self,
        offset: int | None,
        token_ids: Sequence[int],
        origins: bytes | bytearray,
        event: SessionEvent | None,
        now_s: float,
    ) -> None:
        """Adds tokens that a step committed, after `offset` others (None: any), and the event beside them.

        Raises:
            UnavailableError: Tokens are missing before these, or these were sent before.
            asyncio.QueueFull: The gateway does not read.
        """
        known = self._num_sent + len(self._token_ids)
        if offset is not None and offset != known:
            raise UnavailableError(f"token {known} of the session was to come, not {offset}")
        pieces = () if event is None else [(each, size_of_event(each)) for each in in_pieces(event)]
        # In one sum: an empty log takes a message of any size.
        self.gateway.waiting.add(sum((size for _, size in pieces), start=ENTRY_BYTES * len(token_ids)))
        self.gateway.alive = True
        self._token_ids += token_ids
        self._origins += origins
        if pieces:
            # Many log probabilities of a prompt come before the tokens.
            ends = [known] * (len(pieces) - 1) + [known + len(token_ids)]
            self._events += [(end, *piece) for end, piece in zip(ends, pieces, strict=True)]
        if self._released_s is None or (event is not None and event.result is not None):
            # Events before the first token, such as that it runs, leave at once as well.
            self._released_s = now_s if token_ids else self._released_s
            self.gateway.mark_ready(self)

    def gathered(self, now_s: float) -> None:
        """Releases what has gathered for long enough."""
        released_s, waits = self._released_s, self._token_ids or self._events
        if waits and released_s is not None and now_s - released_s >= self._gather_s:
            self._released_s = now_s
            self.gateway.mark_ready(self)

    def fail(self, error: PacelineError) -> None:
        """The session has ended early; tokens committed before go out first."""
        if not self.is_empty:
            self.gateway.mark_ready(self)
        self.gateway.end(self.number, error)

    def leave(self) -> None:
        """The gateway wants no more of the session: it gets the record instead of tokens that wait."""
        self.gateway.waiting.remove(ENTRY_BYTES * len(self._token_ids) + sum(size for _, _, size in self._events))
        self._num_sent += len(self._token_ids)
        self._token_ids.clear()
        self._origins.clear()
        self._events.clear()
        self._events.append((self._num_sent, self._with_record(SessionEvent()), 0))
        self.gateway.mark_ready(self)

    def move_to(self, part: LogPart, most_bytes: int, now_s: float) -> int:
        """Moves what has gathered to a message, of very much only a part; returns its bytes."""
        event, num_bytes, count = self._next_event(most_bytes) if self._events else (None, 0, 0)
        if not self._events:
            # Tokens without an event.
            most = max(event is None, (most_bytes - num_bytes) // ENTRY_BYTES)
            fit = min(most, len(self._token_ids) - count)
            count, num_bytes = count + fit, num_bytes + ENTRY_BYTES * fit
        if count and (event is None or event.result is None) and now_s - self._recorded_s >= RECORD_S:
            self._recorded_s, event = now_s, self._with_record(event or SessionEvent())
        part.commit.add(self.number, self._num_sent, self._token_ids[:count], self._origins[:count])
        if event is not None:
            part.commit.events[self.number] = event
        self._num_sent += count
        del self._token_ids[:count], self._origins[:count]
        return num_bytes

    def _next_event(self, most_bytes: int) -> tuple[SessionEvent | None, int, int]:
        """Takes waiting events, at least one: joined, and the bytes and tokens up to them."""
        events, num_bytes, count = list[SessionEvent](), 0, 0
        while self._events:
            end, event, size = self._events[0]
            size += ENTRY_BYTES * (end - self._num_sent - count)
            if events and num_bytes + size > most_bytes:
                break
            self._events.popleft()
            events.append(event)
            num_bytes, count = num_bytes + size, end - self._num_sent
        return SessionEvent.joined(events) if events else None, num_bytes, count

    def _with_record(self, event: SessionEvent) -> SessionEvent:
        return event._replace(speculation=self.tally.record() if self.tally.num_steps else None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not (self._token_ids or self._events)


class GatewayLog:
    """The stream of one gateway: of all its sessions, what may leave, how they ended, and signs of life.

    It belongs to one event loop.

    Attributes:
        sessions: Numbers within the verifier of the sessions under way, by the gateway's own numbers.
        waiting: Bytes of all its sessions.
        alive: The engine has made progress; the next message says so.
        closed: Only messages that may leave already are sent.
    """

    def __init__(self) -> None:
        self._leaving: dict[int, SessionLog] = {}
        self._ended: deque[tuple[int, PacelineError]] = deque()
        self._taken: list[int] = []
        self._last_number = 0
        self.sessions: dict[int, int] = {}
        self.waiting = WaitingBytes(LOG_BYTES)
        self.alive, self._step_s = False, 0.0
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

    def show_life(self, now_s: float, step_s: float = 0.0) -> None:
        """Sends a sign of life if the gateway has had none for a while.

        Args:
            step_s: Seconds for which the engine has been inside the step under way; 0: it has made progress.
        """
        if now_s - self._shown_s >= SILENCE_S:
            self.alive, self._step_s = True, step_s
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
        part = LogPart(taken=self._taken[:PART_ENTRIES], alive=self.alive, step_s=self._step_s)
        self._release_to(part, now_s)
        num_left, errors = PART_ENTRIES - len(part.commit.numbers), part.commit.errors
        while self._ended and self._ended[0][0] not in self._leaving and len(errors) < num_left:
            number, error = self._ended.popleft()
            errors[number] = error
        if part.commit.is_empty and not (part.taken or part.alive):
            return None
        if self.alive:
            self._shown_s = now_s
        self._taken, self.alive, self._step_s = self._taken[PART_ENTRIES:], False, 0.0
        if not (self._leaving or self._ended or self._taken or self.closed):
            self._ready.clear()
        return part

    def _release_to(self, part: LogPart, now_s: float) -> None:
        left = PART_BYTES
        for number, session in list(self._leaving.items()):
            if left <= 0 or len(part.commit.numbers) == PART_ENTRIES:
                break
            del self._leaving[number]
            if session.is_empty:
                continue
            left -= session.move_to(part, left, now_s)
            if not session.is_empty:
                # Behind those that had no turn.
                self._leaving[number] = session
        self.waiting.remove(PART_BYTES - left)


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


def in_pieces(event: SessionEvent) -> Iterator[SessionEvent]:
    """Splits an event, with many log probabilities of a prompt apart."""
    judged, first, start = event.prompt_logprobs, event.prompt_offset, 0
    for start in range(JUDGED_AT_ONCE, len(judged), JUDGED_AT_ONCE):
        at = start - JUDGED_AT_ONCE
        yield SessionEvent(prompt_logprobs=judged[at:start], prompt_offset=first + at)
    yield event._replace(prompt_logprobs=judged[start:], prompt_offset=first + start) if start else event

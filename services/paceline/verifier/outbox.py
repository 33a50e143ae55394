"""Committed tokens on their way to gateways: those of one step, or of several while many sessions run.

A message costs verifier, gateway and client a good part of a millisecond, whatever its size. With few sessions the
tokens of each step go out at once. With more sessions they gather longer, and all outboxes are emptied together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from paceline.core.errors import PacelineError, UnavailableError
from paceline.core.messages import CommittedTokens

# At most 250 messages a second from a verifier, as long as the wait stays short.
GATHER_PER_SESSION_S = 0.004
# Often enough for a gateway to see that its verifier is alive, and to lose little if it dies.
GATHER_WHOLE_S = 0.5
# Bytes that may wait for a gateway that does not read; tokens have log probabilities beside them.
OUTBOX_BYTES = 16 * 1024 * 1024
MESSAGE_BYTES, ENTRY_BYTES = 64, 16
# After this silence a session sends a sign of life.
SILENCE_S = 1.0


class Outbox:
    """One session's tokens until its gateway takes them; more than `OUTBOX_BYTES` of them end the session.

    The first tokens and the last go out at once. Missing tokens end the session with an error.

    Args:
        whole: The client gets the text in one piece.
        offset: Generated tokens of the session so far.
    """

    def __init__(self, *, whole: bool = False, offset: int = 0) -> None:
        self._offset = offset
        # When the gateway last took something.
        self._taken_s = asyncio.get_running_loop().time()
        self._gather_s = GATHER_WHOLE_S if whole else 0.0
        self._waiting: list[CommittedTokens] = []
        self._num_bytes = 0
        self._error: PacelineError | None = None
        self._released_s: float | None = None
        self._ready = asyncio.Event()

    @property
    def holds_back(self) -> bool:
        """Whether tokens wait that may not leave yet."""
        return bool(self._waiting) and not self._ready.is_set()

    def put(self, committed: CommittedTokens, now_s: float) -> None:
        """Takes in what a step committed."""
        if committed.offset != self._offset:
            self.fail(UnavailableError(f"token {self._offset} of the session was to come, not {committed.offset}"))
        if self._error is not None:
            return
        self._offset += len(committed.token_ids)
        # However large, what is alone may leave.
        self._num_bytes += _size(committed) if self._waiting else 0
        if self._num_bytes > OUTBOX_BYTES:
            self.fail(UnavailableError("the gateway does not read its tokens"))
            return
        self._waiting.append(committed)
        if not committed.token_ids and committed.result is None:
            # A sign of life; there is nothing to gather.
            self._ready.set()
        elif self._released_s is None or committed.result is not None:
            self._release(now_s)

    def show_life(self, now_s: float) -> None:
        """Sends what waits, or an empty message, if the gateway has received nothing for a while."""
        if self._ready.is_set() or now_s - self._taken_s < SILENCE_S:
            return
        if self._waiting:
            self._release(now_s)
        else:
            self.put(CommittedTokens(token_ids=(), offset=self._offset), now_s)

    def fail(self, error: PacelineError) -> None:
        """Ends the session; tokens committed before go out first."""
        self._error = self._error or error
        self._ready.set()

    def empty(self, now_s: float) -> None:
        """Releases tokens that have gathered for long enough."""
        if self.holds_back and (self._released_s is None or now_s - self._released_s >= self._gather_s):
            self._release(now_s)

    def _release(self, now_s: float) -> None:
        self._released_s = now_s
        self._ready.set()

    async def take(self) -> CommittedTokens:
        """Returns what has gathered, once it may leave.

        Raises:
            PacelineError: It ended the session.
        """
        await self._ready.wait()
        self._taken_s = asyncio.get_running_loop().time()
        waiting, self._waiting = self._waiting, []
        self._num_bytes = 0
        if not waiting:
            assert self._error is not None, "only tokens or an error make it ready"
            raise self._error
        if self._error is None:
            self._ready.clear()
        return joined(waiting)


class Outboxes:
    """The outboxes of a verifier by the serial numbers of their sessions; belongs to one event loop.

    Args:
        longest_s: Longest time for which tokens gather; 0: those of each step go out at once.
        per_session_s: Adds up over the sessions under way, to `longest_s` at most.
    """

    def __init__(self, longest_s: float, per_session_s: float = GATHER_PER_SESSION_S) -> None:
        self._longest_s = longest_s
        self._per_session_s = per_session_s
        self._outboxes: dict[int, Outbox] = {}
        self._emptied_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._outboxes)

    def open(self, serial: int, *, whole: bool = False, offset: int = 0) -> Outbox:
        """Makes the outbox of a session, with the arguments of `Outbox`."""
        outbox = self._outboxes[serial] = Outbox(whole=whole, offset=offset)
        return outbox

    def close(self, serial: int) -> None:
        """Drops the outbox of a session with its content."""
        del self._outboxes[serial]

    def deliver(self, committed: Sequence[tuple[int, CommittedTokens | PacelineError]]) -> None:
        """Takes in what a step committed or ended; sessions that have left meanwhile are skipped."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for serial, each in committed:
            outbox = self._outboxes.get(serial)
            if outbox is None:
                continue
            if isinstance(each, PacelineError):
                outbox.fail(each)
            else:
                outbox.put(each, now_s)
        if self._timer is None:
            due_s = self._emptied_s + min(self._longest_s, self._per_session_s * len(self))
            if now_s >= due_s:
                self._empty()
            elif any(outbox.holds_back for outbox in self._outboxes.values()):
                self._timer = loop.call_at(due_s, self._empty)

    def show_life(self, serials: Iterable[int]) -> None:
        """Sends signs of life for those of these sessions that have been silent; call it while they make progress."""
        now_s = asyncio.get_running_loop().time()
        for serial in serials:
            self._outboxes[serial].show_life(now_s)

    def fail(self, serial: int, error: PacelineError) -> None:
        """Ends one session, if it has not left meanwhile."""
        outbox = self._outboxes.get(serial)
        if outbox is not None:
            outbox.fail(error)

    def fail_all(self, error: PacelineError) -> None:
        for outbox in self._outboxes.values():
            outbox.fail(error)

    def _empty(self) -> None:
        self._timer = None
        self._emptied_s = asyncio.get_running_loop().time()
        for outbox in self._outboxes.values():
            outbox.empty(self._emptied_s)


def _size(committed: CommittedTokens) -> int:
    """An upper bound of its bytes on the wire."""
    judged = sum(1 + len(each.top) for each in (*committed.logprobs, *committed.prompt_logprobs))
    return MESSAGE_BYTES + ENTRY_BYTES * (len(committed.token_ids) + judged)


def joined(parts: Sequence[CommittedTokens]) -> CommittedTokens:
    """One message with the tokens of several steps of a session, in order."""
    if len(parts) == 1:
        return parts[0]
    return CommittedTokens(
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        fates=tuple(fate for part in parts for fate in part.fates),
        logprobs=tuple(position for part in parts for position in part.logprobs),
        result=parts[-1].result,
        lossy=any(part.lossy for part in parts),
        offset=parts[0].offset,
        running=any(part.running for part in parts),
        prompt_logprobs=tuple(position for part in parts for position in part.prompt_logprobs),
        speculation=next((part.speculation for part in reversed(parts) if part.speculation is not None), None),
        prompt_offset=next((part.prompt_offset for part in parts if part.prompt_logprobs), 0),
    )

"""The messages between a proposer and its helper process, and their bytes.

Both run the same release on one host: a message is its length and an array of native 64-bit numbers. The proposer sends
one message for each step of vLLM. The helper answers the awaited ones, and reports when the proposer should start or
stop waiting. Most steps are not awaited: the proposer finds its guesses on the helper's board.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_INTEGERS = "q"
_ITEM = array(_INTEGERS).itemsize
NS_PER_S = 1e9
# Far more than any step of vLLM needs.
MOST_BYTES = 1 << 30


class BrokenMessageError(Exception):
    """The bytes are not a message of ours."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """One row of vLLM's batch after a step.

    Attributes:
        session: Number of its session.
        base_len: Tokens of the session that the helper knows; 0: the session is opened, perhaps again.
        token_ids: The tokens after these.
        reads: Its prompt is still being read, so it takes no guesses in the next step.
        num_verified: Its guesses that the step verified.
    """

    session: int
    base_len: int
    token_ids: Sequence[int]
    reads: bool = False
    num_verified: int = 0

    @property
    def length(self) -> int:
        """Tokens of the session after the step."""
        return self.base_len + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a step of vLLM means to the helper.

    Attributes:
        rows: Those that have a session, in vLLM's order.
        places: Index of each of them in vLLM's batch.
        closed: Sessions that have ended.
    """

    rows: Sequence[RowTokens]
    places: Sequence[int]
    closed: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepMessage:
    """From the proposer: a step of vLLM has ended.

    Attributes:
        step: Number of the step.
        began_s: When vLLM asked for guesses, monotonic seconds of this host.
        awaited: The proposer waits for a `ChainsMessage` of this step.
        rows: In the order of vLLM's rows.
        closed: Sessions that have ended.
        taken: The guesses of each row that the proposer has found on the board, for the next step; of a step that is
            not awaited. No lists if it has not looked.
    """

    step: int
    began_s: float
    awaited: bool
    rows: Sequence[RowTokens] = ()
    closed: Sequence[int] = ()
    taken: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class ChainsMessage:
    """From the helper: guesses for the rows of a step.

    Attributes:
        step: Number of the step they are for.
        awaits: Whether the proposer should wait for guesses in the next steps; not while drafters are idle.
        chains: A list of guesses for each row, possibly empty; no lists if the step was not awaited.
    """

    step: int
    awaits: bool
    chains: Sequence[Sequence[int]] = ()


def step_bytes(message: StepMessage) -> bytes:
    """Encodes a step, with its length in front."""
    numbers = array(_INTEGERS, (message.step, round(message.began_s * NS_PER_S), message.awaited))
    numbers.extend((len(message.rows), len(message.closed), len(message.taken)))
    for row in message.rows:
        numbers.extend((row.session, row.base_len, row.reads, row.num_verified, len(row.token_ids)))
    for row in message.rows:
        numbers.extend(row.token_ids)
    numbers.extend(message.closed)
    _add_chains(numbers, message.taken)
    return _framed(numbers)


def chains_bytes(message: ChainsMessage) -> bytes:
    """Encodes a helper's message, with its length in front."""
    numbers = array(_INTEGERS, (message.step, message.awaits, len(message.chains)))
    _add_chains(numbers, message.chains)
    return _framed(numbers)


def step_from(content: bytes) -> StepMessage:
    """Decodes a step.

    Raises:
        BrokenMessageError: It is malformed.
    """
    numbers = _Numbers(content)
    step, began_ns, awaited, num_rows, num_closed, num_taken = numbers.take(6)
    heads = [numbers.take(5) for _ in range(num_rows)]
    rows = [
        RowTokens(session, base_len, numbers.take(count), bool(reads), num_verified)
        for session, base_len, reads, num_verified, count in heads
    ]
    closed, taken = numbers.take(num_closed), numbers.take_chains(num_taken)
    if num_taken not in (0, num_rows):
        raise BrokenMessageError(f"guesses of {num_taken} rows out of {num_rows}")
    return StepMessage(step, began_ns / NS_PER_S, bool(awaited), rows, closed, taken)


def chains_from(content: bytes) -> ChainsMessage:
    """Decodes a helper's message.

    Raises:
        BrokenMessageError: It is malformed.
    """
    numbers = _Numbers(content)
    step, awaits, num_rows = numbers.take(3)
    return ChainsMessage(step, bool(awaits), numbers.take_chains(num_rows))


class Frames:
    """Cuts a stream of bytes into the contents of its messages.

    Args:
        most_bytes: No message is longer.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._bytes = bytearray()
        self._most_bytes = most_bytes

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Adds received bytes, and yields the messages that are complete.

        Raises:
            BrokenMessageError: A message claims to be too long.
        """
        self._bytes += received
        while len(self._bytes) >= _ITEM:
            length = int.from_bytes(self._bytes[:_ITEM], "little")
            if length > self._most_bytes:
                raise BrokenMessageError(f"a message of {length} bytes")
            if len(self._bytes) < _ITEM + length:
                return
            content = bytes(self._bytes[_ITEM : _ITEM + length])
            del self._bytes[: _ITEM + length]
            yield content


class _Numbers:
    """The numbers of a message, read from first to last."""

    def __init__(self, content: bytes) -> None:
        if len(content) % _ITEM:
            raise BrokenMessageError(f"{len(content)} bytes are no whole numbers")
        self._numbers = array(_INTEGERS, content)
        self._at = 0

    def take(self, count: int) -> Sequence[int]:
        """Returns the next `count` numbers."""
        taken = self._numbers[self._at : self._at + count]
        if count < 0 or len(taken) < count:
            raise BrokenMessageError("a message ends within itself")
        self._at += count
        return taken

    def take_chains(self, count: int) -> list[Sequence[int]]:
        """Returns the next `count` lists, whose lengths stand in front of them all."""
        return [self.take(length) for length in self.take(count)]


def _add_chains(numbers: array[int], chains: Sequence[Sequence[int]]) -> None:
    numbers.extend(map(len, chains))
    for chain in chains:
        numbers.extend(chain)


def _framed(numbers: array[int]) -> bytes:
    content = numbers.tobytes()
    return len(content).to_bytes(_ITEM, "little") + content

"""What a proposer and its helper process say to one another, and the bytes of it.

Both run on one host and are of one release: a message is an array of native 64-bit numbers behind its length. The
proposer sends one message a step of vLLM; the helper answers those that are waited for, and says besides when the next
ones are to be waited for or are not any more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_INTEGERS = "q"
_ITEM = array(_INTEGERS).itemsize
NS_PER_S = 1e9
# Far more than a step of any vLLM holds; a longer length is no message.
MOST_BYTES = 1 << 30


class BrokenMessageError(Exception):
    """Bytes that are no message: the other end is not what we think."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """One row of vLLM's batch after a step.

    Attributes:
        session: Number of the session that the row is of.
        base_len: Tokens of it that the helper knows; 0: it is opened, anew or for the first time.
        token_ids: Those after them.
        reads: Its prompt is still being read: it takes no guesses in the next step.
        num_verified: Guesses of it that were verified in the step.
    """

    session: int
    base_len: int
    token_ids: Sequence[int]
    reads: bool = False
    num_verified: int = 0


@dataclass(frozen=True, slots=True)
class StepMessage:
    """From the proposer: a step of vLLM is over.

    Attributes:
        step: Number of the step.
        began_s: When vLLM asked for guesses, monotonic seconds of this host.
        awaited: The proposer waits for a `ChainsMessage` of this step.
        rows: In the order of vLLM's rows.
        closed: Sessions that are over.
    """

    step: int
    began_s: float
    awaited: bool
    rows: Sequence[RowTokens] = ()
    closed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ChainsMessage:
    """From the helper: guesses for the rows of a step.

    Attributes:
        step: Number of the step they are for.
        awaits: Whether the proposer is to wait for the guesses of the steps to come; not while drafters rest.
        chains: A list of guesses a row, empty ones too; none at all where nobody waits for them.
    """

    step: int
    awaits: bool
    chains: Sequence[Sequence[int]] = ()


def step_bytes(message: StepMessage) -> bytes:
    """A step's message, its length before it."""
    numbers = array(_INTEGERS, (message.step, round(message.began_s * NS_PER_S), message.awaited))
    numbers.extend((len(message.rows), len(message.closed)))
    for row in message.rows:
        numbers.extend((row.session, row.base_len, row.reads, row.num_verified, len(row.token_ids)))
    for row in message.rows:
        numbers.extend(row.token_ids)
    numbers.extend(message.closed)
    return _framed(numbers)


def chains_bytes(message: ChainsMessage) -> bytes:
    """A helper's message, its length before it."""
    numbers = array(_INTEGERS, (message.step, message.awaits, len(message.chains)))
    numbers.extend(map(len, message.chains))
    for chain in message.chains:
        numbers.extend(chain)
    return _framed(numbers)


def step_from(content: bytes) -> StepMessage:
    """The message in a frame.

    Raises:
        BrokenMessageError: It is none.
    """
    numbers = _Numbers(content)
    step, began_ns, awaited, num_rows, num_closed = numbers.take(5)
    heads = [numbers.take(5) for _ in range(num_rows)]
    rows = [
        RowTokens(session, base_len, numbers.take(count), bool(reads), num_verified)
        for session, base_len, reads, num_verified, count in heads
    ]
    return StepMessage(step, began_ns / NS_PER_S, bool(awaited), rows, numbers.take(num_closed))


def chains_from(content: bytes) -> ChainsMessage:
    """The message in a frame.

    Raises:
        BrokenMessageError: It is none.
    """
    numbers = _Numbers(content)
    step, awaits, num_rows = numbers.take(3)
    return ChainsMessage(step, bool(awaits), [numbers.take(count) for count in numbers.take(num_rows)])


class Frames:
    """Cuts a stream of bytes into the contents of messages.

    Args:
        most_bytes: No message is longer.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._bytes = bytearray()
        self._most_bytes = most_bytes

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Takes in what came, and gives out the messages that are complete.

        Raises:
            BrokenMessageError: A length that no message has.
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
    """The numbers of a message, from the first to the last."""

    def __init__(self, content: bytes) -> None:
        if len(content) % _ITEM:
            raise BrokenMessageError(f"{len(content)} bytes are no whole numbers")
        self._numbers = array(_INTEGERS, content)
        self._at = 0

    def take(self, count: int) -> Sequence[int]:
        """The next so many."""
        taken = self._numbers[self._at : self._at + count]
        if count < 0 or len(taken) < count:
            raise BrokenMessageError("a message ends within itself")
        self._at += count
        return taken


def _framed(numbers: array[int]) -> bytes:
    content = numbers.tobytes()
    return len(content).to_bytes(_ITEM, "little") + content

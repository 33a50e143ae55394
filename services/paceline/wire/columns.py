"""Reads and writes the columns of messages: numbers of four bytes, little-endian, one a session, a node or a token.

Compiled loops check no bounds, so this is the only way in. The result is as long as the message says, and each
number lies within what its reader has.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from paceline.core.errors import RemoteProtocolError
from paceline.core.messages import Floats, Ints, sizes_of

MAX_NUMBER = 2**31 - 1
# No verifier or drafter serves more sessions (`--max-num-seqs`), so that no message names more.
MAX_SESSIONS = 65_536
WORD, FLOAT = np.dtype("<u4"), np.dtype("<f4")


def to_bytes(column: Ints) -> bytes:
    return column.astype(WORD, copy=False).tobytes()


def read(message: Message, field: str, size: int | None = None, *, low: int = 0, high: int = MAX_NUMBER) -> Ints:
    """Decodes a column of whole numbers, int32 `[size]`.

    Args:
        size: Entries that must be there; None: any number of them.
        low: Least number allowed.
        high: Highest number allowed, at most `MAX_NUMBER`.

    Raises:
        RemoteProtocolError: It is not such a column.
    """
    words = _words(message, field, size)
    if len(words):
        # As unsigned numbers, and then as Python's: nothing wraps.
        least, most = int(np.minimum.reduce(words)) if low else 0, int(np.maximum.reduce(words))
        if least < low or most > high:
            got = least if least < low else most
            raise RemoteProtocolError(f"{_name(message, field)}: must be from {low} to {high}, got {got}")
    return words.astype(np.int32)


def read_shares(message: Message, field: str, size: int) -> Floats:
    """Decodes a column of numbers from 0 to 1, float64 `[size]`.

    Raises:
        RemoteProtocolError: It is not such a column.
    """
    shares = _words(message, field, size).view(FLOAT).astype(np.float64)
    if not ((shares >= 0.0) & (shares <= 1.0)).all():
        raise RemoteProtocolError(f"{_name(message, field)}: must be numbers from 0 to 1")
    return shares


def read_sessions(
    message: Message, entries: str, *, low: int = 0, last_number: int = MAX_NUMBER, most_entries: int = MAX_NUMBER
) -> tuple[Ints, Ints, Ints]:
    """Decodes `sessions`, `ends` and a column of entries: which sessions there are, and what belongs to each.

    Args:
        entries: Name of the column that `ends` divides.
        low: Least number in that.
        last_number: The highest that a session has.
        most_entries: Most entries of a session.

    Raises:
        RemoteProtocolError: A session is named twice, or is nobody's, or the ends do not divide the entries.
    """
    kind = message.DESCRIPTOR.name
    numbers, values = read(message, "sessions", low=1, high=last_number), read(message, entries, low=low)
    check_count(f"{kind}.sessions", len(numbers), MAX_SESSIONS)
    ends = read(message, "ends", len(numbers))
    sizes = sizes_of(ends).tolist()
    if min(sizes, default=0) < 0 or sum(sizes) != len(values):
        raise RemoteProtocolError(f"{kind}.ends: must grow, up to the {len(values)} entries of {entries}")
    check_count(f"{kind}.{entries}: a session", max(sizes, default=0), most_entries)
    # Not `np.unique`: its first call imports masked arrays, and holds the event loop for a tenth of a second.
    if len({*numbers.tolist()}) != len(numbers):
        raise RemoteProtocolError(f"{kind}.sessions: names a session twice")
    return numbers, ends, values


def check_size(name: str, size: int, expected: int) -> None:
    """Refuses a field that has not the entries that others say it has."""
    if size != expected:
        raise RemoteProtocolError(f"{name}: has {size} entries, where {expected} are expected")


def check_count(name: str, count: int, most: int) -> None:
    """Refuses a field with more entries than its sender was asked for, before anything is made of them."""
    if count > most:
        raise RemoteProtocolError(f"{name}: has {count} entries, at most {most} are allowed")


def _name(message: Message, field: str) -> str:
    return f"{message.DESCRIPTOR.name}.{field}"


def _words(message: Message, field: str, size: int | None) -> npt.NDArray[np.uint32]:
    data = getattr(message, field)
    if len(data) % WORD.itemsize:
        name = _name(message, field)
        raise RemoteProtocolError(f"{name}: must hold numbers of {WORD.itemsize} bytes, got {len(data)} bytes")
    if size is not None and len(data) != size * WORD.itemsize:
        check_size(_name(message, field), len(data) // WORD.itemsize, size)
    return np.frombuffer(data, WORD)

"""Reads and writes the columns of messages: numbers of four bytes, little-endian, one a session, a node or a token.

Compiled loops check no bounds, so this is the only way in. The result is as long as the message says, and each
number lies within what its reader has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

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


def read_columns(
    message: Message,
    sessions: Sequence[str],
    entries: Sequence[str],
    *,
    low: int = 0,
    last_number: int = MAX_NUMBER,
    most_entries: int = MAX_NUMBER,
) -> list[Ints]:
    """Decodes the columns of a message, int32 each: `sessions` and `ends`, and the named ones.

    Args:
        sessions: Further columns with a number a session.
        entries: Columns that `ends` divides.
        low: Least number in the first of these.
        last_number: The highest that a session has.
        most_entries: Most entries of a session.

    Raises:
        RemoteProtocolError: A column has another length, a number is outside its limits, a session is named twice or is
            nobody's, or the ends do not divide the entries.
    """
    kind, names = message.DESCRIPTOR.name, ("sessions", "ends", *sessions, *entries)
    data = [getattr(message, name) for name in names]
    lengths, first = [*map(len, data)], len(names) - len(entries)
    for place, length in enumerate(lengths):
        if length % WORD.itemsize:
            name = f"{kind}.{names[place]}"
            raise RemoteProtocolError(f"{name}: must hold numbers of {WORD.itemsize} bytes, got {length} bytes")
        if length != (expected := lengths[first if place >= first else 0]):
            check_size(f"{kind}.{names[place]}", length // WORD.itemsize, expected // WORD.itemsize)
    # All columns at once, as unsigned numbers and then as Python's: nothing wraps.
    words = np.frombuffer(b"".join(data), WORD)
    stops = [stop // WORD.itemsize for stop in accumulate(lengths)]
    if len(words) and np.maximum.reduce(words) > MAX_NUMBER:
        for name, column in zip(names, np.split(words, stops), strict=False):
            _check_range(f"{kind}.{name}", column, 0, MAX_NUMBER)
    values = words.astype(np.int32)
    columns = [values[start:stop] for start, stop in zip((0, *stops), stops, strict=False)]
    check_count(f"{kind}.sessions", len(columns[0]), MAX_SESSIONS)
    # Not `np.unique`: its first call imports masked arrays, and holds the event loop for a tenth of a second.
    named = {*columns[0].tolist()}
    if named and (min(named) < 1 or max(named) > last_number):
        _check_range(f"{kind}.sessions", columns[0], 1, last_number)
    if low:
        _check_range(f"{kind}.{entries[0]}", columns[first], low, MAX_NUMBER)
    _check_ends(kind, entries[0], columns[1], len(columns[first]), most_entries)
    if len(named) != len(columns[0]):
        raise RemoteProtocolError(f"{kind}.sessions: names a session twice")
    return columns


def read_shares(name: str, data: bytes, size: int) -> Floats:
    """Decodes a column of numbers from 0 to 1, float64 `[size]`.

    Raises:
        RemoteProtocolError: It is not such a column.
    """
    check_size(name, len(data) / FLOAT.itemsize, size)
    shares = np.frombuffer(data, FLOAT).astype(np.float64)
    if not ((shares >= 0.0) & (shares <= 1.0)).all():
        raise RemoteProtocolError(f"{name}: must be numbers from 0 to 1")
    return shares


def _check_range(name: str, column: npt.NDArray[Any], least: int, most: int) -> None:
    if len(column) and (np.minimum.reduce(column) < least or np.maximum.reduce(column) > most):
        got = next(each for each in column.tolist() if not least <= each <= most)
        raise RemoteProtocolError(f"{name}: must be from {least} to {most}, got {got}")


def _check_ends(kind: str, entries: str, ends: Ints, size: int, most: int) -> None:
    sizes = sizes_of(ends)
    if np.minimum.reduce(sizes, initial=0) < 0 or (ends[-1] if len(ends) else 0) != size:
        raise RemoteProtocolError(f"{kind}.ends: must grow, up to the {size} entries of {entries}")
    check_count(f"{kind}.{entries}: a session", int(np.maximum.reduce(sizes, initial=0)), most)


def check_size(name: str, size: float, expected: int) -> None:
    """Refuses a field that has not the entries that others say it has."""
    if size != expected:
        raise RemoteProtocolError(f"{name}: has {size:.10g} entries, where {expected} are expected")


def check_count(name: str, count: int, most: int) -> None:
    """Refuses a field with more entries than its sender was asked for, before anything is made of them."""
    if count > most:
        raise RemoteProtocolError(f"{name}: has {count} entries, at most {most} are allowed")

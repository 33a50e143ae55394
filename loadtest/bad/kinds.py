"""Kinds of bad messages, and the seeded stream of messages of all kinds of a door. Pure: it sends nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# Sent parts: an HTTP request, or the messages of a call in order.
Parts = tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Facts of the model that messages need to be bad in one point only."""

    vocab_hash: str
    vocab_size: int
    context_len: int


def unrefused(_: bytes) -> str:
    """Accepts any answer whose status says all."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to be bad.

    Attributes:
        name: Shown in the table.
        make: The bytes: of an HTTP request, or of the messages of a call, in order.
        right: Statuses that are right for it, of HTTP or gRPC.
        names: Must be found in the body of a 400, as a regular expression: what was wrong; empty: anything is right.
        method: Full name of the gRPC method; empty for HTTP.
        weight: How often it comes, relative to the others of its door.
        ends_call: The service must end a stream by itself; otherwise the sender ends its side after the last message.
        refusal: Text that stands for the status, if it is found in an answer's message; empty: none.
    """

    name: str
    make: Callable[[random.Random, Target], Parts]
    right: frozenset[str]
    names: str = ""
    method: str = ""
    weight: float = 1.0
    ends_call: bool = False
    refusal: Callable[[bytes], str] = unrefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """A bad message, or several that make one bad call."""

    kind: Kind
    parts: Parts


def bad_messages(kinds: Sequence[Kind], target: Target, seed: int, count: int) -> Iterator[Bad]:
    """Yields `count` bad messages of these kinds; each depends on seed and number alone."""
    weights = [kind.weight for kind in kinds]
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        [kind] = chance.choices(kinds, weights)
        yield Bad(kind=kind, parts=kind.make(chance, target))


def junk(chance: random.Random, longest: int = 64) -> bytes:
    """Returns random bytes, at least one."""
    return chance.randbytes(chance.randint(1, longest))


def posted(path: str, body: bytes, method: str = "POST") -> Parts:
    """Returns an HTTP request with a body of JSON."""
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: fleet\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    return (head.encode() + b"\r\n" + body,)

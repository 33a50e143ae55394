"""The trees of a helper in memory that its proposer reads, so that most steps need no answer.

The helper writes each session's tree as it grows. The proposer follows committed tokens down it, takes the chain of
highest survival below them, and informs the helper afterwards. A record that is read while it is written has another
checksum: the whole step then asks the helper, and waits. A record that is behind ends where the text has left it, which
costs its session's guesses alone.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.goodput import is_worth
from paceline.forest import ROOT

# Nodes of a session; a drafter has room for about as many at seven guesses a step.
MOST_NODES = 256
# A session has the place of its number, see `SessionNumbers`; vLLM runs up to 1024 at once.
NUM_RECORDS = 2048
# Checksum of what follows, nodes, session, committed tokens; and the terms below.
_HEAD = struct.Struct("=IIqqdddd")
_TERMS = "least", "price", "child_share", "wait_share"
_NODE = np.dtype([("weight", "f8"), ("token", "i4"), ("parent", "i4")])
_CHECKSUM_BYTES = 4
_RECORD_BYTES = _HEAD.size + MOST_NODES * _NODE.itemsize
BOARD_BYTES = NUM_RECORDS * _RECORD_BYTES


@dataclass(frozen=True, slots=True)
class ReadyDrafts:
    """The guesses of a session for the next step.

    Attributes:
        token_ids: A chain, which begins with the next token.
        expected: Tokens that a step with it commits.
        gain: Gain of its drafter's next nodes; 0: nothing, or none are to come.
        wait_share: Waiting time for them, in steps.
    """

    token_ids: Sequence[int]
    expected: float
    gain: float
    wait_share: float


# Of a session whose request takes none.
NO_DRAFTS = ReadyDrafts((), expected=1.0, gain=0.0, wait_share=math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardTree:
    """A session's tree, as it was when the helper wrote it; parents stand before children.

    Attributes:
        committed_len: Tokens above it.
        least: Least survival worth verifying.
        price: Least survival that the drafter drafts.
        child_share: Survival of a node's best child over its own, as the drafter guesses.
        wait_share: Usual time of the drafter's answer, in steps; NaN: none is to come.
        weights: Logarithms of survivals, `[nodes]`; -inf: a node must not be chosen.
        token_ids: `[nodes]`.
        parents: `[nodes]`, index of a node or ROOT.
    """

    committed_len: int
    least: float
    price: float
    child_share: float
    wait_share: float
    weights: Sequence[float]
    token_ids: Sequence[int]
    parents: Sequence[int]

    def at_hand(self, new_token_ids: Sequence[int], most: int) -> ReadyDrafts:
        """Drafts in the tree below the tokens that were committed since.

        Args:
            new_token_ids: They come after the first `committed_len`.
            most: Guesses.
        """
        root = self._followed(new_token_ids)
        if root is None:
            return self._chain([], [], is_leaf=most > 0)
        above = self.weights[root] if root != ROOT else 0.0
        token_ids: list[int] = []
        survivals: list[float] = []
        node = self._best_child(root)
        while node is not None and len(token_ids) < most:
            survival = math.exp(min(0.0, self.weights[node] - above))
            if survival < self.least:
                break
            token_ids.append(self.token_ids[node])
            survivals.append(survival)
            node = self._best_child(node)
        return self._chain(token_ids, survivals, is_leaf=node is None and len(token_ids) < most)

    def _chain(self, token_ids: list[int], survivals: list[float], *, is_leaf: bool) -> ReadyDrafts:
        child = self.child_share * (survivals[-1] if survivals else 1.0)
        gain = child if is_leaf and child > self.price and not math.isnan(self.wait_share) else 0.0
        return ReadyDrafts(token_ids, 1.0 + sum(survivals), gain, self.wait_share)

    def _followed(self, token_ids: Sequence[int]) -> int | None:
        """The node of the last of some tokens; None: they were not all guessed."""
        node = ROOT
        for token_id in token_ids:
            for child in range(node + 1, len(self.parents)):
                if self.parents[child] == node and self.token_ids[child] == token_id:
                    node = child
                    break
            else:
                return None
        return node if node == ROOT or self.weights[node] > -math.inf else None

    def _best_child(self, node: int) -> int | None:
        best, weight = None, -math.inf
        for child in range(node + 1, len(self.parents)):
            if self.parents[child] == node and self.weights[child] > weight:
                best, weight = child, self.weights[child]
        return best


def worth_waiting(at_hand: Sequence[ReadyDrafts]) -> bool:
    """Whether a step over these sessions should wait for their drafters: the rule of `StepDrafts.worth_waiting`."""
    gainful = [each for each in at_hand if each.gain > 0.0]
    if not gainful:
        return False
    gain, expected = sum(each.gain for each in gainful), sum(each.expected for each in at_hand)
    return is_worth(gain, expected, cost_s=min(each.wait_share for each in gainful), step_s=1.0)


class SessionNumbers:
    """Gives sessions numbers that grow, each with a place on the board that no other session has.

    Beyond `NUM_RECORDS` sessions some share a place. While both run, no step can be taken from the board.
    """

    def __init__(self) -> None:
        self._last = 0
        # The session of each place that is taken.
        self._holders: dict[int, int] = {}

    def take(self) -> int:
        """The number of a new session."""
        further = range(self._last + 1, self._last + 1 + NUM_RECORDS)
        number = next((each for each in further if each % NUM_RECORDS not in self._holders), self._last + 1)
        self._last = self._holders[number % NUM_RECORDS] = number
        return number

    def free(self, number: int) -> None:
        """A session is over."""
        if self._holders.get(number % NUM_RECORDS) == number:
            del self._holders[number % NUM_RECORDS]

    def free_all(self) -> None:
        """All sessions are over; later ones have higher numbers all the same."""
        self._holders.clear()


class SharedTrees:
    """The memory that a helper writes and its proposer reads.

    Args:
        file: File number from `make_board`; this object keeps no hold of the number.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, BOARD_BYTES)

    def write(self, session: int, tree: BoardTree) -> None:
        """Puts a tree in its session's place; of more nodes than there is room for, the first."""
        count = min(len(tree.parents), MOST_NODES)
        nodes = np.empty(count, _NODE)
        nodes["weight"], nodes["token"] = tree.weights[:count], tree.token_ids[:count]
        nodes["parent"] = tree.parents[:count]
        terms = tree.least, tree.price, tree.child_share, tree.wait_share
        content = _HEAD.pack(0, count, session, tree.committed_len, *terms)[_CHECKSUM_BYTES:] + nodes.tobytes()
        place = session % NUM_RECORDS * _RECORD_BYTES
        self._memory[place : place + _CHECKSUM_BYTES + len(content)] = _checksum(content) + content

    def read(self, session: int) -> BoardTree | None:
        """Returns a session's tree; None: it has none, or it is being written."""
        place = session % NUM_RECORDS * _RECORD_BYTES
        record = self._memory[place : place + _RECORD_BYTES]
        _, count, found, committed_len, *terms = _HEAD.unpack_from(record)
        if found != session or count > MOST_NODES:
            return None
        if _checksum(record[_CHECKSUM_BYTES : _HEAD.size + count * _NODE.itemsize]) != record[:_CHECKSUM_BYTES]:
            return None
        nodes = np.frombuffer(record, _NODE, count, _HEAD.size)
        return BoardTree(
            committed_len=committed_len,
            **dict(zip(_TERMS, terms, strict=True)),
            weights=nodes["weight"].tolist(),
            token_ids=nodes["token"].tolist(),
            parents=nodes["parent"].tolist(),
        )

    def close(self) -> None:
        """Gives the memory back."""
        self._memory.close()


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, sys.byteorder)


def make_board() -> int:
    """Returns the file of an empty board, which the caller closes."""
    file = os.memfd_create("paceline-board", os.MFD_CLOEXEC)
    os.ftruncate(file, BOARD_BYTES)
    return file

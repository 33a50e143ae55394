"""Pages and scratch slots as numbers: who holds which, and which full pages hold a known prefix. No tensors here.

"Prefill" and "decode" are not two worlds: a session's `num_computed` catches up with its tokens.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.errors import LocalProtocolError

# Tokens of a block, and so slots.
BLOCK_SIZE = 16
# Fewer blocks serve nobody.
LEAST_PAGES = 8
HASH_BYTES = 16


def block_hash(parent: bytes | None, token_ids: Sequence[int]) -> bytes:
    """Names a full block by its tokens and all tokens before them; strong, because a collision would mix sessions."""
    digest = hashlib.blake2b(parent or b"", digest_size=HASH_BYTES)
    digest.update(np.asarray(token_ids, np.uint32).tobytes())
    return digest.digest()


def salted_root(salt: str) -> bytes | None:
    """Names the beginning of all sequences of a salt, so that those of another find none of their blocks."""
    return hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"cache salt").digest() if salt else None


def longest_session(num_blocks: int) -> int:
    """Most tokens of a session that always finds room in so many blocks once nobody else holds any."""
    return (num_blocks - 1) * BLOCK_SIZE


def target_scratch_blocks(max_num_batched_tokens: int) -> int:
    """Blocks a verifier sets aside: every row of a step may be a tree node."""
    return -(-max_num_batched_tokens // BLOCK_SIZE)


def draft_scratch_blocks(num_blocks: int) -> int:
    """Blocks a drafter sets aside: the trees of all sessions, grown ahead of the commits."""
    return max(1, num_blocks // 4)


class BlockPool:
    """Reference-counted blocks; full ones whose tokens are known stay findable until their place is needed.

    Args:
        num_blocks: Blocks 0 to `num_blocks` - 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_queries = 0
        self._num_hits = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Cached blocks that no session holds, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._idle)

    def match_prefix(
        self, token_ids: Sequence[int], before: bytes | None = None, names: list[bytes] | None = None
    ) -> tuple[list[int], list[bytes]]:
        """Takes hold of the longest cached prefix, leaving at least one token to compute.

        Args:
            token_ids: Tokens of the sequence.
            before: Names what lies before them, as for `register`; None: nothing.
            names: Hashes of the sequence's first blocks that are known; those that are needed are added.

        Returns:
            Its blocks and their hashes; `take_counts` returns how many tokens were looked up, and found.
        """
        blocks: list[int] = []
        names = [] if names is None else names
        for start in range(0, len(token_ids) - BLOCK_SIZE, BLOCK_SIZE):
            if len(blocks) == len(names):
                names.append(block_hash(names[-1] if names else before, token_ids[start : start + BLOCK_SIZE]))
            block = self._block_of.get(names[len(blocks)])
            if block is None:
                break
            self._hold(block)
            blocks.append(block)
        self._num_queries += len(token_ids)
        self._num_hits += len(blocks) * BLOCK_SIZE
        return blocks, names[: len(blocks)]

    def take_counts(self) -> tuple[int, int]:
        """Returns the tokens looked up and those of them found since the last call."""
        counts = (self._num_queries, self._num_hits)
        self._num_queries = self._num_hits = 0
        return counts

    def allocate(self, count: int) -> list[int] | None:
        """Takes fresh blocks, in place of idle cached ones if need be; None, and none taken, if there are too few."""
        if count > len(self._free) + len(self._idle):
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def register(self, block: int, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        """Makes a full block findable by its tokens; of two with the same tokens the first stays the one found.

        Returns:
            Its hash, the parent of the next block's.
        """
        key = block_hash(parent, token_ids)
        if key not in self._block_of and block not in self._hash_of:
            self._block_of[key] = block
            self._hash_of[block] = key
        return key

    def release(self, blocks: Sequence[int]) -> None:
        """Gives blocks back; the last ones of a sequence are forgotten first.

        Raises:
            LocalProtocolError: No session holds a block.
        """
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise LocalProtocolError(f"block {block} is released by a session that does not hold it")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """Makes blocks findable no more, whoever holds them: their content may not be that of their tokens."""
        for block in blocks:
            key = self._hash_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def _hold(self, block: int) -> None:
        self._references[block] += 1
        self._idle.pop(block, None)

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block


class SlotPool:
    """Single slots for the KV of tree nodes, in blocks of their own.

    Args:
        first_block: First of the blocks set aside.
    """

    def __init__(self, first_block: int, num_blocks: int) -> None:
        start = first_block * BLOCK_SIZE
        self.num_slots = num_blocks * BLOCK_SIZE
        self._free = list(range(start + self.num_slots - 1, start - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def take(self) -> int | None:
        """A free slot; None when there is none."""
        return self._free.pop() if self._free else None

    def take_many(self, count: int) -> list[int]:
        """Free slots, as many as there are up to `count`."""
        left = max(0, len(self._free) - count)
        taken = self._free[left:][::-1]
        del self._free[left:]
        return taken

    def give_back(self, *slots: int) -> None:
        self._free.extend(slots)


class SessionPages:
    """Pages of one session's committed tokens.

    Args:
        tokens: The session's committed tokens; the list is shared with the session, which alone appends to it.
        pool: Where blocks come from.
        before: Names what lies before the tokens and decides their KV as well; None: nothing.
    """

    def __init__(self, tokens: Sequence[int], pool: BlockPool, before: bytes | None = None) -> None:
        self.tokens = tokens
        self.blocks: list[int] = []
        self.num_computed = 0
        self.num_cached = 0
        self._pool = pool
        self._before = before
        self._hashes: list[bytes] = []
        # Of its first blocks, computed here or not: one that waits for pages looks for them before each step.
        self._names: list[bytes] = []
        # Of as many blocks as it is long; made anew when there are more, as a long text's are not few.
        self._table = np.empty(0, np.int32)
        # Whether others may find what is computed here.
        self._trusted = True

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """The blocks as an array, int32 `[blocks]`."""
        if len(self._table) != len(self.blocks):
            self._table = np.array(self.blocks, np.int32)
        return self._table

    @property
    def num_missing(self) -> int:
        """Committed tokens whose KV is not computed yet."""
        return len(self.tokens) - self.num_computed

    def slot(self, position: int) -> int:
        """Physical slot of an absolute position that has been reserved."""
        return self.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def moved(self, kept: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
        """Slots, and those of the reserved positions that their KV belongs to, by pairs of slot and position."""
        blocks = self.blocks
        return [(slot, blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE) for slot, at in kept]

    def attach_cached_prefix(self, most: int | None = None) -> int:
        """Takes over the longest cached prefix; at least one token is always left to compute.

        Args:
            most: Tokens of it at most, as the rows of those behind are wanted; None: any number.

        Returns:
            Tokens that need no computing.
        """
        self._trusted = True
        known = self.tokens if most is None else self.tokens[: most + 1]
        self.blocks, self._hashes = self._pool.match_prefix(known, self._before, self._names)
        self._table = np.empty(0, np.int32)
        self.num_computed = self.num_cached = len(self.blocks) * BLOCK_SIZE
        return self.num_cached

    def reserve(self, length: int) -> bool:
        """Makes sure that positions below `length` have slots; False, and nothing taken, when the pool is empty."""
        needed = -(-length // BLOCK_SIZE) - len(self.blocks)
        if needed <= 0:
            return True
        fresh = self._pool.allocate(needed)
        if fresh is None:
            return False
        self.blocks.extend(fresh)
        return True

    def mark_computed(self, length: int) -> None:
        """KV below `length` is in place; full blocks become findable for other sessions."""
        self.num_computed = length
        num_known = len(self._hashes)
        # Most steps fill no block.
        if length < (num_known + 1) * BLOCK_SIZE or not self._trusted:
            return
        for index in range(num_known, length // BLOCK_SIZE):
            start = index * BLOCK_SIZE
            parent = self._hashes[-1] if self._hashes else self._before
            block_tokens = tuple(self.tokens[start : start + BLOCK_SIZE])
            self._hashes.append(self._pool.register(self.blocks[index], parent, block_tokens))

    def forget(self) -> None:
        """Keeps its KV from all other sessions: none of its blocks is found any more, nor those still to come."""
        self._trusted = False
        self._pool.forget(self.blocks)

    def release(self) -> None:
        """Gives all blocks back; the KV must be recomputed, or found in the cache, to go on."""
        self._pool.release(self.blocks)
        self.blocks = []
        self._table = np.empty(0, np.int32)
        self._hashes = []
        self.num_computed = 0

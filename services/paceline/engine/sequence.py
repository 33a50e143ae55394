"""The pages of one session: which blocks hold the KV of its committed tokens, and how far it is computed.

"Prefill" and "decode" are not two worlds here, only `num_computed` catching up with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.blocks import BlockPool
from paceline.engine.kv import BLOCK_SIZE


class KVSequence:
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
        # Whether others may find what is computed here.
        self._trusted = True

    @property
    def num_missing(self) -> int:
        """Committed tokens whose KV is not computed yet."""
        return len(self.tokens) - self.num_computed

    def slot(self, position: int) -> int:
        """Physical slot of an absolute position that has been reserved."""
        return self.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def attach_cached_prefix(self) -> int:
        """Takes over the longest cached prefix; at least one token is always left to compute.

        Returns:
            Tokens that need no computing.
        """
        self._trusted = True
        self.blocks, self._hashes = self._pool.match_prefix(self.tokens, self._before)
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
        if not self._trusted:
            return
        for index in range(len(self._hashes), length // BLOCK_SIZE):
            start = index * BLOCK_SIZE
            parent = self._hashes[-1] if self._hashes else self._before
            block_tokens = tuple(self.tokens[start : start + BLOCK_SIZE])
            self._hashes.append(self._pool.register(self.blocks[index], parent, block_tokens))

    def forget(self) -> None:
        """Its KV is not to be used by anybody else: none of its blocks is found any more, nor those still to come."""
        self._trusted = False
        self._pool.forget(self.blocks)

    def release(self) -> None:
        """Gives all blocks back; the KV must be recomputed, or found in the cache, to go on."""
        self._pool.release(self.blocks)
        self.blocks = []
        self._hashes = []
        self.num_computed = 0

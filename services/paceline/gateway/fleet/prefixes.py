"""Names the beginnings of prompts, and remembers which verifier was sent which. It knows no load."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count

from paceline.core.pages import BLOCK_SIZE

# Only whole pages are reused. The first ones of a prompt are named one by one; beyond them the density halves with
# every doubling.
DENSE_BLOCKS = 64
HASH_BYTES = 8
# For each verifier. A prompt of 4,096 tokens takes 128 names, one of 128 k tokens 288, and later turns share those of
# earlier ones. So this covers at least 2 million tokens of unrelated prompts, more than a verifier has pages for, in
# about 12 MB.
MAX_BLOCKS = 65_536


def covered_tokens(num_blocks: int) -> int:
    """Returns the length in tokens of a prompt's beginning that the first `num_blocks` names stand for.

    The step to the next name is at most 1/32 of what is covered already, so little precision is lost, and the number
    of names grows with the logarithm of the length.
    """
    octave, rest = divmod(max(0, num_blocks - DENSE_BLOCKS), DENSE_BLOCKS // 2)
    return (min(num_blocks, DENSE_BLOCKS) + 2 * rest) * BLOCK_SIZE << octave


def prefix_blocks(model_name: str, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns 64-bit names of a text's beginnings, shortest first; each covers the model and all tokens up to its end.

    Equal in all gateways on machines of the same byte order. A text shorter than a block has none.
    """
    # From Python integers an array is made several times faster than a numpy array.
    tokens = array("I", token_ids)
    content = memoryview(tokens).cast("B")
    digest = blake2b(model_name.encode(), digest_size=HASH_BYTES)
    names: list[int] = []
    begin = 0
    for end in _ends(len(tokens)):
        digest.update(content[begin * tokens.itemsize : end * tokens.itemsize])
        names.append(int.from_bytes(digest.copy().digest(), "little"))
        begin = end
    return tuple(names)


def _ends(num_tokens: int) -> Iterator[int]:
    for num_blocks in count(1):
        end = covered_tokens(num_blocks)
        if end > num_tokens:
            return
        yield end


class PrefixIndex:
    """Which verifier was sent which prefixes by this gateway; the least recently used are forgotten.

    The end of a prompt is forgotten before its beginning. So a verifier that is known to have a prefix has all shorter
    ones too, and bisection finds the longest.

    Args:
        max_blocks: Names remembered for each verifier.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return sum(len(known) for known in self._known.values())

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """The verifiers with any known prefix."""
        return tuple(self._known)

    def longest(self, blocks: Sequence[int]) -> dict[str, int]:
        """Returns how many leading blocks each verifier knows; those that know none are left out."""
        lengths = {replica_id: _num_leading(known, blocks) for replica_id, known in self._known.items()}
        return {replica_id: length for replica_id, length in lengths.items() if length}

    def add(self, replica_id: str, blocks: Sequence[int]) -> None:
        """Remembers that a verifier has the prefixes of a text; what does not fit is forgotten from its end."""
        known = self._known.setdefault(replica_id, OrderedDict())
        for block in reversed(blocks[: self._max_blocks]):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def forget(self, replica_id: str) -> None:
        """Forgets a verifier that has left or may have restarted."""
        self._known.pop(replica_id, None)


def _num_leading(known: Mapping[int, None], blocks: Sequence[int]) -> int:
    return bisect_left(blocks, True, key=lambda block: block not in known)

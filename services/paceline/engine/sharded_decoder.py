"""A decoder cut among ranks: rank 0 tells the others each call before it makes it, they follow.

What is above the decoder (sessions, trees, sampling, sources) runs on rank 0 alone and does not know. Hidden states are
whole on every rank, so rank 0 keeps them alone; KV of its heads lies on each rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from paceline.engine.batch import Batch
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.decoder import Layers, LlamaDecoder
from paceline.engine.kv import KVCache
from paceline.engine.llama import Head, LlamaWeights
from paceline.engine.ranks import Bytes, Ranks
from paceline.engine.shards import ShardReader, share_of

_KINDS: Final = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32))
_ROW_FIELDS: Final = tuple(field.name for field in fields(Batch) if field.name != "features")


class Call(IntEnum):
    """What rank 0 is about to do."""

    FORWARD = 0
    NEW_CACHE = 1
    COPY_SLOTS = 2
    HEAD = 3
    PREPARE = 4
    DISMISS = 5


def pack_call(call: Call, arrays: Sequence[npt.NDArray[Any]]) -> Bytes:
    """A call and its arguments as bytes: lengths and shapes in int64, then the arrays, each from a multiple of 8 on."""
    header = [int(call), len(arrays)]
    for array in arrays:
        header += [_KINDS.index(array.dtype), array.ndim, *array.shape]
    parts = [np.array([len(header), *header], np.int64).tobytes()]
    for array in arrays:
        parts.append(array.tobytes())
        parts.append(bytes(-array.nbytes % 8))
    return np.frombuffer(bytearray().join(parts), np.uint8)


def unpack_call(message: Bytes) -> tuple[Call, list[npt.NDArray[Any]]]:
    """The inverse of `pack_call`; the arrays lie in the message."""
    length = int(message[:8].view(np.int64)[0])
    header = iter(message[8 : 8 * (length + 1)].view(np.int64).tolist())
    call, count = Call(next(header)), next(header)
    start = 8 * (length + 1)
    arrays: list[npt.NDArray[Any]] = []
    for _ in range(count):
        kind, ndim = _KINDS[next(header)], next(header)
        shape = tuple(itertools.islice(header, ndim))
        stop = start + kind.itemsize * int(np.prod(shape, dtype=np.int64))
        arrays.append(message[start:stop].view(kind).reshape(shape))
        start = stop + -stop % 8
    return call, arrays


class ShardedKVCache(KVCache):
    """Rank 0's part of a cache that lies on all ranks: what moves slots here moves them there.

    Args:
        part: This rank's.
        index: Its number among the caches.
        ranks: Who has the other parts.
    """

    def __init__(self, part: KVCache, index: int, ranks: Ranks) -> None:
        self.part, self.index = part, index
        self._ranks = ranks
        self.device, self.num_blocks = part.device, part.num_blocks
        self.keys, self.values, self.states, self.layers = part.keys, part.values, part.states, part.layers

    def copy_slots(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """See `KVCache`."""
        self._ranks.tell(pack_call(Call.COPY_SLOTS, [np.array([self.index]), sources, targets]))
        self.part.copy_slots(sources, targets)


class _ToldHead:
    """The head as sources call it, outside of any step: the other ranks must be told."""

    def __init__(self, head: Head, ranks: Ranks) -> None:
        self._head, self._ranks = head, ranks
        self.nbytes = head.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.float()
        self._ranks.tell(pack_call(Call.HEAD, [rows.cpu().numpy()]))
        return self._head(rows)


class ShardedDecoder(LlamaDecoder):
    """Rank 0's part; see the module docstring.

    Args:
        config: Sizes of this part.
        shape: More of them.
        weights: This rank's.
        ranks: All ranks; the others run `follow`.
    """

    def __init__(self, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights, ranks: Ranks) -> None:
        # No graphs: nobody has seen them recorded with the ranks' sums inside.
        super().__init__(config, shape, weights, static=False)
        self._ranks = ranks
        self._caches: WeakValueDictionary[int, ShardedKVCache] = WeakValueDictionary()
        self._numbers = itertools.count()

    @property
    def head(self) -> Head:
        """See `Decoder`."""
        return _ToldHead(super().head, self._ranks)

    def new_cache(self, num_blocks: int) -> KVCache:
        """An empty cache of `num_blocks` blocks, on all ranks; theirs live as long as this one."""
        index = next(self._numbers)
        kept = np.array(sorted(self._caches), np.int64)
        self._ranks.tell(pack_call(Call.NEW_CACHE, [np.array([index, num_blocks]), kept]))
        cache = ShardedKVCache(super().new_cache(num_blocks), index, self._ranks)
        self._caches[index] = cache
        return cache

    def prepare(self, max_rows: int) -> None:
        """See `Decoder`."""
        self._ranks.tell(pack_call(Call.PREPARE, [np.array([max_rows])]))
        super().prepare(max_rows)

    def forward(self, batch: Batch, cache: KVCache, layers: Layers = None) -> torch.Tensor:
        """See `Decoder`."""
        assert isinstance(cache, ShardedKVCache), "a cache that new_cache made"
        rows = [getattr(batch, name) for name in _ROW_FIELDS]
        only = [] if layers is None else [np.array(layers, np.int64)]
        self._ranks.tell(pack_call(Call.FORWARD, [np.array([cache.index]), *rows, *only]))
        return super().forward(batch, cache.part, layers)


def dismiss(ranks: Ranks) -> None:
    """Rank 0 says that no more calls of this decoder come; the others' `follow` returns."""
    ranks.tell(pack_call(Call.DISMISS, []))


def load_part(
    checkpoint: Checkpoint, config: DecoderConfig, shape: LlamaShape, dtype: torch.dtype, ranks: Ranks
) -> LlamaDecoder:
    """Loads this rank's part: a `ShardedDecoder` on rank 0; elsewhere what `follow` takes.

    Raises:
        ConfigError: The model cannot be cut into so many parts.
    """
    share = share_of(config, shape, ranks.rank, ranks.size)
    weights = ShardReader(checkpoint, share, dtype, ranks).read()
    if ranks.rank == 0:
        return ShardedDecoder(share.config, share.shape, weights, ranks)
    return LlamaDecoder(share.config, share.shape, weights, static=False)


def follow(decoder: LlamaDecoder, ranks: Ranks) -> None:
    """Makes the calls that rank 0 makes, until it says that no more come.

    Raises:
        UnavailableError: A rank is gone.
    """
    caches: dict[int, KVCache] = {}
    while True:
        call, arrays = unpack_call(ranks.hear())
        match call:
            case Call.FORWARD:
                rows = dict(zip(_ROW_FIELDS, arrays[1:], strict=False))
                layers = tuple(arrays[-1].tolist()) if len(arrays) > 1 + len(rows) else None
                decoder.forward(Batch(**rows), caches[int(arrays[0][0])], layers)
            case Call.NEW_CACHE:
                index, num_blocks = arrays[0].tolist()
                caches = {number: caches[number] for number in arrays[1].tolist()}
                caches[index] = decoder.new_cache(num_blocks)
            case Call.COPY_SLOTS:
                caches[int(arrays[0][0])].copy_slots(arrays[1], arrays[2])
            case Call.HEAD:
                decoder.head(torch.from_numpy(arrays[0]).to(decoder.device))
            case Call.PREPARE:
                decoder.prepare(int(arrays[0][0]))
            case Call.DISMISS:
                return

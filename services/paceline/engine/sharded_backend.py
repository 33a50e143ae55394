"""The back end of a decoder that is cut among ranks: rank 0 tells the others each call before it makes it, they follow.

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

from paceline.engine.backends.interface import Backend, Layers, Platform
from paceline.engine.batch import Batch
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.decoder import Decoder
from paceline.engine.hidden_states import StateLayout
from paceline.engine.kv import KVCache
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
        super().__init__(part.keys, part.values, part.states, part.num_blocks)
        self.part, self.index = part, index
        self._ranks = ranks

    def copy_slots(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """See `KVCache`."""
        self._ranks.tell(pack_call(Call.COPY_SLOTS, [np.array([self.index]), sources, targets]))
        self.part.copy_slots(sources, targets)


class ShardedBackend(Backend):
    """Rank 0's part; see the module docstring.

    Args:
        part: Computes it.
        ranks: All ranks; the others run `follow`.
    """

    def __init__(self, part: Backend, ranks: Ranks) -> None:
        self.platform, self.config, self.dtype = part.platform, part.config, part.dtype
        self.hidden_size, self.weight_bytes, self.layer_bytes = part.hidden_size, part.weight_bytes, part.layer_bytes
        self._part, self._ranks = part, ranks
        self._caches: WeakValueDictionary[int, ShardedKVCache] = WeakValueDictionary()
        self._numbers = itertools.count()

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """The head as sources call it, outside of any step: the other ranks must be told."""
        rows = rows.float()
        self._ranks.tell(pack_call(Call.HEAD, [rows.cpu().numpy()]))
        return self._part.head(rows)

    def new_cache(self, num_blocks: int, state_width: int) -> KVCache:
        """An empty cache of `num_blocks` blocks, on all ranks; theirs live as long as this one."""
        index = next(self._numbers)
        kept = np.array(sorted(self._caches), np.int64)
        self._ranks.tell(pack_call(Call.NEW_CACHE, [np.array([index, num_blocks]), kept]))
        cache = ShardedKVCache(self._part.new_cache(num_blocks, state_width), index, self._ranks)
        self._caches[index] = cache
        return cache

    def prepare(self, max_rows: int) -> None:
        """See `Backend`."""
        self._ranks.tell(pack_call(Call.PREPARE, [np.array([max_rows])]))
        self._part.prepare(max_rows)

    def rows_computed(self, rows: int) -> int:
        """See `Backend`."""
        return self._part.rows_computed(rows)

    def forward(self, batch: Batch, cache: KVCache, kept: StateLayout, layers: Layers = None) -> torch.Tensor:
        """See `Backend`."""
        assert isinstance(cache, ShardedKVCache), "a cache that new_cache made"
        rows = [getattr(batch, name) for name in _ROW_FIELDS]
        only = [] if layers is None else [np.array(layers, np.int64)]
        self._ranks.tell(pack_call(Call.FORWARD, [np.array([cache.index]), *rows, *only]))
        return self._part.forward(batch, cache.part, kept, layers)


def dismiss(ranks: Ranks) -> None:
    """Rank 0 says that no more calls of this decoder come; the others' `follow` returns."""
    ranks.tell(pack_call(Call.DISMISS, []))


def load_part(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    shape: LlamaShape,
    dtype: torch.dtype,
    platform: Platform,
    ranks: Ranks,
) -> Backend:
    """Loads this rank's part: a `ShardedBackend` on rank 0; elsewhere what the decoder of `follow` takes.

    Raises:
        ConfigError: The model cannot be cut into so many parts.
    """
    share = share_of(config, shape, ranks.rank, ranks.size)
    part = platform.llama(share.config, share.shape, ShardReader(checkpoint, share, dtype, platform, ranks).read())
    return ShardedBackend(part, ranks) if ranks.rank == 0 else part


def follow(decoder: Decoder, ranks: Ranks) -> None:
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

"""The Llama family on CUDA: steps of up to 512 rows are recorded when the model loads; others run the same kernels.

A step is one copy to the device, a graph, the head, the choice of tokens or guesses, and a copy back: the host waits
when it asks for them (`pending`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from typing_extensions import override

from paceline.engine.backends.cuda.kv import CudaKVCache
from paceline.engine.backends.cuda.pending import Asked, CudaPending
from paceline.engine.backends.cuda.plan import (
    ROWS,
    TABLE_BYTES,
    Array,
    Fields,
    StepBuffer,
    aligned_bytes,
    field_arrays,
    padded,
)
from paceline.engine.backends.cuda.step import CudaLayers
from paceline.engine.backends.cuda.stream import Stream, Work
from paceline.engine.backends.interface import Layers, LlamaBackend, Platform
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.hidden_states import StateLayout
from paceline.engine.kv import KVCache
from paceline.engine.llama import LlamaWeights
from paceline.engine.pending import Ranks, Walks

logger = logging.getLogger(__name__)


class CudaBackend(LlamaBackend):
    """The Llama family on CUDA.

    Args:
        platform: As in `LlamaBackend`, and so the next three.
        shape: More of them.
        stream: What steps run on.
    """

    def __init__(
        self,
        platform: Platform,
        config: DecoderConfig,
        shape: LlamaShape,
        weights: LlamaWeights,
        stream: Stream,
    ) -> None:
        super().__init__(platform, config, shape, weights)
        self.stream = stream
        self._layers = CudaLayers(config, shape, weights)
        self._steps: _Steps | None = None

    @override
    def rows_computed(self, rows: int) -> int:
        return padded(rows)

    @override
    def prepare(self, max_rows: int, cache: KVCache, kept: StateLayout) -> None:
        self._steps_over(cache).record(max_rows, kept)

    @override
    def launch(self, batch: Batch, cache: KVCache, kept: StateLayout, wanted: Walks | Ranks | None) -> CudaPending:
        asked = Asked.of(batch, wanted)
        logits, sent = self._launch(batch, cache, kept, None, asked.arrays)
        return CudaPending(self.stream, logits, asked, sent, self.config.vocab_size)

    @override
    def forward(self, batch: Batch, cache: KVCache, kept: StateLayout, layers: Layers = None) -> torch.Tensor:
        logits, _ = self._launch(batch, cache, kept, layers, {})
        self.stream.mark().wait()
        return logits()

    def _launch(
        self, batch: Batch, cache: KVCache, kept: StateLayout, layers: Layers, arrays: Mapping[str, Array]
    ) -> tuple[Callable[[], torch.Tensor], Mapping[str, torch.Tensor]]:
        """Launches layers and head; returns the logits, once their turn has come, and the arrays on the device."""
        final, sent = self._steps_over(cache).launch(batch, kept, layers, {**arrays, "logit_rows": batch.logit_rows})
        made: list[torch.Tensor] = []
        # The head takes float32 and rounds to its own kind, which is that of these rows.
        self.stream.run(lambda: made.append(self.weights.head(final[sent["logit_rows"]].float())))
        return (lambda: made[0]), sent

    def _steps_over(self, cache: KVCache) -> _Steps:
        """Graphs belong to one cache: those of another one go when it is used for the first time."""
        assert isinstance(cache, CudaKVCache), "a cache that new_cache made"
        if self._steps is None or self._steps.cache is not cache:
            self._steps = _Steps(self._layers, cache, self.stream, self.hidden_size, self.feature_width)
        return self._steps


class _Steps:
    """Steps over one cache, whose addresses graphs hold."""

    def __init__(
        self, layers: CudaLayers, cache: CudaKVCache, stream: Stream, hidden_size: int, feature_width: int
    ) -> None:
        self.cache = cache
        self._layers, self._stream, self._blank = layers, stream, _blank(feature_width, cache.trash)
        widest = self._arrays(self._blank, ROWS[-1])
        self._buffer = StepBuffer(stream, sum(map(aligned_bytes, widest.values())) + TABLE_BYTES)
        self._final = cache.keys.new_empty((ROWS[-1], hidden_size))
        self._recorded: dict[int, Work] = {}
        self._kept: StateLayout | None = None

    def record(self, most_rows: int, kept: StateLayout) -> None:
        """Records steps of up to `most_rows` rows, the largest first: the others fit the memory that it takes."""
        sizes = [rows for rows in reversed(ROWS) if rows <= padded(most_rows)]
        self._recorded = dict(zip(sizes, self._stream.record(self._works(sizes, kept)), strict=True))
        self._kept = kept
        logger.info("steps are recorded", extra={"graphs": len(sizes), "most_rows": sizes[0]})

    def _works(self, sizes: Sequence[int], kept: StateLayout) -> Iterator[Work]:
        """The layers over rows that write to the trash; a buffer lies where it will when such a step comes."""
        for rows in sizes:
            place = Fields.of(self._buffer.send(self._arrays(self._blank, rows)))
            yield partial(self._layers.forward, place, self.cache, kept, self._final[:rows])

    def _arrays(self, batch: Batch, rows: int) -> dict[str, Array]:
        return field_arrays(batch, rows, self.cache.keys.shape[2], self.cache.trash)

    def launch(
        self, batch: Batch, kept: StateLayout, layers: Layers, arrays: Mapping[str, Array]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Writes the rows' KV and states; returns their final hidden states, and the arrays on the device."""
        rows, cache = padded(batch.num_rows), self.cache
        sources, targets = cache.take_moves()
        arrays = {**self._arrays(batch, rows), "sources": sources, "targets": targets, **arrays}
        size = sum(map(aligned_bytes, arrays.values()))
        final = self._final[:rows] if rows <= ROWS[-1] else self._final.new_empty((rows, self._final.shape[1]))
        fits = size <= self._buffer.num_bytes
        sent = (self._buffer if fits else StepBuffer(self._stream, size)).send(arrays)
        if len(sources):
            self._stream.run(lambda: cache.move(sent["sources"], sent["targets"]))
        recorded = self._recorded.get(rows) if fits and layers is None and kept is self._kept else None
        self._stream.run(recorded or partial(self._layers.forward, Fields.of(sent), cache, kept, final, layers))
        return final, sent


def _blank(feature_width: int, trash: int) -> Batch:
    """A row that writes to the trash; it attends a token, since tables without an entry would have no address."""
    zeros, ints = np.zeros(1, np.int64), np.zeros(1, np.int32)
    return Batch(
        token_ids=zeros,
        positions=zeros,
        slots=zeros + trash,
        sequences=ints,
        context_lens=np.ones(1, np.int32),
        ancestors=np.zeros((1, 1), np.int32),
        num_ancestors=ints,
        block_tables=np.zeros((1, 1), np.int32),
        logit_rows=zeros,
        features=np.zeros((1, feature_width), np.float32) if feature_width else None,
    )

"""The Llama family on CUDA: steps of up to 512 rows are recorded when the model loads; others run the same kernels.

A step is one copy to the device, a graph, the head, the choice of tokens or guesses, and a copy back: the host waits
when it asks for them (`pending`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from typing_extensions import override

from paceline.core.features import Features
from paceline.engine.backends.cuda.kv import CudaKVCache
from paceline.engine.backends.cuda.layer_kernels import MOVES
from paceline.engine.backends.cuda.pending import Asked, CudaPending
from paceline.engine.backends.cuda.plan import (
    ROWS,
    TABLE_BYTES,
    Array,
    Fields,
    Ints,
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
from paceline.engine.layers import LlamaWeights
from paceline.engine.levels import below
from paceline.engine.model import Burst, Drafted
from paceline.engine.pending import Ranks, Walks
from paceline.forest import NONE

logger = logging.getLogger(__name__)

# Moves of a step, as far as kernels for them are compiled before the first session.
USUAL_MOVES = MOVES[:2]
# Changes the arrays of a step on the device.
Fill = Callable[[Mapping[str, torch.Tensor]], None]


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
        steps = self._steps_over(cache)
        steps.record(max_rows, kept)
        for count in USUAL_MOVES:
            trash = torch.full((count,), steps.cache.trash, device=self.stream.device)
            self.stream.run(partial(steps.cache.move, trash, trash))

    @override
    def launch(self, batch: Batch, cache: KVCache, kept: StateLayout, wanted: Walks | Ranks | None) -> CudaPending:
        asked = Asked.of(batch, wanted)
        logits, sent = self._launch(batch, cache, kept, None, asked.arrays)
        return CudaPending(self.stream, logits, asked, sent, self.config.vocab_size)

    @override
    def draft(self, batch: Batch, cache: KVCache, kept: StateLayout, burst: Burst) -> Drafted:
        """Launches all levels, each of which takes the best guesses of the one above on the device; then waits once."""
        ranks, going, levels = burst.ranks, np.arange(len(burst.ranks.rows)), list[_Level]()
        pending = self.launch(batch, cache, kept, ranks)
        levels.append(_Level(pending, ranks, going))
        for slots in burst.kv:
            on = np.flatnonzero(slots[going] != NONE)
            if not len(on):
                break
            going, rows = going[on], batch.logit_rows[ranks.rows[on]]
            above, parents = pending, batch.slots[rows]
            batch = below(batch, rows, np.zeros(len(on), np.int32), slots[going], self._no_features)
            ranks = Ranks(batch.logit_rows, ranks.positions[on] + 1, ranks.choices[on])
            asked = Asked.of(batch, ranks)
            fill = partial(self._fill_below, above, cache)
            arrays = {**asked.arrays, "entries": on, "parents": parents}
            logits, sent = self._launch(batch, cache, kept, None, arrays, fill)
            pending = CudaPending(self.stream, logits, asked, sent, self.config.vocab_size)
            levels.append(_Level(pending, ranks, going))
        return _drafted(levels, burst)

    def _no_features(self, slots: Sequence[int]) -> Features:
        """Room for those of the rows above, which are on the device."""
        return np.zeros((len(slots), self.feature_width), np.float32)

    def _fill_below(self, above: CudaPending, cache: KVCache, sent: Mapping[str, torch.Tensor]) -> None:
        """Puts in what only the device knows: the tokens of a level, and hidden states of the rows above."""
        entries = sent["entries"]
        sent["token_ids"][: len(entries)] = above.best()[entries]
        if self.feature_width:
            sent["features"][: len(entries)] = cache.states[sent["parents"]].float()

    @override
    def forward(self, batch: Batch, cache: KVCache, kept: StateLayout, layers: Layers = None) -> torch.Tensor:
        logits, _ = self._launch(batch, cache, kept, layers, {})
        self.stream.mark().wait()
        return logits()

    def _launch(
        self,
        batch: Batch,
        cache: KVCache,
        kept: StateLayout,
        layers: Layers,
        arrays: Mapping[str, Array],
        fill: Fill | None = None,
    ) -> tuple[Callable[[], torch.Tensor], Mapping[str, torch.Tensor]]:
        """Launches layers and head; returns the logits, once their turn has come, and the arrays on the device."""
        arrays = {**arrays, "logit_rows": batch.logit_rows}
        final, sent = self._steps_over(cache).launch(batch, kept, layers, arrays, fill)
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


class _Level(NamedTuple):
    """A level of a burst: its step, what it is asked, and which rows of the burst go on in it."""

    pending: CudaPending
    ranks: Ranks
    going: Ints


def _drafted(levels: Sequence[_Level], burst: Burst) -> Drafted:
    """Waits for the last level, and hands out the guesses of all; none below a row that leaves nothing to choose."""
    shape = 1 + len(burst.kv), len(burst.ranks.rows), burst.width
    token_ids, confidences = np.full(shape, NONE, np.int32), np.zeros(shape)
    alive = np.ones(shape[1], np.bool_)
    if shape[1]:
        levels[-1].pending.wait()
    for place, (pending, ranks, going) in enumerate(levels if shape[1] else ()):
        found = pending.rank(*ranks)
        token_ids[place, going] = np.where(alive[going, None], found.token_ids[:, : burst.width], NONE)
        confidences[place, going] = np.where(alive[going, None], found.confidences[:, : burst.width], 0.0)
        alive[going] &= found.usable
    return Drafted(levels[0].pending, token_ids, confidences)


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
        self, batch: Batch, kept: StateLayout, layers: Layers, arrays: Mapping[str, Array], fill: Fill | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Writes the rows' KV and states; returns their final hidden states, and the arrays on the device.

        Args:
            fill: Changes these arrays there before they are read.
        """
        rows, cache = padded(batch.num_rows), self.cache
        sources, targets = cache.waiting
        arrays = {**self._arrays(batch, rows), "sources": sources, "targets": targets, **arrays}
        size = sum(map(aligned_bytes, arrays.values()))
        final = self._final[:rows] if rows <= ROWS[-1] else self._final.new_empty((rows, self._final.shape[1]))
        fits = size <= self._buffer.num_bytes
        sent = (self._buffer if fits else StepBuffer(self._stream, size)).send(arrays)
        if len(sources):
            self._stream.run(lambda: cache.move(sent["sources"], sent["targets"]))
            cache.moves.clear()
        if fill is not None:
            self._stream.run(partial(fill, sent))
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

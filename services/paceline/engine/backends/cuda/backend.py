"""The Llama family on CUDA: steps of up to 512 rows are recorded when the model loads; others run the same kernels.

A step is one copy to the device, a graph, the head, the choice of tokens or guesses, and a copy back: the host waits
when it asks for them (`pending`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from typing_extensions import override

from paceline.core.calibration import NUM_RANKED
from paceline.core.features import Features
from paceline.core.processors import Truncation
from paceline.engine.backends.cpu.step_kernels import choice_of
from paceline.engine.backends.cuda.choose import Questions, rank
from paceline.engine.backends.cuda.kv import CudaKVCache
from paceline.engine.backends.cuda.layer_kernels import MOVES, go_down
from paceline.engine.backends.cuda.pending import Asked, CudaPending, rankings
from paceline.engine.backends.cuda.plan import (
    LEVEL_ROWS,
    MOST_LEVELS,
    ROWS,
    TABLE_BYTES,
    Array,
    Ints,
    PlanFields,
    StepBuffer,
    aligned_bytes,
    field_arrays,
    level_arrays,
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
from paceline.engine.pending import Ranks, VerifyRequest
from paceline.forest import NONE

logger = logging.getLogger(__name__)

# Moves of a step, as far as kernels for them are compiled before the first session.
USUAL_MOVES = MOVES[:2]
# The choice used for rows that are only recorded.
ANY_CHOICE = choice_of(Truncation())


class CudaBackend(LlamaBackend):
    """The Llama family on CUDA.

    Args:
        platform: As in `LlamaBackend`, and so the next three.
        shape: More of them.
        stream: CUDA stream that steps run on.
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
    def prepare(self, max_rows: int, cache: KVCache, kept: StateLayout, *, drafts: bool) -> None:
        steps = self._steps_over(cache)
        steps.record(max_rows, kept, drafts=drafts)
        for count in USUAL_MOVES:
            trash = torch.full((count,), steps.cache.trash, device=self.stream.device)
            self.stream.run(partial(steps.cache.move, trash, trash))

    @override
    def launch(
        self, batch: Batch, cache: KVCache, kept: StateLayout, wanted: VerifyRequest | Ranks | None
    ) -> CudaPending:
        asked = Asked.of(batch, wanted)
        logits, sent = self._launch(batch, cache, kept, None, asked.arrays)
        return CudaPending(self.stream, logits, asked, sent, self.config.vocab_size)

    @override
    def draft(self, batch: Batch, cache: KVCache, kept: StateLayout, burst: Burst) -> Drafted:
        """Launches all levels, each of which takes the best guesses of the one above on the device; then waits once."""
        first = self.launch(batch, cache, kept, burst.ranks)
        going = np.flatnonzero((burst.kv != NONE).any(axis=0))
        if not len(going):
            return _drafted(first, burst, going, torch.empty(0))
        levels, rows = (burst.kv != NONE).any(axis=1), batch.logit_rows[burst.ranks.rows[going]]
        ranks, kv = Ranks(going, *(column[going] for column in burst.ranks[1:])), burst.kv[levels][:, going]
        ends = below(batch, rows, np.zeros(len(going), np.int32), kv, self._no_features if self.feature_width else None)
        above = replace(ends, slots=batch.slots[rows], positions=batch.positions[rows])
        found = self._steps_over(cache).descend(above, ranks, kv, kept, first.chosen)
        host = self.stream.host_buffer(*found.shape, kind=torch.int32)
        self.stream.copy(host, lambda: found)
        self.stream.mark().wait()
        return _drafted(first, burst, going, host)

    def _no_features(self, slots: Sequence[int]) -> Features:
        """Room for those of the rows above, which are on the device."""
        return np.zeros((len(slots), self.feature_width), np.float32)

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
    ) -> tuple[Callable[[], torch.Tensor], Mapping[str, torch.Tensor]]:
        """Launches layers and head; returns the logits, once their turn has come, and the arrays on the device."""
        arrays = {**arrays, "logit_rows": batch.logit_rows}
        final, sent = self._steps_over(cache).launch(batch, kept, layers, arrays)
        made: list[torch.Tensor] = []
        self.stream.run(lambda: made.append(self._logits(final, sent)))
        return (lambda: made[0]), sent

    def _logits(self, final: torch.Tensor, sent: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits of the rows of a step that are wanted, float32 [n, vocab], from the final states of all."""
        # The head takes float32 and rounds to its own kind, which is that of these rows.
        return self.weights.head(final[sent["logit_rows"]].float())

    def _steps_over(self, cache: KVCache) -> _Steps:
        """Graphs belong to one cache: those of another one go when it is used for the first time."""
        assert isinstance(cache, CudaKVCache), "a cache that new_cache made"
        if self._steps is None or self._steps.cache is not cache:
            self._steps = _Steps(self._layers, self._logits, cache, self.stream, self.hidden_size, self.feature_width)
        return self._steps


def _drafted(first: CudaPending, burst: Burst, going: Ints, found: torch.Tensor) -> Drafted:
    """Hands out the guesses of all levels; none below a row that leaves nothing to choose.

    Args:
        going: Rows of the burst with further levels.
        found: On the host, what `rank` found at each of these [levels, rows, 2, NUM_RANKED].
    """
    shape, choices = (1 + len(burst.kv), len(burst.ranks.rows), burst.width), burst.ranks.choices[going]
    token_ids, confidences, alive = np.full(shape, NONE, np.int32), np.zeros(shape), np.ones(shape[1], np.bool_)
    if shape[1]:
        best = first.rank(*burst.ranks)
        token_ids[0], confidences[0] = best.token_ids[:, : burst.width], best.confidences[:, : burst.width]
        alive = best.usable
    for level, ranked in enumerate(found, start=1):
        best, shown = rankings(ranked[: len(going)], choices), (burst.kv[level - 1, going] != NONE) & alive[going]
        token_ids[level, going[shown]] = best.token_ids[shown, : burst.width]
        confidences[level, going[shown]] = best.confidences[shown, : burst.width]
        alive[going] &= best.usable
    return Drafted(first, token_ids, confidences)


class _Steps:
    """Steps over one cache, whose addresses graphs hold."""

    def __init__(
        self,
        layers: CudaLayers,
        logits: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor],
        cache: CudaKVCache,
        stream: Stream,
        hidden_size: int,
        feature_width: int,
    ) -> None:
        self.cache = cache
        self._layers, self._logits, self._stream = layers, logits, stream
        self._blank, self._kv_heads = _blank(feature_width, cache.trash), cache.keys.shape[2]
        widest = self._arrays(self._blank, ROWS[-1])
        self._buffer = StepBuffer(stream, sum(map(aligned_bytes, widest.values())) + TABLE_BYTES)
        self._final = cache.keys.new_empty((ROWS[-1], hidden_size))
        self._found = self._final.new_zeros((1 + MOST_LEVELS) * LEVEL_ROWS * 2 * NUM_RANKED, dtype=torch.int32)
        self._recorded: dict[int, Work] = {}
        self._levels: dict[int, Work] = {}
        self._kept: StateLayout | None = None

    def record(self, most_rows: int, kept: StateLayout, *, drafts: bool) -> None:
        """Records steps of up to `most_rows` rows, the largest first: the others fit the memory that it takes."""
        sizes = [rows for rows in reversed(ROWS) if rows <= padded(most_rows)]
        levels = [rows for rows in sizes if rows <= LEVEL_ROWS] if drafts else []
        works = self._stream.record(chain(self._works(sizes, kept), self._level_works(levels, kept)))
        self._recorded = dict(zip(sizes, works[: len(sizes)], strict=True))
        self._levels = dict(zip(levels, works[len(sizes) :], strict=True))
        self._kept = kept
        logger.info("steps are recorded", extra={"graphs": len(works), "most_rows": sizes[0]})

    def _works(self, sizes: Sequence[int], kept: StateLayout) -> Iterator[Work]:
        """The layers over rows that write to the trash; a buffer lies where it will when such a step comes."""
        for rows in sizes:
            place = PlanFields.of(self._buffer.send(self._arrays(self._blank, rows)))
            yield partial(self._layers.forward, place, self.cache, kept, self._final[:rows])

    def _level_works(self, sizes: Sequence[int], kept: StateLayout) -> Iterator[Work]:
        """Levels of as many rows, likewise."""
        blank = Ranks(np.zeros(1, np.int64), np.zeros(1, np.int64), ANY_CHOICE)
        for rows in sizes:
            arrays = level_arrays(
                self._blank, blank, np.empty((0, 1), np.int32), rows, self._kv_heads, self.cache.trash
            )
            yield partial(self._level, self._buffer.send(arrays), self._found_by(MOST_LEVELS, rows), kept)

    def descend(
        self, batch: Batch, ranks: Ranks, kv: Ints, kept: StateLayout, above: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Goes down a level after the other from rows of the last step; returns what `rank` finds at each.

        Args:
            batch: See `level_arrays`, and so kv.
            ranks: As at the rows above the first level; its rows are those of `above`.
            above: Ranking found there by `rank`, once its turn has come.
        """
        rows = padded(batch.num_rows)
        sent, fits = self._send(level_arrays(batch, ranks, kv, rows, self._kv_heads, self.cache.trash))
        found = self._found_by(len(kv), rows)

        def begin() -> None:
            torch.index_select(above(), 0, sent["entries"], out=found[0])

        self._stream.run(begin)
        known = self._levels.get(rows) if fits and len(kv) <= MOST_LEVELS and kept is self._kept else None
        for _ in kv:
            self._stream.run(known or partial(self._level, sent, found, kept))
        return found[1:]

    def _found_by(self, levels: int, rows: int) -> torch.Tensor:
        """Where levels leave what they find, [levels, rows, 2, NUM_RANKED], and what was found above the first."""
        shape = 1 + levels, rows, 2, NUM_RANKED
        fits = levels <= MOST_LEVELS and rows <= LEVEL_ROWS
        return self._found[: math.prod(shape)].view(shape) if fits else self._found.new_zeros(shape)

    def _level(self, sent: Mapping[str, torch.Tensor], found: torch.Tensor, kept: StateLayout) -> None:
        """A level below rows: they become those of their best guesses, and are ranked."""
        rows, level, positions = PlanFields.of(sent), sent["level"], sent["asked_positions"]
        if rows.features is not None:
            rows.features.copy_(self.cache.states[rows.slots])
        go_down(
            found, level, sent["below"],
            (rows.token_ids, rows.positions, positions, rows.slots, rows.lanes.node_bits, rows.lanes.lane_nodes),
        )  # fmt: skip
        final = self._room(len(rows.slots))
        self._layers.forward(rows, self.cache, kept, final)
        asked = Questions(rows=sent["logit_rows"], positions=positions, choices=sent["choices"])
        found.index_copy_(0, level, rank(self._logits(final, sent), asked)[None])

    def _room(self, rows: int) -> torch.Tensor:
        """Room for final hidden states."""
        return self._final[:rows] if rows <= ROWS[-1] else self._final.new_empty((rows, self._final.shape[1]))

    def _send(self, arrays: Mapping[str, Array]) -> tuple[dict[str, torch.Tensor], bool]:
        """Arrays on the device, and whether they lie where recorded work looks for them."""
        size = sum(map(aligned_bytes, arrays.values()))
        fits = size <= self._buffer.num_bytes
        return (self._buffer if fits else StepBuffer(self._stream, size)).send(arrays), fits

    def _arrays(self, batch: Batch, rows: int) -> dict[str, Array]:
        return field_arrays(batch, rows, self._kv_heads, self.cache.trash)

    def launch(
        self, batch: Batch, kept: StateLayout, layers: Layers, arrays: Mapping[str, Array]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Writes the rows' KV and states; returns their final hidden states, and the arrays on the device."""
        rows, cache = padded(batch.num_rows), self.cache
        sources, targets = cache.waiting
        arrays = {**self._arrays(batch, rows), "sources": sources, "targets": targets, **arrays}
        final = self._room(rows)
        sent, fits = self._send(arrays)
        if len(sources):
            self._stream.run(lambda: cache.move(sent["sources"], sent["targets"]))
            cache.moves.clear()
        if batch.above is not None:
            assert isinstance(batch.above, CudaPending), "a step of this device"
            self._stream.run(partial(_take_tokens, batch.above, sent["token_ids"]))
        recorded = self._recorded.get(rows) if fits and layers is None and kept is self._kept else None
        self._stream.run(recorded or partial(self._layers.forward, PlanFields.of(sent), cache, kept, final, layers))
        return final, sent


def _take_tokens(above: CudaPending, token_ids: torch.Tensor) -> None:
    """Puts tokens that a step has chosen in the place of where it chose them; any where it found none."""
    token_ids.copy_(above.chosen().index_select(0, token_ids).clamp(min=0))


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

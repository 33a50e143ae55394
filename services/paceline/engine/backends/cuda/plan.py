"""Where the rows of a step go: lanes for its attention, and one buffer that brings all of it to the device.

A *lane* is up to `lane_width(rows)` rows of one sequence, whose pages are read once for all of them. Beside the pages
its rows see up to 64 tree nodes, each row those whose bits it has. Lengths, nodes and pages are data: a recorded step
knows the number of its rows and nothing else. Nothing here runs a model or needs CUDA.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.cuda.attention import NODES, Lanes, divide, most_parts, row_parts
from paceline.engine.backends.cuda.choose import CHOICE_WORDS
from paceline.engine.backends.cuda.stream import Stream
from paceline.engine.batch import Batch
from paceline.engine.pending import Ranks
from paceline.forest import NONE

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
# Rows of recorded steps: a few rows are not padded, more by less than 8.
ROWS: Final = (1, 2, 4, *range(8, 513, 8))
# Most rows of a recorded level of a burst, whose logits stay set aside, and most levels below a burst's first one.
LEVEL_ROWS, MOST_LEVELS = 64, 15
# Room of a recorded step beside its rows: a million entries of block tables, 16 million tokens.
TABLE_BYTES: Final = 4 << 20


def padded(rows: int) -> int:
    """Rows that a step of `rows` rows computes; larger steps than any recorded one are not padded."""
    return ROWS[bisect_left(ROWS, rows)] if rows <= ROWS[-1] else rows


def lane_width(rows: int) -> int:
    """Most rows of a lane in a step of `rows` rows: trees fit one, and large steps read prompts."""
    return 4 if rows <= 4 else 8 if rows <= 256 else 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFields:
    """Fields that a step's layers read on the device, padded to its rows.

    Attributes:
        slots: int64 [rows], as in `Batch`; padded rows write to the trash.
        token_ids: int32 [rows]; and positions.
        lanes: For attention.
        features: float32 [rows, width], as in `Batch`.
    """

    slots: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    lanes: Lanes
    features: torch.Tensor | None

    @classmethod
    def of(cls, sent: Mapping[str, torch.Tensor]) -> PlanFields:
        """The arrays that `field_arrays` made, once they are on the device."""
        lanes = Lanes(**{each.name: sent[each.name] for each in dataclasses.fields(Lanes)})
        own = {name: sent[name] for name in ("slots", "token_ids", "positions")}
        return cls(**own, lanes=lanes, features=sent.get("features"))


def field_arrays(batch: Batch, rows: int, kv_heads: int, trash: int) -> dict[str, Array]:
    """`PlanFields` of a batch by name, padded to `rows` rows: their sizes follow from that, but for the tables'.

    Args:
        trash: A slot to which padded rows write.
    """
    return _fields(batch, rows, kv_heads, trash, batch.num_ancestors)[0]


def level_arrays(batch: Batch, ranks: Ranks, kv: Ints, rows: int, kv_heads: int, trash: int) -> dict[str, Array]:
    """`field_arrays` of rows that go down a level after the other by themselves, and where each goes.

    Args:
        batch: The rows as they end, but that `slots` and `positions` are those of the rows above their first level.
        ranks: Rankings requested there; padding rows repeat the last one.
        kv: int32 `[levels, n]`, their slots at each level; NONE behind their last one.
    """
    num, above = batch.num_rows, batch.num_ancestors - (kv != NONE).sum(axis=0, dtype=np.int32)
    fields, masks, (lanes, levels) = _fields(batch, rows, kv_heads, trash, above)
    below = np.zeros((max(MOST_LEVELS, len(kv)), rows, 3), np.int64)
    below[:, :, 0] = trash
    for level, slots in enumerate(kv):
        below[level, :num, 0] = np.where(slots != NONE, slots, trash)
        below[level, :num, 1] = masks[np.arange(num), np.minimum(above + level + 1, batch.num_ancestors)]
        below[level, :, 2] = np.bincount(lanes[levels <= level + 1], minlength=rows)
    like = np.minimum(np.arange(rows), num - 1)
    return {
        "level": np.zeros(1, np.int64),
        "below": below,
        "logit_rows": like,
        "entries": ranks.rows[like],
        "asked_positions": ranks.positions[like],
        "choices": choice_words(ranks.choices)[like],
        **fields,
    }


def choice_words(choices: Array) -> Array:
    """`CHOICE`s as kernels read them, int64 [n, CHOICE_WORDS]."""
    return np.ascontiguousarray(choices).view(np.int64).reshape(-1, CHOICE_WORDS)


def _fields(
    batch: Batch, rows: int, kv_heads: int, trash: int, above: npt.NDArray[np.int32]
) -> tuple[dict[str, Array], Ints, tuple[Ints, Ints]]:
    """`field_arrays`; masks int64 [n, 1 + depth] over nodes of each row's lane, of its first ancestors, by number.

    Then lanes and levels of the nodes. A lane's nodes lie level by level, since attention reads the first ones.

    Args:
        above: [n], ancestors of each row of level 0; those behind are of one level each.
    """
    slots = np.full(rows, trash, np.int64)
    slots[: batch.num_rows] = batch.slots
    arrays = {
        "slots": slots,
        "token_ids": _padded(batch.token_ids, rows),
        "positions": _padded(batch.positions, rows),
    }
    if batch.features is not None:
        arrays["features"] = _padded(batch.features, rows, np.float32)
    lanes, masks, nodes = _lane_arrays(batch, rows, kv_heads, above)
    return {**arrays, **lanes}, masks, nodes


def _lane_arrays(
    batch: Batch, rows: int, kv_heads: int, above: npt.NDArray[np.int32]
) -> tuple[dict[str, Array], Ints, tuple[Ints, Ints]]:
    """`Lanes` by name, with room for a lane a row; the tables come last, so that all others have their places.

    And masks and nodes, see `_fields`.
    """
    width = lane_width(rows)
    lane_of, cell_of, masks, (lane, level, index, node_slots) = _place_rows(batch, width, above)
    longest = np.zeros(int(lane_of.max()) + 1, np.int64)
    np.maximum.at(longest, lane_of, batch.context_lens)
    starts, tables = _place_tables(batch)
    divided = divide(longest, kv_heads)
    lane_rows = np.full((rows, width), -1, np.int32)
    lane_rows[lane_of, cell_of] = np.arange(batch.num_rows)
    lane_starts = np.zeros(rows, np.int32)
    lane_starts[lane_of] = starts[batch.sequences]
    slots_of = np.zeros((rows, NODES), np.int32)
    slots_of[lane, index] = node_slots
    arrays = {
        "contexts": _padded(batch.context_lens, rows),
        "node_bits": _padded(masks[:, -1], rows, np.int64),
        "row_parts": _padded(row_parts(divided, lane_of, cell_of, width), rows),
        "lane_rows": lane_rows,
        "lane_starts": lane_starts,
        "lane_nodes": np.bincount(lane, minlength=rows).astype(np.int32),
        "node_slots": slots_of,
        "parts": _padded(divided.parts, most_parts(rows, kv_heads), filler=-1),
        "tables": tables,
    }
    return arrays, masks, (lane, level)


def _padded(values: Array, rows: int, kind: type[np.number[Any]] = np.int32, filler: int = 0) -> Array:
    made = np.full((rows, *values.shape[1:]), filler, kind)
    made[: len(values)] = values
    return made


def _place_rows(
    batch: Batch, width: int, above: npt.NDArray[np.int32]
) -> tuple[Ints, Ints, Ints, tuple[Ints, Ints, Ints, Ints]]:
    """Lane and place there of each row [rows], of up to `width` rows, fewer where they would see too many nodes.

    Then, as `_place_nodes`, masks and nodes.
    """
    order = np.argsort(batch.sequences, kind="stable")
    firsts = np.flatnonzero(np.diff(batch.sequences[order], prepend=-1))
    cells = np.arange(len(order)) - np.repeat(firsts, np.diff(firsts, append=len(order)))
    lane_of, cell_of = np.empty_like(order), np.empty_like(order)
    while True:
        lane_of[order], cell_of[order] = np.cumsum(cells % width == 0) - 1, cells % width
        masks, nodes = _place_nodes(batch, lane_of, above)
        if nodes[2].max(initial=0) < NODES:
            return lane_of, cell_of, masks, nodes
        assert width > 1, f"no path is longer than {NODES} nodes"
        width //= 2


def _place_nodes(
    batch: Batch, lane_of: Ints, above: npt.NDArray[np.int32]
) -> tuple[Ints, tuple[Ints, Ints, Ints, Ints]]:
    """Masks, see `_fields`, and lane, level, index and slot [n] of the nodes.

    Masks of a lane with too many nodes are nonsense.
    """
    place = np.arange(batch.ancestors.shape[1])
    attended, level = place < batch.num_ancestors[:, None], np.maximum(place - above[:, None] + 1, 0)
    keyed = lane_of[:, None] << 48 | level << 32 | batch.ancestors
    nodes, which = np.unique(keyed[attended], return_inverse=True)
    lanes = nodes >> 48
    index = np.arange(len(nodes)) - np.searchsorted(lanes, lanes)
    bits = np.zeros((len(attended), 1 + attended.shape[1]), np.uint64)
    bits[:, 1:][attended] = np.left_shift(np.uint64(1), (index % NODES).astype(np.uint64))[which]
    return np.bitwise_or.accumulate(bits, axis=1).view(np.int64), (
        lanes,
        nodes >> 32 & 0xFFFF,
        index,
        nodes & 0xFFFFFFFF,
    )


def _place_tables(batch: Batch) -> tuple[Ints, Array]:
    """Where the blocks of each sequence begin [sequences], and the blocks that are attended, one after another."""
    counts = np.zeros(len(batch.block_tables), np.int64)
    np.maximum.at(counts, batch.sequences, -(-batch.context_lens.astype(np.int64) // BLOCK_SIZE))
    used = np.arange(batch.block_tables.shape[1]) < counts[:, None]
    return np.cumsum(counts) - counts, batch.block_tables[used]


class StepBuffer:
    """A buffer on the device, which one copy from pinned memory fills for a step.

    Args:
        num_bytes: Room for what is sent at once.
    """

    def __init__(self, stream: Stream, num_bytes: int) -> None:
        self.num_bytes, self._stream = num_bytes, stream
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=stream.device)

    def send(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Copies arrays to the device one behind another, so that those of one size lie in one place every time.

        The host does not wait for the copy.
        """
        sent, start = dict[str, torch.Tensor](), 0
        pinned = self._stream.host_buffer(sum(map(aligned_bytes, arrays.values())))
        host = pinned.numpy()
        for name, array in arrays.items():
            stop = start + array.nbytes
            host[start:stop] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            kind = torch.from_numpy(array[:0]).dtype
            sent[name] = self._device[start:stop].view(kind).view(array.shape)
            start += aligned_bytes(array)
        self._stream.copy(self._device[:start], lambda: pinned)
        return sent


def aligned_bytes(array: Array) -> int:
    """Size of an array in a `StepBuffer`: kernels read 16 bytes at once."""
    return -(-array.nbytes // 16) * 16

"""Compiled loops that fill the rows of a step; see `paceline.engine.packing`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.pages import BLOCK_SIZE
from paceline.forest import Guesses, Ints
from paceline.forest.kernel import kernel

Longs = npt.NDArray[np.int64]


class Columns(NamedTuple):
    """Rows to fill, as in `Batch`, and which of them have their logits wanted."""

    token_ids: Longs
    positions: Longs
    slots: Longs
    sequences: Ints
    context_lens: Ints
    ancestors: Ints
    num_ancestors: Ints
    block_tables: Ints
    wanted: npt.NDArray[np.bool_]


@kernel
def fill_tables(tables: Ints, lengths: Ints, blocks: Ints) -> None:
    """Fills rows with as many blocks as each has, one after the other."""
    start = 0
    for row in range(len(lengths)):
        tables[row, : lengths[row]] = blocks[start : start + lengths[row]]
        start += lengths[row]


@kernel
def _fill(columns: Any, row: int, token_id: int, position: int, slot: int, sequence: int, context_len: int) -> None:
    columns.token_ids[row], columns.positions[row], columns.slots[row] = token_id, position, slot
    columns.sequences[row], columns.context_lens[row] = sequence, context_len


@kernel
def _fill_prefix(columns: Any, row: int, token_id: int, position: int, sequence: int, wanted: bool) -> None:
    slot = columns.block_tables[sequence, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    _fill(columns, row, token_id, position, slot, sequence, position + 1)
    columns.num_ancestors[row], columns.wanted[row] = 0, wanted


@kernel
def fill_prefixes(columns: Any, row: int, prefixes: Ints, tokens: Ints) -> None:
    """Fills rows of committed tokens.

    Args:
        columns: See `Columns`.
        prefixes: int32 `[prefixes, 6]`: sequence, first position, one more than the last, whether the last row's logits
            are wanted, and from and to which positions those of others are.
        tokens: int32 `[rows]`.
    """
    place = 0
    for each in range(len(prefixes)):
        sequence, start, stop, wants, judged_start, judged_stop = prefixes[each]
        for position in range(start, stop):
            wanted = (wants and position == stop - 1) or judged_start <= position < judged_stop
            _fill_prefix(columns, row + place, tokens[place], position, sequence, wanted)
            place += 1


@kernel
def fill_trees(columns: Any, row: int, roots: Ints, guesses: Guesses) -> None:
    """Fills rows of last committed tokens, each with the guesses beyond it, behind it.

    Args:
        columns: See `Columns`.
        roots: int32 `[sequences, 3]`: sequence, committed tokens, the last of them.
    """
    first_guess = 0
    for each in range(len(roots)):
        sequence, length, token_id = roots[each]
        _fill_prefix(columns, row, token_id, length - 1, sequence, True)
        for place in range(guesses.counts[each]):
            guess, mine, above = first_guess + place, row + 1 + place, row + 1 + guesses.parents[first_guess + place]
            _fill(columns, mine, guesses.tokens[guess], guesses.positions[guess], guesses.kv[guess], sequence, length)
            # That of the root has none.
            depth = columns.num_ancestors[above]
            columns.ancestors[mine, :depth] = columns.ancestors[above, :depth]
            columns.ancestors[mine, depth] = guesses.kv[guess]
            columns.num_ancestors[mine], columns.wanted[mine] = depth + 1, True
        first_guess += guesses.counts[each]
        row += 1 + guesses.counts[each]


@kernel
def fill_nodes(columns: Any, row: int, nodes: Ints, slots: Ints) -> None:
    """Fills rows of tree nodes.

    Args:
        columns: See `Columns`.
        nodes: int32 `[nodes, 4]`: sequence, guess, position, where its slots end.
        slots: Scratch slots from below the root down to each, itself included.
    """
    start = 0
    for each in range(len(nodes)):
        sequence, token_id, position, end = nodes[each]
        depth = end - start
        _fill(columns, row + each, token_id, position, slots[end - 1], sequence, position - depth + 1)
        columns.ancestors[row + each, :depth] = slots[start:end]
        columns.num_ancestors[row + each], columns.wanted[row + each] = depth, True
        start = end

"""Packs the rows of one step: prefix rows of sequences that catch up, and tree nodes beyond them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.messages import sizes_of
from paceline.core.pages import BLOCK_SIZE, SessionPages
from paceline.engine.batch import Batch
from paceline.forest import Guesses, Ints, rows_of
from paceline.forest.records import kernel

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
        for index in range(lengths[row]):
            tables[row, index] = blocks[start + index]
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
            for each_above in range(depth):
                columns.ancestors[mine, each_above] = columns.ancestors[above, each_above]
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
        for place in range(depth):
            columns.ancestors[row + each, place] = slots[start + place]
        columns.num_ancestors[row + each], columns.wanted[row + each] = depth, True
        start = end


class PrefixRows(NamedTuple):
    """Committed tokens in a row, whose slots are reserved.

    Attributes:
        stop: One more than the last.
        wants_logits: Whether the last row's logits are wanted.
        judged: Positions whose logits are wanted before; in a row, as they are.
    """

    sequence: SessionPages
    start: int
    stop: int
    wants_logits: bool = False
    judged: range = range(0)


class TreeRow(NamedTuple):
    """A tree node that attends all committed positions, its ancestors and itself.

    Attributes:
        sequence: Whose tree it is.
        position: Absolute position of the guess.
        slots: Scratch slots from below the root down to it, the last for its own KV.
    """

    sequence: SessionPages
    token_id: int
    position: int
    slots: Sequence[int]


class Nodes(NamedTuple):
    """What many `TreeRow` say, in columns.

    Attributes:
        trees: `[nodes]`, indices of the sequences.
        token_ids: `[nodes]`
        positions: `[nodes]`
        ends: `[nodes]`, where the slots of each end.
        slots: int32 `[n]`
    """

    trees: Longs
    token_ids: Ints
    positions: Longs
    ends: Ints
    slots: Ints


class BatchBuilder:
    """Collects rows of many sequences; `build` turns them into one `Batch`."""

    def __init__(self) -> None:
        # Loops to fill rows, how many of them, and what they take besides.
        self._fills: list[tuple[Callable[..., None], int, tuple[Any, ...]]] = []
        self._depth = 1
        self._tables: list[Ints] = []
        self._table_of: dict[SessionPages, int] = {}
        self._num_wanted = 0
        self._features: list[np.ndarray] = []

    def add_prefixes(self, prefixes: Sequence[PrefixRows], features: np.ndarray | None = None) -> list[int]:
        """Adds rows of committed tokens.

        Args:
            prefixes: At least one.
            features: [rows, width], for decoders that take them; all rows of a batch have them, or none.

        Returns:
            Index of the logits of each one's last row, if they are wanted; of those judged, too, they are the last.
        """
        spans, tokens, last = list[tuple[int, ...]](), list[int](), list[int]()
        for sequence, start, stop, wants_logits, judged in prefixes:
            spans.append((self._table(sequence), start, stop, wants_logits, judged.start, judged.stop))
            tokens += sequence.tokens[start:stop]
            self._num_wanted += wants_logits + len(judged)
            last.append(self._num_wanted - 1)
        self._fills.append((fill_prefixes, len(tokens), (np.array(spans, np.int32), rows_of(tokens))))
        self._add_features(features)
        return last

    def add_nodes(self, nodes: Sequence[TreeRow], features: np.ndarray | None = None) -> range:
        """Adds tree nodes, at least one; see `add_columns`."""
        sequences, token_ids, positions, slots = zip(*nodes, strict=True)
        columns = Nodes(
            trees=np.arange(len(nodes)),
            token_ids=rows_of(token_ids),
            positions=np.array(positions, np.int64),
            ends=rows_of(accumulate(map(len, slots))),
            slots=rows_of(chain.from_iterable(slots)),
        )
        return self.add_columns(sequences, columns, features)

    def add_columns(self, sequences: Sequence[SessionPages], nodes: Nodes, features: np.ndarray | None = None) -> range:
        """Adds tree nodes, at least one.

        Args:
            sequences: Those whose trees they are of.
            features: [nodes, width], as in `add_prefixes`.

        Returns:
            Indices of their logits.
        """
        count, tables = len(nodes.ends), rows_of([*map(self._table, sequences)])
        self._depth = max(self._depth, int(sizes_of(nodes.ends).max()))
        spans = np.stack(
            (tables[nodes.trees], nodes.token_ids, nodes.positions, nodes.ends),
            axis=1,
            dtype=np.int32,
            casting="same_kind",
        )
        self._fills.append((fill_nodes, count, (spans, nodes.slots)))
        self._add_features(features)
        self._num_wanted += count
        return range(self._num_wanted - count, self._num_wanted)

    def add_trees(self, sequences: Sequence[SessionPages], guesses: Guesses) -> list[int]:
        """Adds the last committed token of each sequence, whose slot is reserved, and the guesses beyond it.

        Args:
            sequences: At least one.

        Returns:
            Index of the logits of each one's last committed token; those of its guesses follow.
        """
        roots = np.array([(self._table(each), len(each.tokens), each.tokens[-1]) for each in sequences], np.int32)
        # A guess in the place behind the last committed token is of depth 1.
        depths = guesses.positions - roots[:, 1].repeat(guesses.counts) + 1
        self._depth = max(self._depth, int(depths.max(initial=0)))
        size, sizes = len(roots) + len(guesses.tokens), 1 + guesses.counts
        self._fills.append((fill_trees, size, (roots, guesses)))
        firsts: list[int] = (np.cumsum(sizes) - sizes + self._num_wanted).tolist()
        self._num_wanted += size
        return firsts

    def build(self) -> Batch:
        """The finished batch, of at least one row."""
        num_rows, lengths = sum(size for _, size, _ in self._fills), rows_of(map(len, self._tables))
        longs, ints = np.empty((3, num_rows), np.int64), np.empty((3, num_rows), np.int32)
        columns = Columns(
            token_ids=longs[0],
            positions=longs[1],
            slots=longs[2],
            sequences=ints[0],
            context_lens=ints[1],
            ancestors=np.zeros((num_rows, self._depth), np.int32),
            num_ancestors=ints[2],
            block_tables=np.zeros((len(lengths), lengths.max()), np.int32),
            wanted=np.empty(num_rows, np.bool_),
        )
        fill_tables(columns.block_tables, lengths, np.concatenate(self._tables))
        row = 0
        for fill, size, rows in self._fills:
            fill(columns, row, *rows)
            row += size
        filled: dict[str, Any] = columns._asdict()
        logit_rows = np.flatnonzero(filled.pop("wanted"))
        return Batch(
            **filled, logit_rows=logit_rows, features=np.concatenate(self._features) if self._features else None
        )

    def _table(self, sequence: SessionPages) -> int:
        if sequence not in self._table_of:
            self._table_of[sequence] = len(self._tables)
            self._tables.append(sequence.table)
        return self._table_of[sequence]

    def _add_features(self, features: np.ndarray | None) -> None:
        if features is not None:
            self._features.append(features)

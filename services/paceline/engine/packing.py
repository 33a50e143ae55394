"""Packs the rows of one step: prefix rows of sequences that catch up, and tree nodes beyond them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.pages import SessionPages
from paceline.engine.batch import Batch


class BatchBuilder:
    """Collects rows of many sequences; `build` turns them into one `Batch`."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._sequences: list[int] = []
        self._context_lens: list[int] = []
        self._ancestors: list[Sequence[int]] = []
        self._tables: list[list[int]] = []
        self._table_of: dict[int, int] = {}
        self._logit_rows: list[int] = []
        self._features: list[np.ndarray] = []

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return len(self._token_ids)

    @property
    def num_wanted(self) -> int:
        """Rows so far whose logits are wanted."""
        return len(self._logit_rows)

    def add_prefix(
        self,
        sequence: SessionPages,
        start: int,
        stop: int,
        *,
        wants_logits: bool,
        judged: range = range(0),
        features: np.ndarray | None = None,
    ) -> int | None:
        """Adds the committed tokens at positions `start` to `stop` - 1, whose slots are reserved.

        Args:
            sequence: Whose tokens.
            start: First position.
            stop: One more than the last.
            wants_logits: Whether the last row's logits are wanted.
            judged: Positions whose logits are wanted before; in a row, as they are.
            features: [stop - start, width], for decoders that take them; all rows of a batch have them, or none.

        Returns:
            Index of the last row's logits, if they are wanted.
        """
        table = self._table(sequence)
        for position in range(start, stop):
            self._add(sequence.tokens[position], position, sequence.slot(position), table, position + 1, ())
            if position in judged:
                self._want_logits()
        if features is not None:
            self._features.append(features)
        return self._want_logits() if wants_logits else None

    def add_node(
        self,
        sequence: SessionPages,
        *,
        token_id: int,
        position: int,
        slot: int,
        ancestors: Sequence[int],
        features: np.ndarray | None = None,
    ) -> int:
        """Adds a tree node that attends all committed positions, its ancestors' slots and itself.

        Args:
            sequence: Whose tree it is.
            token_id: The guess.
            position: Absolute position of the guess.
            slot: Scratch slot for its KV.
            ancestors: Scratch slots of its ancestors, oldest first.
            features: [1, width], as in `add_prefix`.

        Returns:
            Index of its logits.
        """
        context_len = position - len(ancestors)
        self._add(token_id, position, slot, self._table(sequence), context_len, (*ancestors, slot))
        if features is not None:
            self._features.append(features)
        return self._want_logits()

    def build(self) -> Batch:
        """The finished batch."""
        depth = max(map(len, self._ancestors), default=0)
        ancestors = np.zeros((self.num_rows, max(depth, 1)), np.int32)
        for row, slots in enumerate(self._ancestors):
            ancestors[row, : len(slots)] = slots
        width = max(map(len, self._tables), default=1)
        tables = np.zeros((len(self._tables), width), np.int32)
        for row, blocks in enumerate(self._tables):
            tables[row, : len(blocks)] = blocks
        return Batch(
            token_ids=np.array(self._token_ids, np.int64),
            positions=np.array(self._positions, np.int64),
            slots=np.array(self._slots, np.int64),
            sequences=np.array(self._sequences, np.int32),
            context_lens=np.array(self._context_lens, np.int32),
            ancestors=ancestors,
            num_ancestors=np.array([len(slots) for slots in self._ancestors], np.int32),
            block_tables=tables,
            logit_rows=np.array(self._logit_rows, np.int64),
            features=np.concatenate(self._features) if self._features else None,
        )

    def _table(self, sequence: SessionPages) -> int:
        known = self._table_of.setdefault(id(sequence), len(self._tables))
        if known == len(self._tables):
            self._tables.append(sequence.blocks)
        return known

    def _add(
        self, token_id: int, position: int, slot: int, table: int, context_len: int, ancestors: Sequence[int]
    ) -> None:
        self._token_ids.append(token_id)
        self._positions.append(position)
        self._slots.append(slot)
        self._sequences.append(table)
        self._context_lens.append(context_len)
        self._ancestors.append(ancestors)

    def _want_logits(self) -> int:
        self._logit_rows.append(self.num_rows - 1)
        return len(self._logit_rows) - 1

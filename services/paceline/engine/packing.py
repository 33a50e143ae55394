"""Packs the rows of one step: prefix rows of sequences that catch up, and tree nodes beyond them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from paceline.core.pages import SessionPages
from paceline.engine.batch import Batch
from paceline.engine.packing_kernels import Columns, fill_nodes, fill_prefixes, fill_tables, fill_trees
from paceline.forest import Guesses, Ints, rows_of


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


class BatchBuilder:
    """Collects rows of many sequences; `build` turns them into one `Batch`."""

    def __init__(self) -> None:
        # Loops to fill rows, how many of them, and what they take besides.
        self._fills: list[tuple[Callable[..., None], int, tuple[Any, ...]]] = []
        self._depth = 1
        self._tables: list[Ints] = []
        self._table_of: dict[int, int] = {}
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
        """Adds tree nodes.

        Args:
            nodes: At least one.
            features: [nodes, width], as in `add_prefixes`.

        Returns:
            Indices of their logits.
        """
        spans, slots = list[tuple[int, ...]](), list[int]()
        for sequence, token_id, position, path in nodes:
            slots += path
            spans.append((self._table(sequence), token_id, position, len(slots)))
            self._depth = max(self._depth, len(path))
        self._fills.append((fill_nodes, len(nodes), (np.array(spans, np.int32), rows_of(slots))))
        self._add_features(features)
        self._num_wanted += len(nodes)
        return range(self._num_wanted - len(nodes), self._num_wanted)

    def add_trees(self, sequences: Sequence[SessionPages], guesses: Guesses) -> list[int]:
        """Adds the last committed token of each sequence, whose slot is reserved, and the guesses beyond it.

        Args:
            sequences: At least one.

        Returns:
            Index of the logits of each one's last committed token; those of its guesses follow.
        """
        roots = [(self._table(each), len(each.tokens), each.tokens[-1]) for each in sequences]
        firsts = list(accumulate((1 + count for count in guesses.counts.tolist()), initial=self._num_wanted))
        lengths = (length for _, length, _ in roots)
        self._depth = max(
            self._depth, *(last + 1 - length for last, length in zip(guesses.deepest, lengths, strict=True))
        )
        self._fills.append((fill_trees, len(roots) + len(guesses.tokens), (np.array(roots, np.int32), guesses)))
        self._num_wanted = firsts.pop()
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
        known = self._table_of.setdefault(id(sequence), len(self._tables))
        if known == len(self._tables):
            self._tables.append(sequence.table)
        return known

    def _add_features(self, features: np.ndarray | None) -> None:
        if features is not None:
            self._features.append(features)

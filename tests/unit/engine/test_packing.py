"""The rows of a step, whatever they were added as."""

from __future__ import annotations

import numpy as np

from paceline.core.pages import BLOCK_SIZE, BlockPool, SessionPages
from paceline.engine.batch import Batch
from paceline.engine.packing import BatchBuilder, PrefixRows, TreeRow
from paceline.forest import ROOT, Guesses, rows_of

POOL = BlockPool(64)


def pages(num_tokens: int) -> SessionPages:
    made = SessionPages(list(range(100, 100 + num_tokens)), POOL)
    assert made.reserve(num_tokens)
    return made


def rows_of_batch(batch: Batch) -> list[tuple[object, ...]]:
    """Each row as numbers, and its blocks and ancestors as far as they count."""
    return [
        (
            *(int(column[row]) for column in (batch.token_ids, batch.positions, batch.slots, batch.context_lens)),
            batch.block_tables[batch.sequences[row]].tolist(),
            batch.ancestors[row, : batch.num_ancestors[row]].tolist(),
        )
        for row in range(batch.num_rows)
    ]


def test_trees_are_packed_as_their_roots_and_nodes_are() -> None:
    first, second, third = pages(20), pages(3), pages(40)
    guesses = Guesses(
        counts=rows_of([4, 0, 1]),
        tokens=rows_of([7, 8, 9, 5, 6]),
        positions=rows_of([20, 20, 21, 22, 40]),
        parents=rows_of([ROOT, ROOT, 1, 2, ROOT]),
        kv=rows_of([900, 901, 902, 903, 904]),
    )
    builder = BatchBuilder()
    assert builder.add_trees([first, second, third], guesses) == [0, 5, 6]
    batch = builder.build()

    expected = BatchBuilder()
    for tree, nodes in (
        (first, [(7, 20, [900]), (8, 20, [901]), (9, 21, [901, 902]), (5, 22, [901, 902, 903])]),
        (second, []),
        (third, [(6, 40, [904])]),
    ):
        expected.add_prefixes([PrefixRows(tree, len(tree.tokens) - 1, len(tree.tokens), wants_logits=True)])
        if nodes:
            expected.add_nodes([TreeRow(tree, *node) for node in nodes])
    assert rows_of_batch(batch) == rows_of_batch(expected.build())
    assert batch.logit_rows.tolist() == list(range(8))


def test_a_prefix_has_its_own_slots_and_the_logits_that_are_wanted() -> None:
    first, second = pages(40), pages(5)
    builder = BatchBuilder()
    last = builder.add_prefixes(
        [PrefixRows(first, 10, 20, judged=range(12, 15)), PrefixRows(second, 3, 5, wants_logits=True)]
    )
    (node,) = builder.add_nodes([TreeRow(second, 77, 5, [990])])
    assert (last, node) == ([2, 3], 4)
    batch = builder.build()
    assert batch.logit_rows.tolist() == [2, 3, 4, 11, 12]
    assert batch.token_ids.tolist() == [*range(110, 120), 103, 104, 77]
    slots = [first.slot(position) for position in range(10, 20)] + [second.slot(3), second.slot(4), 990]
    assert batch.slots.tolist() == slots
    assert batch.context_lens.tolist() == [*range(11, 21), 4, 5, 5]
    assert batch.block_tables.shape == (2, -(-40 // BLOCK_SIZE))
    assert batch.block_tables[1].tolist() == [*second.blocks, 0, 0]


def test_features_stand_in_the_order_of_their_rows() -> None:
    sequence = pages(4)
    builder = BatchBuilder()
    builder.add_prefixes([PrefixRows(sequence, 0, 2)], np.ones((2, 3), np.float32))
    builder.add_nodes([TreeRow(sequence, 1, 4, [990])], np.zeros((1, 3), np.float32))
    features = builder.build().features
    assert features is not None
    assert features[:, 0].tolist() == [1.0, 1.0, 0.0]

"""Drafts level by level, for models whose devices do not go on by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.core.features import Features
from paceline.engine.batch import Batch
from paceline.engine.model import Burst, Drafted, Pending
from paceline.engine.pending import Longs, Ranks
from paceline.forest import NONE, Ints

# Hidden states of slots, float32 [n, width].
States = Callable[[Sequence[int]], Features]


def draft_by_levels(
    launch: Callable[[Batch, Ranks], Pending], batch: Batch, burst: Burst, states: States | None = None
) -> Drafted:
    """Runs a burst as a step for each level; see `paceline.engine.model.Model.draft`.

    Args:
        launch: Starts a step.
        states: For models that take those of the rows above beside tokens.
    """
    shape = 1 + len(burst.kv), len(burst.ranks.rows), burst.width
    token_ids, confidences = np.full(shape, NONE, np.int32), np.zeros(shape)
    ranks, going = burst.ranks, np.arange(shape[1])
    first = pending = launch(batch, ranks)
    for level in range(shape[0]):
        found = pending.rank(*ranks)
        token_ids[level, going] = found.token_ids[:, : burst.width]
        confidences[level, going] = found.confidences[:, : burst.width]
        if level == len(burst.kv):
            break
        on = np.flatnonzero((burst.kv[level, going] != NONE) & found.usable)
        if not len(on):
            break
        going, rows = going[on], batch.logit_rows[ranks.rows[on]]
        batch = below(batch, rows, found.token_ids[on, 0], burst.kv[level, going], states)
        ranks = Ranks(batch.logit_rows, ranks.positions[on] + 1, ranks.choices[on])
        pending = launch(batch, ranks)
    return Drafted(first, token_ids, confidences)


def below(batch: Batch, rows: Longs, token_ids: Ints, slots: Ints, states: States | None) -> Batch:
    """A batch of one node below each of some rows of another."""
    used, sequences = np.unique(batch.sequences[rows], return_inverse=True)
    depths = batch.num_ancestors[rows]
    ancestors = np.zeros((len(rows), 1 + int(depths.max())), np.int32)
    ancestors[:, :-1] = batch.ancestors[rows, : ancestors.shape[1] - 1]
    ancestors[np.arange(len(rows)), depths] = slots
    return Batch(
        token_ids=token_ids.astype(np.int64),
        positions=batch.positions[rows] + 1,
        slots=slots.astype(np.int64),
        sequences=sequences.astype(np.int32),
        context_lens=batch.context_lens[rows],
        ancestors=ancestors,
        num_ancestors=depths + np.int32(1),
        block_tables=np.ascontiguousarray(batch.block_tables[used]),
        logit_rows=np.arange(len(rows)),
        features=None if states is None else states(batch.slots[rows].tolist()),
    )

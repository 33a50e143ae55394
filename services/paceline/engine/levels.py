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
        batch = below(batch, rows, found.token_ids[on, 0], burst.kv[level : level + 1, going], states)
        ranks = Ranks(batch.logit_rows, ranks.positions[on] + 1, ranks.choices[on])
        pending = launch(batch, ranks)
    return Drafted(first, token_ids, confidences)


def below(batch: Batch, rows: Longs, token_ids: Ints, kv: Ints, states: States | None) -> Batch:
    """A batch of one node below each of some rows of another.

    Args:
        kv: int32 `[levels, rows]`, slots of the path from below each row down to its node; NONE behind that one.
    """
    used, sequences = np.unique(batch.sequences[rows], return_inverse=True)
    depths, lengths, each = batch.num_ancestors[rows], (kv != NONE).sum(axis=0, dtype=np.int32), np.arange(len(rows))
    known = int(depths.max())
    ancestors = np.zeros((len(rows), known + len(kv)), np.int32)
    ancestors[:, :known] = batch.ancestors[rows, :known]
    for level, slots in enumerate(kv):
        ancestors[each, depths + level] = slots
    return Batch(
        token_ids=token_ids.astype(np.int64),
        positions=batch.positions[rows] + lengths,
        slots=ancestors[each, depths + lengths - 1].astype(np.int64),
        sequences=sequences.astype(np.int32),
        context_lens=batch.context_lens[rows],
        ancestors=ancestors,
        num_ancestors=depths + lengths,
        block_tables=np.ascontiguousarray(batch.block_tables[used]),
        logit_rows=np.arange(len(rows)),
        features=None if states is None else states(batch.slots[rows].tolist()),
    )

"""Measures the time of steps before there are sessions, for the policy to start from."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from paceline.core.pages import BLOCK_SIZE, BlockPool, SessionPages, SlotPool
from paceline.core.step_time import DEFAULT_STEP_COST, KNOTS, NODE_SHARE, StepCost
from paceline.engine.model import Cache, Model
from paceline.engine.packing import BatchBuilder, TreeRow
from paceline.engine.pending import greedy_roots

# A profile of a large model on few cores ends here, and goes on by the shape of `DEFAULT_STEP_COST`: the slope between
# the last two of few points says little, since steps of up to some 8 rows take the same time.
PROFILE_S = 3.0
# Steps of each number of rows; the fastest counts, since other processes only ever slow one down.
SAMPLES = 3
# Rows and context of the steps that show what attention takes.
FEW_ROWS, FAR_BLOCKS = 8, 1024 // BLOCK_SIZE


def profile_steps(
    decoder: Model, cache: Cache, scratch: SlotPool, clock: Callable[[], float], *, most_rows: int, num_blocks: int
) -> StepCost:
    """Runs steps of up to `most_rows` rows over scratch slots alone, and returns their times; takes seconds.

    Args:
        scratch: Slots to write to, at least `most_rows`; all of them are free again afterwards.
        clock: Seconds, monotonic.
        most_rows: Most rows of a step.
        num_blocks: Blocks of the cache from 0 on that a step may read, whatever they hold.
    """
    nowhere, far = (_pages(min(blocks, num_blocks)) for blocks in (0, FAR_BLOCKS))

    def step_s(count: int, pages: SessionPages = nowhere) -> float:
        builder = BatchBuilder()
        slots = [slot for _ in range(count) if (slot := scratch.take()) is not None]
        assert len(slots) == count, "scratch holds as many slots as a step has rows"
        builder.add_nodes([TreeRow(pages, 0, pages.num_computed, (slot,)) for slot in slots])
        started_s = clock()
        walks = greedy_roots(count)
        decoder.launch(builder.build(), cache, walks).follow(walks)
        seconds = clock() - started_s
        for slot in slots:
            scratch.give_back(slot)
        return seconds

    seconds, started_s, shape = list[float](), clock(), DEFAULT_STEP_COST
    for before, count in pairwise((1, *KNOTS)):
        if count > most_rows or clock() - started_s > PROFILE_S:
            seconds.append(seconds[-1] * shape.at(count) / shape.at(before))
        else:
            seconds.append(max([min(step_s(count) for _ in range(SAMPLES)), *seconds[-1:]]))
    context = math.inf
    if far.blocks and most_rows >= FEW_ROWS and clock() - started_s < PROFILE_S:
        one, few, one_far, few_far = (
            min(step_s(count, pages) for _ in range(SAMPLES)) for pages in (nowhere, far) for count in (1, FEW_ROWS)
        )
        near_s, far_s = ((more - less) / (FEW_ROWS - 1) for more, less in ((few, one), (few_far, one_far)))
        attention_s = far_s - max(0.0, near_s)
        if attention_s > NODE_SHARE * one:
            # Few rows may take no more than one: then a row takes what it does among many.
            row_s = max(near_s, (seconds[-1] - seconds[0]) / (KNOTS[-1] - KNOTS[0]))
            context = far.num_computed * (row_s + NODE_SHARE * one) / attention_s
    return StepCost(rows=KNOTS, seconds=tuple(seconds), context=context)


def _pages(num_blocks: int) -> SessionPages:
    """A session that has filled so many blocks."""
    pages = SessionPages([], BlockPool(0))
    pages.blocks, pages.num_computed = [*range(num_blocks)], num_blocks * BLOCK_SIZE
    return pages

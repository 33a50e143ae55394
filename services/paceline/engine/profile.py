"""Measures the time of steps before there are sessions, for the policy to start from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from paceline.core.pages import BlockPool, SessionPages, SlotPool
from paceline.core.step_time import DEFAULT_STEP_COST, KNOTS, StepCost
from paceline.engine.model import Cache, Model
from paceline.engine.packing import BatchBuilder, TreeRow
from paceline.engine.pending import greedy_roots

# A profile of a large model on few cores ends here, and goes on by the shape of `DEFAULT_STEP_COST`: the slope between
# the last two of few points says little, since steps of up to some 8 rows take the same time.
PROFILE_S = 3.0
# Steps of each number of rows; the fastest counts, since other processes only ever slow one down.
SAMPLES = 3


def profile_steps(
    decoder: Model, cache: Cache, scratch: SlotPool, clock: Callable[[], float], *, most_rows: int
) -> StepCost:
    """Runs steps of up to `most_rows` rows over scratch slots alone, and returns their times; takes seconds.

    Args:
        scratch: Slots to write to, at least `most_rows`; all of them are free again afterwards.
        clock: Seconds, monotonic.
        most_rows: Most rows of a step.
    """
    nowhere = SessionPages([], BlockPool(0))

    def step_s(count: int) -> float:
        builder = BatchBuilder()
        slots = [slot for _ in range(count) if (slot := scratch.take()) is not None]
        assert len(slots) == count, "scratch holds as many slots as a step has rows"
        builder.add_nodes([TreeRow(nowhere, 0, 0, (slot,)) for slot in slots])
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
    return StepCost(rows=KNOTS, seconds=tuple(seconds))

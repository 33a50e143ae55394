"""Measures the time of steps before there are sessions, for the policy to start from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.core.pages import BlockPool, SessionPages, SlotPool
from paceline.core.step_time import DEFAULT_STEP_COST, KNOTS, StepCost
from paceline.engine.decoder import Decoder
from paceline.engine.kv import KVCache
from paceline.engine.packing import BatchBuilder

# A profile of a large model on few cores ends here, and is drawn out from what was measured.
PROFILE_S = 3.0
# Steps of each number of rows; the fastest counts, since other processes only ever slow one down.
SAMPLES = 3


class StepProfiler:
    """Runs steps of several numbers of rows over scratch slots alone.

    Args:
        decoder: The model.
        cache: Its KV.
        scratch: Slots to write to; all of them are free again afterwards.
        clock: Seconds, monotonic.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, scratch: SlotPool, clock: Callable[[], float]) -> None:
        self._decoder = decoder
        self._cache = cache
        self._scratch = scratch
        self._clock = clock

    def measure(self, most_rows: int) -> StepCost:
        """Times of steps of up to `most_rows` rows; takes seconds."""
        rows: list[int] = []
        seconds: list[float] = []
        started_s = self._clock()
        for count in KNOTS:
            if count > most_rows or self._clock() - started_s > PROFILE_S:
                break
            rows.append(count)
            seconds.append(max([min(self._time(count) for _ in range(SAMPLES)), *seconds[-1:]]))
        if len(rows) < 2:
            return DEFAULT_STEP_COST.scaled(seconds[0])
        computed = np.array([self._decoder.rows_computed(count) for count in range(most_rows + 1)])
        return StepCost(rows=tuple(rows), seconds=tuple(seconds), computed=computed)

    def _time(self, count: int) -> float:
        builder = BatchBuilder()
        nowhere = SessionPages([], BlockPool(0))
        slots = [self._scratch.take() for _ in range(count)]
        for slot in slots:
            assert slot is not None, "scratch holds as many slots as a step has rows"
            builder.add_node(nowhere, token_id=0, position=0, slot=slot, ancestors=())
        started_s = self._clock()
        self._decoder.forward(builder.build(), self._cache).cpu()
        seconds = self._clock() - started_s
        for slot in slots:
            assert slot is not None, "checked above"
            self._scratch.give_back(slot)
        return seconds

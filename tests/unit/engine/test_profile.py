"""The profile that an engine takes before it has sessions, of a device whose steps all take the same time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.core.pages import BLOCK_SIZE, SlotPool
from paceline.core.step_time import KNOTS, StepCost
from paceline.engine.profile import PROFILE_S, SAMPLES, profile_steps


class Device:
    """A model and its step under way.

    Args:
        row_s: More seconds for each row.
        token_s: More seconds for each token that a row attends.
        num_free: Rows that take no more than one.
    """

    def __init__(self, step_s: float, row_s: float = 0.0, token_s: float = 0.0, num_free: int = 0) -> None:
        self.now_s, self._step_s, self._row_s, self._token_s, self._num_free = 0.0, step_s, row_s, token_s, num_free
        self._under_way_s = 0.0

    def launch(self, batch: Any, *_: object) -> Device:
        lens = batch.context_lens
        self._under_way_s = (
            self._step_s + self._row_s * max(0, len(lens) - self._num_free) + self._token_s * int(lens.sum())
        )
        return self

    def follow(self, _: object) -> None:
        self.now_s += self._under_way_s


def profiled(*times: float, num_free: int = 0, most_rows: int = KNOTS[-1], num_blocks: int = 1000) -> StepCost:
    device: Any = Device(*times, num_free=num_free)
    scratch = SlotPool(0, -(-most_rows // BLOCK_SIZE))
    return profile_steps(device, device, scratch, lambda: device.now_s, most_rows=most_rows, num_blocks=num_blocks)


def test_what_there_is_time_for_is_measured() -> None:
    cost = profiled(0.001)
    assert cost.rows == KNOTS
    assert cost.seconds == pytest.approx([0.001] * len(KNOTS))
    assert cost.context == math.inf


@pytest.mark.parametrize("num_blocks", [1000, 10, 0])
def test_a_profile_shows_the_context_that_costs_a_guess_as_much_as_the_rest_of_its_row(num_blocks: int) -> None:
    cost = profiled(0.001, 2e-5, 2e-8, num_blocks=num_blocks)
    assert cost.context == (pytest.approx(1000, rel=0.15) if num_blocks else math.inf)


def test_where_few_rows_are_free_attention_is_compared_with_a_row_among_many() -> None:
    assert profiled(0.001, 2e-5, 2e-8, num_free=8).context == pytest.approx(1000, rel=0.15)


def test_beyond_that_a_profile_goes_on_by_the_shape_of_steps_and_not_by_its_last_slope() -> None:
    """A busy machine had shown 1, 4 and 8 rows: a step of 512 that was taken for one of 8 then took over 20 s."""
    step_s = 0.28
    cost, num_measured = profiled(step_s), 1 + int(PROFILE_S / (SAMPLES * step_s))
    assert cost.seconds[:num_measured] == pytest.approx([step_s] * num_measured)
    assert cost.seconds[num_measured] > 1.01 * step_s
    assert cost.at(KNOTS[-1]) > 10 * step_s


def test_steps_with_more_rows_than_the_engine_takes_are_not_measured() -> None:
    cost = profiled(0.001, most_rows=8)
    assert cost.at(8) == pytest.approx(0.001)
    assert cost.at(64) > 0.002

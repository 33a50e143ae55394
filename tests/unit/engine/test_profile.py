"""The profile that an engine takes before it has sessions, of a device whose steps all take the same time."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.pages import BLOCK_SIZE, SlotPool
from paceline.core.step_time import KNOTS, StepCost
from paceline.engine.profile import PROFILE_S, SAMPLES, profile_steps


class Device:
    """A model and its step under way."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self._step_s = 0.0, step_s

    def launch(self, *_: object) -> Device:
        return self

    def follow(self, _: object) -> None:
        self.now_s += self._step_s


def profiled(step_s: float, most_rows: int = KNOTS[-1]) -> StepCost:
    device: Any = Device(step_s)
    scratch = SlotPool(0, -(-most_rows // BLOCK_SIZE))
    return profile_steps(device, device, scratch, lambda: device.now_s, most_rows=most_rows)


def test_what_there_is_time_for_is_measured() -> None:
    cost = profiled(0.001)
    assert cost.rows == KNOTS
    assert cost.seconds == pytest.approx([0.001] * len(KNOTS))


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

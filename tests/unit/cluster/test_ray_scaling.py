"""How many drafters there should be: only lag that lasts changes it, within limits, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.fleet_file import DrafterSettings
from paceline.cluster.ray.scaling import LagReading, ScalingState, decide, mean_lag, wanted_replicas

LIMITS = DrafterSettings(
    min_replicas=1, max_replicas=6, target_lag_tokens=8.0, upscale_delay_s=10.0, downscale_delay_s=60.0
)


def reading(num_replicas: int, lag_tokens: float, num_starting: int = 0) -> LagReading:
    return LagReading(num_replicas=num_replicas, num_starting=num_starting, lag_tokens=lag_tokens)


def course(count: int, lags: Sequence[tuple[float, float]]) -> list[int]:
    """Numbers of drafters over time, for (second, lag)."""
    state, counts = ScalingState(), []
    for now_s, lag_tokens in lags:
        state, count = decide(LIMITS, state, reading(count, lag_tokens), now_s=now_s)
        counts.append(count)
    return counts


def test_as_many_are_wanted_as_bring_the_lag_to_its_target_at_most_twice_as_many() -> None:
    assert [wanted_replicas(LIMITS, reading(2, lag)) for lag in (0, 4, 8, 12, 16, 1000)] == [1, 1, 2, 3, 4, 4]
    # Near the target nothing changes.
    assert [wanted_replicas(LIMITS, reading(3, lag)) for lag in (7.3, 8.7)] == [3, 3]
    # No more are wanted while one is on its way, but fewer may be.
    assert [wanted_replicas(LIMITS, reading(2, lag, num_starting=1)) for lag in (100, 0)] == [2, 1]


@pytest.mark.parametrize(
    ("start", "lags", "counts"),
    [
        (1, [(0, 16), (9, 16), (10, 16)], [1, 1, 2]),
        (1, [(0, 16), (9, 8), (10, 16), (19, 16), (20, 16)], [1, 1, 1, 1, 2]),
        (1, [(0, 16), (10, 16), (11, 16), (20, 16), (21, 16)], [1, 2, 2, 2, 4]),
        (4, [(0, 0), (59, 0), (60, 0), (61, 0), (120, 0), (121, 0)], [4, 4, 3, 3, 3, 2]),
        (2, [(0, 0), (30, 16), (39, 16), (41, 0), (100, 0), (101, 0)], [2, 2, 2, 2, 2, 1]),
    ],
    ids=[
        "more when it lasts",
        "a break restarts the wait",
        "so does a change",
        "fewer one by one",
        "between restarts both",
    ],
)
def test_only_lag_that_lasts_changes_the_number(start: int, lags: list[tuple[float, float]], counts: list[int]) -> None:
    assert course(start, lags) == counts


def test_limits_that_were_changed_hold_at_once() -> None:
    assert decide(LIMITS, ScalingState(), reading(9, 8), now_s=0.0)[1] == 6
    assert decide(LIMITS, ScalingState(), reading(0, 0), now_s=0.0)[1] == 1


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e9)), max_size=40), st.integers(1, 6))
def test_the_number_never_leaves_its_limits(steps: list[tuple[float, float]], count: int) -> None:
    now_s, times = 0.0, []
    for pause_s, lag in steps:
        now_s += pause_s
        times.append((now_s, lag))
    assert all(1 <= each <= 6 for each in course(count, times))


def page(lag: float, num_sessions: int) -> str:
    return f"paceline:drafter_lag_tokens {lag}\npaceline:drafter_sessions {num_sessions}\n"


def test_the_lag_is_the_mean_of_drafters_with_sessions() -> None:
    assert mean_lag([page(6, 2), page(2, 1), page(99, 0), ""]) == 4.0
    assert mean_lag([page(99, 0)]) == mean_lag([]) == 0.0

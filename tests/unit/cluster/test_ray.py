"""A fleet on Ray without Ray: the command of a replica, what it takes of a node, and how many drafters there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.samples import Sample

from paceline.cluster.fleet_file import Scaling, ray_settings
from paceline.cluster.ray.fleet import LAG, SESSIONS, Trend, bundle_of, mean_lag, scale
from paceline.cluster.ray.host import Order
from paceline.cluster.spec import Endpoint, FleetSpec
from paceline.obs.metrics import samples_of
from paceline.service.config import load
from paceline.verifier.config import VerifierConfig


def order(**more: Any) -> Order:
    settings: dict[str, Any] = {
        "name": "verifier-1",
        "role": "verifier",
        "services": FleetSpec(dtype="float32", verifier_arg=("--max-num-seqs=8",)),
        "checkpoint": Path("/models/large"),
        "target": None,
        "redis_url": "redis://10.0.0.5:6379",
        "log_dir": Path("/logs"),
        "num_threads": 4,
    }
    return Order(**(settings | more))


def endpoint(role: str = "verifier") -> Endpoint:
    return Endpoint(name=f"{role}-1", role=role, host="10.0.0.7", port=4100, second_port=4101)


def test_a_verifier_announces_where_its_node_is_reached() -> None:
    config = load(VerifierConfig, order().child(endpoint()).argv[3:], {}, "verifier", "")
    assert (config.announce, config.host, config.replica_id) == ("10.0.0.7:4100", "10.0.0.7", "verifier-1")
    assert (config.threads, config.max_num_seqs) == (4, 8)


def test_variables_of_the_tier_reach_the_process_and_settings_of_others_do_not() -> None:
    child = order(env={"NCCL_DEBUG": "INFO", "PACELINE_PORT": "1"}).child(endpoint())
    assert child.env["NCCL_DEBUG"] == "INFO"
    assert "PACELINE_PORT" not in child.env


def test_a_gateway_gets_both_its_ports() -> None:
    child = order(name="gateway-1", role="gateway").child(endpoint("gateway"))
    assert child.argv[child.argv.index("--grpc-port") + 1] == "4101"
    assert child.argv[child.argv.index("--port") + 1] == "4100"


def test_a_bundle_holds_cpus_gpus_their_kind_and_custom_resources() -> None:
    tier = {"cpus": 8, "gpus": 1, "accelerator_type": "H100", "resources": {"verifier-gpu": 1}}
    bundle = bundle_of(ray_settings({"verifier": tier}).tiers["verifier"])
    assert bundle == {"CPU": 8.0, "GPU": 1.0, "accelerator_type:H100": 0.001, "verifier-gpu": 1.0}
    assert bundle_of(ray_settings({}).tiers["drafter"]) == {"CPU": 1.0}


LIMITS = Scaling(max_drafters=6, target_lag_tokens=8.0, upscale_delay_s=10.0, downscale_delay_s=60.0)
AT_ONCE = Scaling(max_drafters=6, target_lag_tokens=8.0, upscale_delay_s=0.0, downscale_delay_s=0.0)


def wanted(count: int, lag_tokens: float, num_starting: int = 0) -> int:
    return scale(AT_ONCE, Trend(), lag_tokens, fewest=1, count=count, num_starting=num_starting, now_s=0.0)[1]


def course(count: int, lags: Sequence[tuple[float, float]]) -> list[int]:
    """Numbers of drafters over time, for (second, lag)."""
    trend, counts = Trend(), []
    for now_s, lag_tokens in lags:
        trend, count = scale(LIMITS, trend, lag_tokens, fewest=1, count=count, num_starting=0, now_s=now_s)
        counts.append(count)
    return counts


def test_as_many_are_wanted_as_bring_the_lag_to_its_target_at_most_twice_as_many() -> None:
    assert [wanted(2, lag) for lag in (0, 4, 8, 12, 16, 1000)] == [1, 1, 2, 3, 4, 4]
    assert [wanted(3, lag) for lag in (7.3, 8.7)] == [3, 3], "near the target nothing changes"
    assert [wanted(2, lag, num_starting=1) for lag in (100, 0)] == [2, 1], "none more while one is on its way"


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


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e9)), max_size=40), st.integers(1, 6))
def test_the_number_never_leaves_its_limits(steps: list[tuple[float, float]], count: int) -> None:
    now_s, times = 0.0, []
    for pause_s, lag in steps:
        now_s += pause_s
        times.append((now_s, lag))
    assert all(1 <= each <= 6 for each in course(count, times))


def page(lag: float, num_sessions: int) -> list[Sample]:
    return samples_of(f"{LAG} {lag}\n{SESSIONS} {num_sessions}\n", (LAG, SESSIONS))


def test_the_lag_is_the_mean_of_drafters_with_sessions() -> None:
    assert mean_lag([page(6, 2), page(2, 1), page(99, 0), []]) == 4.0
    assert mean_lag([page(99, 0)]) == mean_lag([]) == 0.0

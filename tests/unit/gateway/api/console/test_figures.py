"""From two pages of metrics to figures, and from the fleet at two looks to a frame."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from paceline.core.target_events import StepReport
from paceline.gateway.api.console.figures import Rates, Reading, mean_price, read_page, sum_of_rates, verifier_rates
from paceline.gateway.api.console.frames import Look, OwnCounts, frame
from paceline.obs.metrics import VerifierMetrics
from paceline.obs.steps import record_served_by, record_step
from paceline.store.base import Replica
from tests.support.replicas import replica

VERIFIER, DRAFTER, GATEWAY = replica("v"), replica("d", "drafter"), replica("g", "gateway")
OWN = OwnCounts(replica_id="g", num_sessions=2, sessions_at={"v": 2}, tokens=100.0)


class Verifier:
    """A verifier's real metrics, fed with steps of two sessions."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = VerifierMetrics(self._registry, "tiny")

    def step(self, gammas: list[int], accepted: list[int], **more: object) -> None:
        report = StepReport(num_rows=8, seconds=0.01, price=0.25, gammas=gammas, accepted=accepted, lag_tokens=5)
        for name, value in more.items():
            setattr(report, name, value)
        record_step(self.metrics, report)

    def read(self, taken_s: float) -> Reading:
        return read_page(generate_latest(self._registry).decode(), taken_s)


def busy(seconds: float = 2.0) -> tuple[Reading, Reading]:
    """Two readings; between them two steps of two sessions: 4 and 0, then 4 and 2 drafted; 3, then 0 and 2 matched."""
    verifier = Verifier()
    verifier.step([1], [1], num_hits=1)
    before = verifier.read(10.0)
    verifier.step([4, 0], [3], num_misses=1, round_trips_s=[0.25, 0.75])
    verifier.step([4, 2], [0, 2], num_hits=2)
    record_served_by(verifier.metrics, "d:1", 2)
    return before, verifier.read(10.0 + seconds)


def test_rates_are_what_was_counted_between_two_readings_each_second() -> None:
    rates = verifier_rates(*busy())
    assert rates == Rates(
        steps=1.0,
        turns=2.0,
        drafted=5.0,
        accepted=2.5,
        rounds=1.5,
        accepted_by_position=(1.0, 1.0, 0.5),
        hits=1.0,
        misses=0.5,
        round_trips=1.0,
        round_trips_s=0.5,
    )


def test_figures_follow_from_rates() -> None:
    rates = verifier_rates(*busy())
    assert rates is not None
    assert rates.figures() == {
        "tokens_per_s": 4.5,
        "accepted_per_s": 2.5,
        "batch_size": 2.0,
        "gamma": 2.5,
        "hit_rate": pytest.approx(2 / 3),
        "round_trip_s": 0.5,
        "rounds_per_s": 1.5,
        "accepted_by_position_per_s": [1.0, 1.0, 0.5],
    }


def test_a_verifier_that_does_nothing_has_no_ratios() -> None:
    verifier = Verifier()
    rates = verifier_rates(verifier.read(1.0), verifier.read(2.0))
    assert rates == Rates()
    assert {name for name, value in rates.figures().items() if value is None} == {
        "batch_size",
        "gamma",
        "hit_rate",
        "round_trip_s",
    }


def test_a_verifier_that_started_anew_has_no_rates() -> None:
    _, after = busy()
    assert verifier_rates(after, Verifier().read(20.0)) is None
    assert verifier_rates(after, after) is None


def test_several_verifiers_add_up_position_by_position() -> None:
    total = sum_of_rates(
        [Rates(turns=1.0, accepted_by_position=(2.0, 1.0)), Rates(turns=3.0, accepted_by_position=(4.0,))]
    )
    assert (total.turns, total.accepted_by_position) == (4.0, (6.0, 1.0))


def test_the_price_of_a_fleet_is_weighed_by_steps() -> None:
    assert mean_price([(1.0, 1.0), (0.5, 3.0)]) == 0.625
    assert mean_price([(0.5, 0.0)]) is None


def look(taken_s: float, *replicas: Replica, **readings: Reading) -> Look:
    return Look(taken_s=taken_s, replicas=replicas, readings=readings, own=OWN)


def test_a_frame_tells_who_serves_whom() -> None:
    before, after = busy()
    told = frame(look(10.0, VERIFIER, DRAFTER, GATEWAY, v=before), look(12.0, VERIFIER, DRAFTER, GATEWAY, v=after))
    assert told["status"] == "drafting"
    assert told["edges"] == [
        {"from": "g", "to": "v", "sessions": 2},
        {"from": "v", "to": "d", "sessions": 2},
    ]
    assert (told["fleet"]["gamma"], told["fleet"]["price"], told["fleet"]["unanswered_tokens"]) == (2.5, 0.25, 5.0)
    assert {each["id"]: each["read"] for each in told["replicas"]} == {"v": True, "d": False, "g": True}
    assert told["fleet"]["uncomputed_tokens"] is None


def test_a_first_frame_has_no_rates_and_the_same_fields() -> None:
    before, after = busy()
    first = frame(None, look(12.0, VERIFIER, v=after))
    later = frame(look(10.0, VERIFIER, v=before), look(12.0, VERIFIER, v=after))
    assert first["fleet"].keys() == later["fleet"].keys()
    assert first["fleet"]["tokens_per_s"] is None
    assert first["gateway"]["tokens_per_s"] is None


def test_tokens_of_the_gateway_are_its_own_count() -> None:
    sooner = replace(look(10.0), own=replace(OWN, tokens=40.0))
    assert frame(sooner, look(12.0))["gateway"]["tokens_per_s"] == 30.0


@pytest.mark.parametrize(
    ("replicas", "status"),
    [
        ((), "no verifier"),
        ((DRAFTER,), "no verifier"),
        ((VERIFIER,), "no drafter"),
        ((VERIFIER, replica("d", "drafter", draining=True)), "no drafter"),
        ((VERIFIER, DRAFTER), "drafting"),
    ],
)
def test_a_missing_tier_is_told(replicas: tuple[Replica, ...], status: str) -> None:
    assert frame(None, look(1.0, *replicas))["status"] == status

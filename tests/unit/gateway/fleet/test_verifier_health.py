"""Verifiers that fail or refuse sessions get none for a while, unless most of them do; and which can be reached."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.core.errors import OverloadedError
from paceline.gateway.fleet.verifier_health import EJECTION_S, FULL_S, UNREACHABLE_S, VerifierHealth
from paceline.store.base import Replica
from tests.support.replicas import replica

FLEET = [replica(f"v{index}") for index in range(4)]
FULL = OverloadedError("a place would be free in about 3.0 s", retry_after_s=1.0)


@pytest.fixture
def time() -> SimpleNamespace:
    return SimpleNamespace(now_s=100.0)


@pytest.fixture
def health(time: SimpleNamespace) -> VerifierHealth:
    return VerifierHealth(lambda: time.now_s)


def names(health: VerifierHealth, fleet: list[Replica] = FLEET) -> list[str]:
    return [each.replica_id for each in health.without_ejected(fleet)]


def fail(health: VerifierHealth, name: str, times: int = 3) -> None:
    for _ in range(times):
        health.failed(name)


def test_three_failures_in_a_row_eject_and_one_among_three_sessions_never_does(health: VerifierHealth) -> None:
    for _ in range(20):
        fail(health, "v0", 2)
        assert "v0" in names(health)
        for _ in range(4):
            health.served("v0")
    fail(health, "v0", 3)
    assert names(health) == ["v1", "v2", "v3"]


def test_every_second_failure_ejects_as_well(health: VerifierHealth) -> None:
    for _ in range(4):
        health.failed("v1")
        health.served("v1")
        assert "v1" in names(health)
    health.failed("v1")
    assert "v1" not in names(health)


def test_an_ejection_ends_on_probation_and_the_next_one_is_longer(time: SimpleNamespace) -> None:
    seen: list[str] = []
    health = VerifierHealth(lambda: time.now_s, seen.append)
    fail(health, "v0", 2)
    for number in (1, 2, 3):
        health.failed("v0")
        # A session that was under way fails as well.
        health.failed("v0")
        time.now_s += number * EJECTION_S - 0.1
        assert "v0" not in names(health)
        time.now_s += 0.2
        assert "v0" in names(health)
    assert seen == ["v0"] * 3
    for _ in range(6):
        health.served("v0")
    fail(health, "v0", 3)
    time.now_s += EJECTION_S
    assert "v0" in names(health), "sessions that it served are amends for its past"


def test_with_more_than_half_of_them_ejected_all_are_asked(health: VerifierHealth) -> None:
    fail(health, "v0")
    fail(health, "v1")
    assert names(health) == ["v2", "v3"]
    fail(health, "v2")
    assert names(health) == ["v0", "v1", "v2", "v3"]
    assert names(health, FLEET[:1]) == ["v0"]


def test_verifiers_that_left_are_forgotten(health: VerifierHealth, time: SimpleNamespace) -> None:
    fail(health, "v0")
    health.lost("v0")
    time.now_s += 0.1
    health.keep_only(FLEET[1:])
    assert names(health) == ["v0", "v1", "v2", "v3"]
    assert health.suspects(FLEET) == []


def test_a_refusal_by_all_verifiers_is_repeated_for_a_moment(health: VerifierHealth, time: SimpleNamespace) -> None:
    health.check_room([], 2.0)
    health.refused("v0", FULL, 2.0)
    with pytest.raises(OverloadedError, match="about 3"):
        health.check_room(["v0"], 2.0)
    health.check_room(["v0", "v1"], 2.0)
    health.refused("v1", FULL, 2.0)
    with pytest.raises(OverloadedError):
        health.check_room(["v0", "v1"], 1.0)
    health.check_room(["v0", "v1"], 2.5)
    time.now_s += FULL_S
    health.check_room(["v1"], 2.0)
    health.refused("v1", OverloadedError("soon", retry_after_s=0.1), 2.0)
    time.now_s += 0.1
    health.check_room(["v1"], 2.0)


def test_verifiers_are_out_of_reach_once_all_have_been_lost_for_a_while(
    health: VerifierHealth, time: SimpleNamespace
) -> None:
    two = FLEET[:2]
    for each in two:
        health.lost(each.replica_id)
    assert health.any_reachable(two)
    time.now_s += UNREACHABLE_S
    # A later loss is no new beginning.
    health.lost("v0")
    assert not health.any_reachable(two)
    health.heard("v1")
    assert health.any_reachable(two)
    assert not health.any_reachable(two[:1])
    assert health.suspects(FLEET) == FLEET[:1]

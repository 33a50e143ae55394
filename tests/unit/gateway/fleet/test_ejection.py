"""Verifiers that fail their sessions get none for a while, unless most of them do."""

from __future__ import annotations

from paceline.gateway.fleet.ejection import CONSECUTIVE, EJECTION_S, LEAST_OUTCOMES, WINDOW_S, Ejections
from tests.support.replicas import replica

FLEET = [replica(f"v{index}") for index in range(4)]


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def names(ejections: Ejections, fleet: list = FLEET) -> list[str]:  # type: ignore[type-arg]
    return [each.replica_id for each in ejections.without(fleet)]


def fail(ejections: Ejections, name: str, times: int = CONSECUTIVE) -> None:
    for _ in range(times):
        ejections.failed(name)


def test_failures_in_a_row_eject_and_one_success_between_them_does_not() -> None:
    ejections = Ejections(Time())
    fail(ejections, "v0", CONSECUTIVE - 1)
    ejections.served("v0")
    fail(ejections, "v0", CONSECUTIVE - 1)
    assert names(ejections) == ["v0", "v1", "v2", "v3"]
    ejections.failed("v0")
    assert names(ejections) == ["v1", "v2", "v3"]


def test_every_second_failure_ejects_as_well() -> None:
    ejections = Ejections(Time())
    for _ in range(LEAST_OUTCOMES // 2):
        ejections.failed("v1")
        assert "v1" in names(ejections)
        ejections.served("v1")
    ejections.failed("v1")
    assert "v1" not in names(ejections)


def test_failures_of_long_ago_do_not_count() -> None:
    time = Time()
    ejections = Ejections(time)
    for _ in range(2 * LEAST_OUTCOMES):
        ejections.failed("v1")
        ejections.served("v1")
        time.now_s += WINDOW_S / 4
    assert "v1" in names(ejections)


def test_an_ejection_ends_and_the_next_one_is_longer() -> None:
    time, seen = Time(), list[str]()
    ejections = Ejections(time, seen.append)
    for number in (1, 2, 3):
        fail(ejections, "v0")
        time.now_s += number * EJECTION_S - 0.1
        assert "v0" not in names(ejections)
        time.now_s += 0.2
        assert "v0" in names(ejections)
    assert seen == ["v0"] * 3


def test_with_more_than_half_of_them_ejected_all_are_asked() -> None:
    ejections = Ejections(Time())
    fail(ejections, "v0")
    fail(ejections, "v1")
    assert names(ejections) == ["v2", "v3"]
    fail(ejections, "v2")
    assert names(ejections) == ["v0", "v1", "v2", "v3"]
    assert names(ejections, FLEET[:1]) == ["v0"]


def test_verifiers_that_left_are_forgotten() -> None:
    ejections = Ejections(Time())
    fail(ejections, "v0")
    ejections.keep_only(FLEET[1:])
    assert names(ejections) == ["v0", "v1", "v2", "v3"]

"""Verifiers that fail or refuse sessions get none for a while, unless most of them do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.core.errors import OverloadedError
from paceline.gateway.fleet.ejection import (
    CONSECUTIVE,
    EJECTION_S,
    FULL_S,
    LEAST_OUTCOMES,
    WINDOW_S,
    Ejections,
    FullVerifiers,
)
from paceline.store.base import Replica
from tests.support.replicas import replica

FLEET = [replica(f"v{index}") for index in range(4)]
FULL = OverloadedError("a place would be free in about 3.0 s", retry_after_s=1.0)


@pytest.fixture
def time() -> SimpleNamespace:
    return SimpleNamespace(now_s=100.0)


@pytest.fixture
def ejections(time: SimpleNamespace) -> Ejections:
    return Ejections(lambda: time.now_s)


def names(ejections: Ejections, fleet: list[Replica] = FLEET) -> list[str]:
    return [each.replica_id for each in ejections.without(fleet)]


def fail(ejections: Ejections, name: str, times: int = CONSECUTIVE) -> None:
    for _ in range(times):
        ejections.failed(name)


def test_failures_in_a_row_eject_and_one_success_between_them_does_not(ejections: Ejections) -> None:
    fail(ejections, "v0", CONSECUTIVE - 1)
    ejections.served("v0")
    fail(ejections, "v0", CONSECUTIVE - 1)
    assert names(ejections) == ["v0", "v1", "v2", "v3"]
    ejections.failed("v0")
    assert names(ejections) == ["v1", "v2", "v3"]


def test_every_second_failure_ejects_as_well(ejections: Ejections) -> None:
    for _ in range(LEAST_OUTCOMES // 2):
        ejections.failed("v1")
        assert "v1" in names(ejections)
        ejections.served("v1")
    ejections.failed("v1")
    assert "v1" not in names(ejections)


def test_failures_of_long_ago_do_not_count(ejections: Ejections, time: SimpleNamespace) -> None:
    for _ in range(2 * LEAST_OUTCOMES):
        ejections.failed("v1")
        ejections.served("v1")
        time.now_s += WINDOW_S / 4
    assert "v1" in names(ejections)


def test_an_ejection_ends_and_the_next_one_is_longer(time: SimpleNamespace) -> None:
    seen: list[str] = []
    ejections = Ejections(lambda: time.now_s, seen.append)
    for number in (1, 2, 3):
        fail(ejections, "v0")
        time.now_s += number * EJECTION_S - 0.1
        assert "v0" not in names(ejections)
        time.now_s += 0.2
        assert "v0" in names(ejections)
    assert seen == ["v0"] * 3


def test_with_more_than_half_of_them_ejected_all_are_asked(ejections: Ejections) -> None:
    fail(ejections, "v0")
    fail(ejections, "v1")
    assert names(ejections) == ["v2", "v3"]
    fail(ejections, "v2")
    assert names(ejections) == ["v0", "v1", "v2", "v3"]
    assert names(ejections, FLEET[:1]) == ["v0"]


def test_verifiers_that_left_are_forgotten(ejections: Ejections) -> None:
    fail(ejections, "v0")
    ejections.keep_only(FLEET[1:])
    assert names(ejections) == ["v0", "v1", "v2", "v3"]


def test_a_refusal_by_all_verifiers_is_repeated_for_a_moment(time: SimpleNamespace) -> None:
    full = FullVerifiers(lambda: time.now_s)
    full.check([], 2.0)
    full.refused("v0", FULL, 2.0)
    with pytest.raises(OverloadedError, match="about 3"):
        full.check(["v0"], 2.0)
    full.check(["v0", "v1"], 2.0)
    full.refused("v1", FULL, 2.0)
    with pytest.raises(OverloadedError):
        full.check(["v0", "v1"], 1.0)
    full.check(["v0", "v1"], 2.5)
    full.keep_only(FLEET[1:])
    full.check(["v0"], 2.0)
    time.now_s += FULL_S
    full.check(["v1"], 2.0)
    full.refused("v1", OverloadedError("soon", retry_after_s=0.1), 2.0)
    time.now_s += 0.1
    full.check(["v1"], 2.0)

"""Sessions leave drafters that are gone, and go where there are fewest."""

from __future__ import annotations

import pytest

from paceline.core.pairing import DOWN_S, FAR_S, FULL_S, NEAR_S, DrafterCandidate, Pairing, expected_round_trip_s
from paceline.core.params import DRAFT_MODEL, EAGLE3

BOTH = (DRAFT_MODEL, EAGLE3)


def drafter(
    address: str,
    num_sessions: int = 0,
    *,
    max_sessions: int = 0,
    down_s: float = 0.0,
    method: str = DRAFT_MODEL,
    round_trip_s: float = FAR_S,
) -> DrafterCandidate:
    return DrafterCandidate(
        address=address,
        method=method,
        num_sessions=num_sessions,
        max_sessions=max_sessions,
        down_s=down_s,
        round_trip_s=round_trip_s,
    )


def pairing(*drafters: DrafterCandidate, **num_own: int) -> Pairing:
    known = Pairing()
    for address, count in num_own.items():
        known.count(address, count)
    known.know(drafters)
    return known


def paired(current: str, *drafters: DrafterCandidate, **num_own: int) -> str:
    return pairing(*drafters, **num_own).choose(BOTH, current)


@pytest.mark.parametrize(
    ("current", "drafters", "num_own", "expected"),
    [
        pytest.param("a", [drafter("a", 9), drafter("b")], {}, "a", id="stays while its drafter is well"),
        pytest.param("a", [drafter("a", down_s=DOWN_S / 2), drafter("b")], {}, "a", id="waits while it is dialled"),
        pytest.param(
            "a", [drafter("a"), drafter("b", round_trip_s=NEAR_S)], {}, "a", id="stays when a nearer one comes"
        ),
        pytest.param("a", [drafter("a", down_s=DOWN_S), drafter("b")], {}, "b", id="leaves one that is down"),
        pytest.param("a", [drafter("b")], {}, "b", id="leaves one that is gone"),
        pytest.param("a", [], {}, "a", id="keeps one that is gone while there is no other"),
        pytest.param("a", [drafter("a", down_s=5.0), drafter("b", down_s=5.0)], {}, "a", id="or none is up"),
        pytest.param("", [], {}, "", id="begins without one"),
        pytest.param("", [drafter("b")], {}, "b", id="gets the first"),
        pytest.param("", [drafter("a", down_s=DOWN_S), drafter("b", 9)], {}, "b", id="begins at one that is up"),
        pytest.param("", [drafter("a", down_s=DOWN_S)], {}, "", id="gets none that is down"),
        pytest.param("", [drafter("a", 3), drafter("b", 2)], {}, "b", id="fewest sessions"),
        pytest.param("", [drafter("a", 3), drafter("b")], {"b": 4}, "a", id="own sessions included"),
        pytest.param("", [drafter("a", 2, max_sessions=4), drafter("b", 3, max_sessions=8)], {}, "b", id="by its size"),
        pytest.param("", [drafter("a", 5), drafter("b", 5)], {"a": 1}, "b", id="of equals, fewest own sessions"),
    ],
)
def test_a_session_stays_with_a_drafter_that_is_well_and_otherwise_gets_the_least_loaded(
    current: str, drafters: list[DrafterCandidate], num_own: dict[str, int], expected: str
) -> None:
    assert paired(current, *drafters, **num_own) == expected


def test_a_near_drafter_is_taken_until_its_load_outweighs_the_way_to_another() -> None:
    outweighed_at = round((FAR_S - NEAR_S) / FULL_S * 1000)
    near = [drafter("b", count, max_sessions=1000, round_trip_s=NEAR_S) for count in (0, outweighed_at - 1)]
    full = drafter("b", outweighed_at + 1, max_sessions=1000, round_trip_s=NEAR_S)
    far = drafter("a", 0, max_sessions=1000)
    assert [paired("", far, each) for each in (*near, full)] == ["b", "b", "a"]


def test_drafters_get_sessions_in_proportion_to_their_sizes_so_a_canary_is_a_small_one() -> None:
    known = pairing(drafter("main", max_sessions=270), drafter("canary", max_sessions=30))
    for _ in range(200):
        known.count(known.choose(BOTH), +1)
    assert known.num_own["canary"] == pytest.approx(20, abs=1)


def test_zones_that_nobody_names_are_not_near() -> None:
    assert expected_round_trip_s("z1", "z1") == NEAR_S
    assert {expected_round_trip_s(*zones) for zones in (("z1", "z2"), ("", ""), ("z1", ""), ("", "z1"))} == {FAR_S}


def test_a_session_goes_to_drafters_of_its_methods_only() -> None:
    known = pairing(drafter("a"), drafter("b", 9, method=EAGLE3))
    assert known.choose((EAGLE3,)) == "b"
    assert known.choose((EAGLE3,), "a") == "b"
    assert known.choose(()) == ""


def spare(*drafters: DrafterCandidate, **num_own: int) -> str:
    return pairing(*drafters, **num_own).spare()


def test_a_stream_is_kept_to_the_least_loaded_drafter_that_no_session_has() -> None:
    assert spare(drafter("a"), drafter("b", 2), drafter("c"), a=3) == "c"
    assert spare(drafter("a"), a=3) == ""
    assert spare(drafter("a"), drafter("b"), drafter("c"), a=3, b=1) == ""
    assert spare(drafter("a"), drafter("b"), a=3, gone=1) == "b"

"""Which bundles a fleet asks Ray for, who gets them, and when they are given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.cluster.fleet_file import parse_spec
from paceline.cluster.ray.placement import Bundle, TierPlacement, bundle_of


class Groups:
    """The placement groups that a cluster would have; a handle is their number."""

    def __init__(self) -> None:
        self.made: list[tuple[list[Bundle], str]] = []
        self.alive: set[int] = set()

    def make(self, bundles: Sequence[Bundle], strategy: str) -> int:
        self.made.append((list(bundles), strategy))
        self.alive.add(len(self.made) - 1)
        return len(self.made) - 1

    def remove(self, handle: int) -> None:
        self.alive.remove(handle)


def placement(groups: Groups, **verifier: Any) -> TierPlacement:
    return TierPlacement(parse_spec({"verifier": verifier}).verifier, make=groups.make, remove=groups.remove)


def test_a_bundle_holds_cpus_gpus_their_kind_and_custom_resources() -> None:
    tier = parse_spec(
        {"verifier": {"cpus": 8, "gpus": 1, "accelerator_type": "H100", "resources": {"verifier-gpu": 1}}}
    ).verifier
    assert bundle_of(tier) == {"CPU": 8.0, "GPU": 1.0, "accelerator_type:H100": 0.001, "verifier-gpu": 1.0}


def test_replicas_placed_together_share_a_group_that_is_spread() -> None:
    groups = Groups()
    tier = placement(groups)
    assert tier.take(0) == []
    assert [slot.bundle for slot in tier.take(3)] == [0, 1, 2]
    assert groups.made == [([{"CPU": 1.0}] * 3, "SPREAD")]


def test_a_bundle_that_was_left_is_taken_before_a_new_group_is_made() -> None:
    groups = Groups()
    tier = placement(groups)
    first, second = tier.take(2)
    tier.give_back(first)
    again, new = tier.take(2)
    assert (again.group, again.bundle) == (second.group, 0)
    assert (len(groups.made), new.bundle) == (2, 0)


def test_groups_are_given_back_with_their_last_replica_and_all_at_the_end() -> None:
    groups = Groups()
    tier = placement(groups)
    (base,) = tier.take(1)
    (added,) = tier.take(1)
    assert groups.alive == {0, 1}
    tier.give_back(added)
    assert groups.alive == {0}
    tier.give_back(base)
    assert groups.alive == set()
    tier.take(2)
    tier.take(1)
    tier.remove_all()
    assert groups.alive == set()

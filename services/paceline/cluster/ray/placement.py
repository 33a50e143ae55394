"""Where replicas go: placement groups of Ray, and which replica has which of their bundles.

The replicas of a tier that are placed together share a group, so that Ray spreads them over hosts. A group is given
back when its last replica has gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.fleet_file import Tier

# Takes the least of the resource by which Ray marks nodes with a kind of accelerator.
ACCELERATOR_SHARE = 0.001

Bundle = Mapping[str, float]


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A placement group; `handle` is Ray's, `free` are the bundles without a replica."""

    handle: Any
    size: int
    free: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The bundle of one replica."""

    group: Group
    bundle: int


def bundle_of(tier: Tier[Any]) -> dict[str, float]:
    """Returns what a replica of a tier takes of a node."""
    settings = tier.settings
    bundle = {"CPU": settings.cpus, **tier.resources}
    if settings.gpus:
        bundle["GPU"] = settings.gpus
    if settings.accelerator_type:
        bundle[f"accelerator_type:{settings.accelerator_type}"] = ACCELERATOR_SHARE
    return bundle


class TierPlacement:
    """The groups of one tier.

    Args:
        tier: Its settings.
        make: Asks Ray for a group of bundles, placed by a strategy.
        remove: Gives a group back.
    """

    def __init__(
        self, tier: Tier[Any], *, make: Callable[[Sequence[Bundle], str], Any], remove: Callable[[Any], None]
    ) -> None:
        self._bundle = bundle_of(tier)
        self._strategy = tier.settings.strategy
        self._make = make
        self._remove = remove
        self._groups: list[Group] = []

    def take(self, count: int) -> list[Slot]:
        """Returns places for new replicas; bundles that others have left are used first."""
        vacant = [group for group in self._groups for _ in group.free][:count]
        slots = [self._pop(group) for group in vacant]
        if len(slots) < count:
            group = self._new(count - len(slots))
            slots += [self._pop(group) for _ in range(group.size)]
        return slots

    def give_back(self, slot: Slot) -> None:
        """Frees the place of a replica that has gone."""
        group = slot.group
        group.free = sorted([*group.free, slot.bundle])
        if len(group.free) == group.size:
            self._groups.remove(group)
            self._remove(group.handle)

    def remove_all(self) -> None:
        """Gives all groups back; Ray ends what still runs in them."""
        while self._groups:
            self._remove(self._groups.pop().handle)

    def _new(self, size: int) -> Group:
        group = Group(handle=self._make([self._bundle] * size, self._strategy), size=size, free=list(range(size)))
        self._groups.append(group)
        return group

    @staticmethod
    def _pop(group: Group) -> Slot:
        return Slot(group=group, bundle=group.free.pop(0))

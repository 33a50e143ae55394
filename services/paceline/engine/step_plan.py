"""What a target engine's next step computes: planned before it runs, so that drafters hear of it first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.step_cost import StepMode
from paceline.core.tree import Node
from paceline.engine.packing import BatchBuilder
from paceline.engine.target_session import TargetSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """One decoding session in a step.

    Attributes:
        nodes: Verified nodes, parents before children.
        slots: Their scratch slots, by `id` of the node.
        logit_index: Where the logits of the root and of each node are, by `id` of the node.
    """

    session: TargetSession
    nodes: tuple[Node, ...]
    slots: dict[int, int]
    logit_index: dict[int, int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    Attributes:
        started_s: When planning began.
        mode: Whether drafters work meanwhile.
        builder: Its rows.
        verifications: Sessions that decode.
        finishing: Sessions whose first token it gives, and where their logits are.
    """

    started_s: float
    mode: StepMode
    builder: BatchBuilder
    verifications: list[Verification]
    finishing: list[tuple[TargetSession, int]]

    @property
    def num_rows(self) -> int:
        """Rows to compute; 0: there is nothing to do."""
        return self.builder.num_rows

    @property
    def batch_size(self) -> int:
        """Sessions that get tokens."""
        return len(self.verifications) + len(self.finishing)


def ancestor_slots(node: Node, slots: Mapping[int, int]) -> list[int]:
    """Scratch slots of a node's ancestors below the root, oldest first."""
    path: list[int] = []
    above = node.parent
    while above is not None and id(above) in slots:
        path.append(slots[id(above)])
        above = above.parent
    return path[::-1]

"""Whether a step waits for drafters: what its sessions have in hand, and what they would gain by their next nodes.

A step waits where that is worth the time (`paceline.core.goodput.is_worth`).
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.tree import DraftTree, best_nodes

# Share of a promising leaf's survival that its best child keeps, until a drafter's first guesses show what it is: the
# mean confidence of a fair one.
CHILD_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What a decoding session has in hand and may still get.

    Args:
        expected: Expected committed tokens if the step ran now (1 + sum of survivals of nodes in hand).
        gain: Expected tokens that the next nodes of the drafter would add; 0 for a session that must not be delayed.
    """

    expected: float
    gain: float


def prospect(
    tree: DraftTree, cap: int, *, price: float, child_share: float = CHILD_SHARE, chain: bool = False
) -> Prospect:
    """Looks at a tree: survivals in hand, and the best leaf that the drafter is extending right now.

    Args:
        tree: The session's tree.
        cap: Most nodes it may have verified.
        price: Least survival worth verifying; 1 for a session that must not be delayed for drafts.
        child_share: Survival of a node's best child over that of the node, with this drafter.
        chain: Whether the nodes must be one chain.
    """
    in_hand = best_nodes(tree, cap, chain=chain)
    survivals = [tree.survival(node) for node in in_hand]
    expected = 1.0 + sum(survivals)
    # A leaf that is not in hand is worth less than all that are, and so are its children.
    leaves = [tree.survival(node) for node in in_hand if not node.children] if tree.root.children else [1.0]
    best_child = child_share * max(leaves, default=0.0)
    # With as many nodes as it may use, a session gains what the new node has over the weakest one.
    replaced = survivals[-1] if survivals and len(survivals) >= cap else 0.0
    gain = max(0.0, best_child - replaced) if cap and best_child > price else 0.0
    return Prospect(expected=expected, gain=gain)

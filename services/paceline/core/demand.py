"""One decoding session as the policies see it that pick the nodes of a step and say who drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.survivals import SessionSurvivals
from paceline.core.tree import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One decoding session.

    Args:
        tree: Its guesses.
        cap: Most nodes it may have verified.
        chain: Whether they must be one chain.
        drafted: Whether a drafter is there for it.
        answered: Whether that drafter has answered since it was called to work, so that the tree is what it brings.
        own: Survivals of guesses that it has without a drafter, best first.
        num_unread: Tokens that its drafter would read before it could draft.
        usual: What it usually has in hand; the policy keeps it up.
    """

    tree: DraftTree
    cap: int
    chain: bool = False
    drafted: bool = True
    answered: bool = True
    own: Sequence[float] = ()
    num_unread: int = 0
    usual: SessionSurvivals = field(default_factory=SessionSurvivals)

    @property
    def is_drafted(self) -> bool:
        """Whether its drafter's guesses would be of use."""
        return self.drafted and self.cap > 0

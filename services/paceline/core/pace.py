"""How fast drafts come over one link, and so how long waiting for the next ones would take.

Time comes in as an argument; nothing here reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.patience import CHILD_SHARE

# Weight of a new observation.
SMOOTHING = 0.2
# Nodes are overdue after so many times the usual delay.
OVERDUE = 3.0


@dataclass(slots=True)
class LinkPace:
    """Smoothed delays of one verifier-drafter link, in seconds.

    Args:
        response_s: From a commit that emptied the tree to the first nodes beyond it.
        interval_s: Between two messages with nodes of one session.
        silent: A response was overdue; nobody waits for this link until it is heard again.
        child_share: Survival that the best first guess after a commit has usually had: nobody waits for what is worth
            nothing.
    """

    response_s: float = 0.004
    interval_s: float = 0.002
    silent: bool = False
    child_share: float = CHILD_SHARE

    def heard_guess(self, survival: float) -> None:
        """The best first guess after a commit has this survival."""
        self.child_share += SMOOTHING * (survival - self.child_share)

    def heard_response(self, delay_s: float) -> None:
        """First nodes after a commit took `delay_s`."""
        self.response_s += SMOOTHING * (delay_s - self.response_s)

    def heard_next(self, delay_s: float) -> None:
        """Further nodes of the same session took `delay_s`."""
        self.interval_s += SMOOTHING * (delay_s - self.interval_s)

    def wait_s(self, *, now_s: float, committed_s: float, heard_s: float | None) -> float | None:
        """Expected seconds until a session's next nodes.

        Args:
            now_s: The time now.
            committed_s: When the session's last commit went out.
            heard_s: When nodes last came since that commit; None: not yet.

        Returns:
            A positive time; None when they are overdue, or the link is silent.
        """
        if self.silent:
            return None
        usual_s = self.response_s if heard_s is None else self.interval_s
        elapsed_s = now_s - (committed_s if heard_s is None else heard_s)
        if elapsed_s > OVERDUE * usual_s:
            return None
        return max(usual_s - elapsed_s, 0.25 * usual_s)

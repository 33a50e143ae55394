"""A verifier on a simulated device that notes the parts of its rounds."""

from __future__ import annotations

from loadtest.timed.marks import Marks
from paceline.core.drafter_tier import DrafterTier
from paceline.simulated.device import SimulatedTarget
from paceline.tier.links import DrafterLink
from paceline.verifier import __main__ as service
from paceline.verifier.verifier_host import TargetHost

# A device is at work, or done; the commit goes out; drafts are in the event loop, and in the trees.
BEGUN, DONE, SENT, ARRIVED, TAKEN_IN = "begun", "done", "sent", "arrived", "taken-in"


def main() -> None:
    """Runs the verifier of the command line."""
    marks = Marks("verifier")
    marks.around(SimulatedTarget, "launch", BEGUN, DONE)
    marks.around(DrafterLink, "send", SENT)
    marks.around(TargetHost, "_drafts_arrived", ARRIVED)
    marks.around(DrafterTier, "receive", after=TAKEN_IN)
    service.main()


if __name__ == "__main__":
    main()

"""A verifier on a simulated device that notes the parts of its rounds."""

from __future__ import annotations

from typing import Any

from loadtest.timed.marks import Marks
from paceline.core.target_events import DraftsArrived
from paceline.engine.target import TargetEngine
from paceline.simulated.device import SimulatedTarget
from paceline.tier.links import DrafterLink
from paceline.verifier import __main__ as service
from paceline.verifier.verifier_host import TargetHost

# A device is at work, or done; the commit goes out; drafts are in the event loop, and in the engine.
BEGUN, DONE, SENT, ARRIVED, TAKEN_IN = "begun", "done", "sent", "arrived", "taken-in"


def main() -> None:
    """Runs the verifier of the command line."""
    marks = Marks("verifier")
    marks.around(SimulatedTarget, "launch", BEGUN, DONE)
    marks.around(DrafterLink, "send", SENT)
    marks.around(TargetHost, "_drafts_arrived", ARRIVED)
    handle = TargetEngine.handle

    def timed(self: TargetEngine, event: Any) -> None:
        handle(self, event)
        if isinstance(event, DraftsArrived):
            marks.note(TAKEN_IN)

    TargetEngine.handle = timed  # type: ignore[method-assign]  # notes when drafts are merged
    service.main()


if __name__ == "__main__":
    main()

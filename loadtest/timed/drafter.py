"""A drafter on a simulated device that notes the parts of its steps."""

from __future__ import annotations

from loadtest.timed.marks import Marks
from loadtest.timed.verifier import BEGUN, DONE
from paceline.drafter import __main__ as service
from paceline.drafter.drafter_host import DraftHost
from paceline.engine.drafter import DraftEngine
from paceline.simulated.device import SimulatedDraft

# The engine has the commit; drafts are on their way.
HEARD, OUT = "heard", "out"


def main() -> None:
    """Runs the drafter of the command line."""
    marks = Marks("drafter")
    marks.around(DraftEngine, "handle", after=HEARD)
    marks.around(SimulatedDraft, "draft", BEGUN, DONE)
    marks.around(DraftHost, "_hand_on", after=OUT)
    service.main()


if __name__ == "__main__":
    main()

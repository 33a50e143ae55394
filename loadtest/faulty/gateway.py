"""A gateway whose wall clock jumps, when it is ordered to."""

from __future__ import annotations

import sys

from loadtest.faulty.orders import obey
from paceline.gateway import __main__ as service


def main() -> None:
    """Runs the gateway of the command line."""
    obey(sys.argv)
    service.main()


if __name__ == "__main__":
    main()

"""Runs a bench by name: `python -m loadtest acceptance --help`, or `make bench NAME=acceptance`."""

from __future__ import annotations

import importlib
import sys

BENCHES = {
    "acceptance": "acceptance rate and mean acceptance length of the demo pair, through the fleet",
    "demo": "the fleet at work on a few prompts, with and without speculation, and a table",
    "stall": "time between tokens while the drafter is stopped for 5 s",
    "widen": "widens a checkpoint with neurons that change no output, for benches",
}


def main() -> None:
    """Hands over to the bench named first on the command line."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHES:
        sys.stderr.write("usage: python -m loadtest NAME [options]\n\n")
        for known, what in BENCHES.items():
            sys.stderr.write(f"  {known:12} {what}\n")
        raise SystemExit(2)
    del sys.argv[1]
    importlib.import_module(f"loadtest.{name}").main()


if __name__ == "__main__":
    main()

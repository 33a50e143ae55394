"""A verifier of a fleet with two targets: every other one gets other values of its flags."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from paceline.verifier import __main__ as service

VARIABLE = "LOADTEST_ODD_VERIFIERS"


def environ_of(flags: Mapping[str, object]) -> dict[str, str]:
    """The variable, with values of flags of the second, fourth, ... verifier."""
    return {VARIABLE: json.dumps({flag: str(value) for flag, value in flags.items()})}


def alternate(argv: list[str]) -> None:
    """Changes a verifier's command line if it is one of these."""
    if int(argv[argv.index("--replica-id") + 1].rpartition("-")[2]) % 2:
        for flag, value in json.loads(os.environ.get(VARIABLE, "{}")).items():
            argv[argv.index(flag) + 1] = value


def main() -> None:
    """Runs the verifier of the command line."""
    alternate(sys.argv)
    service.main()


if __name__ == "__main__":
    main()

"""`paceline acceptance`: how often a drafter guesses what its target writes, before anything is deployed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoints.source import fetched
from paceline.core.errors import ConfigError
from paceline.service.config import exit_with_error, parse, setting

PROG = "paceline acceptance"
DESCRIPTION = (
    "Measures how well a drafter fits its target. The target continues some prompts, and the drafter guesses on from "
    "every place of that text. Prints a table by temperature: the share of chains whose guesses are accepted up to a "
    "position, the most that any acceptance rule could accept of first guesses, and the mean number of tokens that a "
    "round commits with 3, 5 and 7 guesses. The prompts are Python code that the demo pair never saw. Both models run "
    "in float32 on the CPU."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceConfig:
    """Settings of `paceline acceptance`."""

    target: Path = setting(help="Checkpoint folder of the target, or a name of the Hugging Face Hub.")
    drafter: Path = setting(help="That of the draft model, the Medusa heads or the EAGLE-3 head.")
    prompts: int = setting(40, help="Number of prompts.", low=1, high=1000)
    tokens: int = setting(128, help="Tokens that the target writes after each.", low=8, high=100_000)
    seed: int = setting(0, help="Of the choice of prompts and of the sampling noise.", low=0, high=2**31 - 1)


def main(argv: Sequence[str]) -> None:
    """Entry point of `paceline acceptance`: prints a Markdown table."""
    config = fetched(parse(AcceptanceConfig, argv, os.environ, PROG, DESCRIPTION), PROG, "target", "drafter")
    from paceline.acceptance.measure import acceptance_table

    try:
        found = acceptance_table(config.target, config.drafter, config.prompts, config.tokens, config.seed)
    except (FileNotFoundError, ValueError) as error:
        exit_with_error(PROG, ConfigError(str(error)))
    sys.stdout.write(found + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

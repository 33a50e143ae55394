"""`python -m training`: makes the demo models, or a drafter or heads for a checkpoint you have."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.service.config import exit_with_error, parse, setting
from training.demo import make_demo
from training.distill import DistillConfig, make_drafter
from training.heads import Eagle3Config, MedusaConfig, make_eagle3, make_medusa

PROG = "python -m training"
USAGE = f"""usage: {PROG} COMMAND [OPTIONS]

  demo      the four demo models, as those that ship were made
  distill   a draft model for a Llama-family target
  medusa    Medusa heads on a frozen target
  eagle3    an EAGLE-3 head on a frozen target

examples:
  {PROG} demo --out runs/demo
  {PROG} demo --out runs/demo --resume     go on after an interruption
  {PROG} distill --target models/llama --layers 2 --out models/llama-drafter
  {PROG} distill --target models/llama --start models/llama-drafter --out models/better
  {PROG} medusa --target models/llama --out models/llama-medusa
  {PROG} eagle3 --target models/llama --out models/llama-eagle3

The demo models learn from the source of the Python standard library on this machine; nothing is downloaded. A CUDA
GPU is used if there is one; on two CPU cores `demo` takes some hours. `paceline acceptance` measures any drafter,
heads too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Settings of `python -m training demo`."""

    out: Path = setting(help="Folder for the four models and for checkpoints of their runs.")
    resume: bool = setting(False, help="Go on from what is in that folder.")


COMMANDS: dict[str, tuple[type[Any], Callable[[Any], None], str]] = {
    "demo": (
        DemoConfig,
        lambda config: make_demo(config.out, config.resume),
        "Trains the demo target from nothing, and a draft model, Medusa heads and an EAGLE-3 head for it.",
    ),
    "distill": (
        DistillConfig,
        make_drafter,
        "Makes a draft model for a Llama-family target: its first layers, distilled on its probabilities.",
    ),
    "medusa": (MedusaConfig, make_medusa, "Trains Medusa heads on a frozen Llama-family target."),
    "eagle3": (Eagle3Config, make_eagle3, "Trains an EAGLE-3 head on a frozen Llama-family target."),
}


def main(argv: Sequence[str]) -> None:
    """Run the command that the arguments name."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not argv or argv[0] not in COMMANDS:
        is_help = bool(argv) and argv[0] in ("-h", "--help")
        (sys.stdout if is_help else sys.stderr).write(USAGE)
        raise SystemExit(0 if is_help else 2)
    config_class, action, description = COMMANDS[argv[0]]
    prog = f"{PROG} {argv[0]}"
    try:
        action(parse(config_class, argv[1:], os.environ, prog, description))
    except (FileNotFoundError, ValueError) as error:
        exit_with_error(prog, ConfigError(str(error)))


if __name__ == "__main__":
    main(sys.argv[1:])

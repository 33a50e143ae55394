"""`python -m training`: makes the demo models, or a drafter or heads for a checkpoint you have, and measures any."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from paceline.checkpoints.source import folder_of
from paceline.core.errors import ConfigError
from paceline.service.config import exit_with_error, parse, setting

LOG = logging.getLogger(__name__)

PROG = "python -m training"
USAGE = f"""usage: {PROG} COMMAND [OPTIONS]

  demo        the four demo models, as those that ship were made
  distill     a draft model for a Llama-family target
  medusa      Medusa heads on a frozen target
  eagle3      an EAGLE-3 head on a frozen target
  acceptance  how often a drafter of any kind guesses what its target writes

examples:
  {PROG} demo --out runs/demo
  {PROG} demo --out runs/demo --resume     go on after an interruption
  {PROG} distill --target models/llama --layers 2 --out models/llama-drafter
  {PROG} distill --target models/llama --start models/llama-drafter --out models/better
  {PROG} medusa --target models/llama --out models/llama-medusa
  {PROG} eagle3 --target models/llama --prompts-file prompts.txt --out models/llama-eagle3
  {PROG} acceptance --target models/llama --drafter models/llama-eagle3 --prompts-file others.txt

Text is chats, prompts that the target answers, or Python files.
The demo models learn from the source of the Python standard library on this machine; nothing is downloaded. A CUDA
GPU is used if there is one; on two CPU cores `demo` takes some hours.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Settings of `python -m training demo`."""

    out: Path = setting(help="Folder for the four models and for checkpoints of their runs.")
    resume: bool = setting(False, help="Go on from what is in that folder.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceConfig:
    """Settings of `python -m training acceptance`."""

    target: Path = setting(help="Checkpoint folder of the target, or a name of the Hugging Face Hub.")
    drafter: Path = setting(help="Checkpoint folder or Hub name of the draft model, Medusa heads or EAGLE-3 head.")
    prompts: int = setting(40, help="Number of prompts at most.", low=1, high=1000)
    prompts_file: Path | None = setting(
        None,
        help="Prompts, one a line: plain text, or JSON with `messages` or `prompt`, rendered with the target's chat "
        "template. Openings of Python code if not given.",
    )
    tokens: int = setting(128, help="Tokens that the target writes after each at most.", low=8, high=100_000)
    seed: int = setting(0, help="Of the choice of prompts and of the sampling noise.", low=0, high=2**31 - 1)


def print_acceptance(config: AcceptanceConfig) -> None:
    """Prints a Markdown table.

    Raises:
        ValueError: The two do not fit, or there are too few prompts.
    """
    from training.acceptance import acceptance_table
    from training.text import prompts_of

    target, drafter = folder_of(config.target, "--target"), folder_of(config.drafter, "--drafter")
    prompts = None if config.prompts_file is None else prompts_of(config.prompts_file, target)
    table = acceptance_table(target, drafter, prompts, config.prompts, config.tokens, config.seed)
    sys.stdout.write(table + "\n")


def make_demo(config: DemoConfig) -> None:
    """Make the four demo models."""
    resolve_name("training.demo:make_demo")(config.out, config.resume)


# Names, since imports of torch and transformers take seconds: a line says so before they begin.
COMMANDS = {
    "demo": (
        f"{__name__}:DemoConfig",
        f"{__name__}:make_demo",
        "Trains the demo target from nothing, and a draft model, Medusa heads and an EAGLE-3 head for it.",
    ),
    "distill": (
        "training.distill:DistillConfig",
        "training.distill:make_drafter",
        "Makes a draft model for a Llama-family target: its first layers, distilled on its probabilities.",
    ),
    "medusa": (
        "training.heads:MedusaConfig",
        "training.heads:make_medusa",
        "Trains Medusa heads on a frozen Llama-family target.",
    ),
    "eagle3": (
        "training.heads:Eagle3Config",
        "training.heads:make_eagle3",
        "Trains an EAGLE-3 head on a frozen Llama-family target.",
    ),
    "acceptance": (
        f"{__name__}:AcceptanceConfig",
        f"{__name__}:print_acceptance",
        "Measures how well a drafter fits its target, in float32 on the CPU. The target answers prompts of a file, or "
        "continues Python code that the demo pair never saw. The drafter guesses on from every place of that text. The "
        "table shows by temperature the share of chains that are accepted up to a position, the most that any "
        "acceptance rule could accept of first guesses, and the mean tokens of a round with 3, 5 and 7 guesses.",
    ),
}


def main(argv: Sequence[str]) -> None:
    """Run the command that the arguments name."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not argv or argv[0] not in COMMANDS:
        is_help = bool(argv) and argv[0] in ("-h", "--help")
        (sys.stdout if is_help else sys.stderr).write(USAGE)
        raise SystemExit(0 if is_help else 2)
    LOG.info("loading torch and transformers")
    config_name, action_name, description = COMMANDS[argv[0]]
    config_class, action = resolve_name(config_name), resolve_name(action_name)
    prog = f"{PROG} {argv[0]}"
    try:
        action(parse(config_class, argv[1:], os.environ, prog, description))
    except (FileNotFoundError, ValueError) as error:
        exit_with_error(prog, ConfigError(str(error)))


if __name__ == "__main__":
    main(sys.argv[1:])

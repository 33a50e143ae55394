"""`paceline train`: makes the demo pair, or a drafter for a checkpoint you have."""

import argparse
import logging
import sys
from pathlib import Path

from paceline.training.corpus import unseen_prompts
from paceline.training.demo import DemoConfig, held_out_loss, prepare, target_config, train_target
from paceline.training.distill import DistillConfig, distill
from paceline.training.evaluate import TEMPERATURES, encode_prompts, measure, table
from paceline.training.export import Card, export_model
from paceline.training.loop import has_checkpoint, load_weights
from paceline.training.models import load_model, new_model
from paceline.training.tokenizer import load_tokenizer

TARGET_SHARE = 0.6
"""Of the minutes given to `demo`, for the target; the rest is the drafter's."""

EPILOG = """examples:
  paceline train demo --out runs/demo              tokenizer, target, drafter, figures
  paceline train demo --out runs/demo --resume     go on after an interruption
  paceline train distill --target ~/models/llama --layers 2 --out ~/models/llama-drafter
  paceline train evaluate --target A --drafter B   acceptance of any pair

The demo pair learns from the source of the Python standard library on this machine; nothing is
downloaded. A CUDA GPU is used if there is one; on two CPU cores `demo` takes one to two hours.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the three commands of `paceline train`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    commands = parser.add_subparsers(dest="train_command", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="train tokenizer, target and drafter from nothing"))
    _add_distill(commands.add_parser("distill", help="make a drafter for a Llama-family target"))
    _add_evaluate(commands.add_parser("evaluate", help="print a pair's acceptance table"))


def main(args: argparse.Namespace) -> int:
    """Run the chosen command; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    actions = {"demo": _demo, "distill": _distill, "evaluate": _evaluate}
    try:
        actions[args.train_command](args)
    except (FileNotFoundError, ValueError) as error:
        sys.stderr.write(f"paceline train {args.train_command}: {error}\n")
        return 2
    return 0


def _add_demo(parser: argparse.ArgumentParser) -> None:
    defaults = DemoConfig(out=Path())
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the two models")
    parser.add_argument(
        "--steps",
        type=int,
        default=defaults.steps,
        help="steps of the target, 8,192 tokens each (default: %(default)s)",
    )
    parser.add_argument(
        "--distill-steps",
        type=int,
        default=DistillConfig(target=Path(), out=Path()).steps,
        help="steps of the drafter (default: %(default)s)",
    )
    _add_common(parser)


def _add_distill(parser: argparse.ArgumentParser) -> None:
    defaults = DistillConfig(target=Path(), out=Path())
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face checkpoint folder of the target")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafter")
    parser.add_argument(
        "--layers", type=int, default=defaults.layers, help="layers the drafter keeps (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help="steps of 8,192 tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--corpus", type=Path, default=None, help="folder of *.py files (default: the standard library)"
    )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="same seed, same run (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint under --out")
    parser.add_argument(
        "--minutes",
        type=float,
        default=None,
        help="finish in this time with fewer steps and a whole decay; such a run repeats only roughly",
    )


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, required=True, help="checkpoint folder of the target")
    parser.add_argument("--drafter", type=Path, required=True, help="checkpoint folder of the drafter")
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens written after each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and noise (default: %(default)s)")


def _demo(args: argparse.Namespace) -> None:
    work, run = args.out / "target-run", args.out / "demo-drafter-run"
    limit_of_target = limit_of_drafter = None
    if args.minutes is not None:
        limit_of_target, limit_of_drafter = TARGET_SHARE * args.minutes, (1 - TARGET_SHARE) * args.minutes
    train_target(
        DemoConfig(
            out=work,
            steps=args.steps,
            seed=args.seed,
            resume=args.resume and has_checkpoint(work),
            minutes=limit_of_target,
        )
    )
    export_target(work, args.out / "demo-target", args.seed)
    config = DistillConfig(
        target=args.out / "demo-target",
        out=run,
        steps=args.distill_steps,
        seed=args.seed,
        resume=args.resume and has_checkpoint(run),
        minutes=limit_of_drafter,
    )
    distill_into(config, args.out / "demo-drafter", "Paceline demo drafter")


def export_target(work: Path, out: Path, seed: int) -> None:
    """Export the run's last checkpoint, with its held-out loss in the card.

    Raises:
        FileNotFoundError: `work` holds no finished run.
    """
    config = DemoConfig(out=work, seed=seed, resume=True)
    model = new_model(target_config())
    steps = load_weights(work, model)
    _, held_out = prepare(config)
    loss = held_out_loss(model, held_out, config.batch_tokens)
    figures = (
        f"Seed {seed}, {steps} steps of {config.batch_tokens:,} tokens; mean cross-entropy on "
        f"held-out files {loss:.3f} nats per token."
    )
    summary = "Target of Paceline's demo pair, trained from nothing by `paceline train demo`."
    card = Card(title="Paceline demo target", summary=summary, figures=figures)
    export_model(model, work / "tokenizer", out, card)


def _distill(args: argparse.Namespace) -> None:
    config = DistillConfig(
        target=args.target,
        out=args.out.with_name(args.out.name + "-run"),
        layers=args.layers,
        steps=args.steps,
        seed=args.seed,
        resume=args.resume,
        minutes=args.minutes,
        corpus=args.corpus,
    )
    distill_into(config, args.out, f"Drafter for {args.target.name}")


def distill_into(config: DistillConfig, out: Path, title: str) -> None:
    """Distil, export, measure, and export again with the figures in the card.

    Raises:
        FileNotFoundError: no target there, or no checkpoint to resume from.
        ValueError: the target has fewer layers than asked for.
    """
    drafter = distill(config)
    summary = (
        f"Drafter for `{config.target.name}`: its first {config.layers} layers, distilled on its "
        "probabilities over the corpus and over text the target wrote, by `paceline train distill`."
    )
    # Figures are measured on the weights as they ship, rounded to bfloat16.
    export_model(drafter, config.target, out, Card(title=title, summary=summary, figures=""))
    figures = acceptance_table(config.target, out, num_prompts=40, num_new=128, seed=0)
    sys.stdout.write(figures + "\n")
    steps = load_weights(config.out, drafter)
    text = (
        f"Acceptance along the target's own text, 40 held-out prompts x 128 tokens, float32, after "
        f"{steps} steps of {config.batch_tokens:,} tokens (seed {config.seed}):\n\n{figures}"
    )
    export_model(drafter, config.target, out, Card(title=title, summary=summary, figures=text))


def _evaluate(args: argparse.Namespace) -> None:
    found = acceptance_table(args.target, args.drafter, args.prompts, args.tokens, args.seed)
    sys.stdout.write(found + "\n")


def acceptance_table(target_folder: Path, drafter_folder: Path, num_prompts: int, num_new: int, seed: int) -> str:
    """The pair's acceptance on held-out prompts, as a Markdown table.

    Raises:
        FileNotFoundError: a folder lacks config.json or tokenizer.json.
        ValueError: the vocabularies differ in size, or there are too few held-out prompts.
    """
    target, drafter = load_model(target_folder), load_model(drafter_folder)
    sizes = (target.config.vocab_size, drafter.config.vocab_size)
    if sizes[0] != sizes[1]:
        raise ValueError(f"vocabulary of the target is {sizes[0]}, of the drafter {sizes[1]}")
    prompts = encode_prompts(load_tokenizer(target_folder), unseen_prompts(num_prompts, seed))
    return table([measure(target, drafter, prompts, value, num_new, seed) for value in TEMPERATURES])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="paceline train", description=__doc__)
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))

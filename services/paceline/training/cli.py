"""`paceline train`: makes the demo pair, or a drafter or heads for a checkpoint you have."""

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.service.config import as_called
from paceline.training.corpus import unseen_prompts
from paceline.training.demo import DemoConfig, held_out_loss, prepare, target_config, train_target
from paceline.training.distill import DistillConfig, distill
from paceline.training.eagle3_run import Eagle3Config, train_eagle3
from paceline.training.evaluate import TEMPERATURES, encode_prompts, measure, table
from paceline.training.export import Card, export_heads, export_model
from paceline.training.layouts import load_drafter
from paceline.training.loop import finished_steps, has_checkpoint, load_weights
from paceline.training.medusa import MedusaConfig, train_medusa
from paceline.training.models import load_model, new_model
from paceline.training.runs import RunConfig
from paceline.training.tokenizer import load_tokenizer

TARGET_SHARE = 0.6
"""Of the minutes given to `demo`, for the target; the rest is the drafter's."""

EPILOG = """examples:
  paceline train demo --out runs/demo              tokenizer, target, drafter, figures
  paceline train demo --out runs/demo --resume     go on after an interruption
  paceline train distill --target ~/models/llama --layers 2 --out ~/models/llama-drafter
  paceline train distill --target ~/models/llama --start ~/models/llama-drafter --out ~/models/better
  paceline train medusa --target ~/models/llama --out ~/models/llama-medusa
  paceline train eagle3 --target ~/models/llama --out ~/models/llama-eagle3
  paceline train evaluate --target A --drafter B   acceptance of any drafter, heads too

The demo pair learns from the source of the Python standard library on this machine; nothing is
downloaded. A CUDA GPU is used if there is one; on two CPU cores `demo` takes one to two hours.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the commands of `paceline train`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    commands = parser.add_subparsers(dest="train_command", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="train tokenizer, target and drafter from nothing"))
    _add_distill(commands.add_parser("distill", help="make a drafter for a Llama-family target"))
    _add_medusa(commands.add_parser("medusa", help="train Medusa heads on a frozen target"))
    _add_eagle3(commands.add_parser("eagle3", help="train an EAGLE-3 head on a frozen target"))
    _add_evaluate(commands.add_parser("evaluate", help="print a drafter's acceptance table"))


def main(args: argparse.Namespace) -> int:
    """Run the chosen command; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    actions = {"demo": _demo, "distill": _distill, "medusa": _medusa, "eagle3": _eagle3, "evaluate": _evaluate}
    try:
        actions[args.train_command](args)
    except (FileNotFoundError, ValueError) as error:
        sys.stderr.write(f"{as_called('paceline train')} {args.train_command}: {error}\n")
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
    parser.add_argument(
        "--layers", type=int, default=defaults.layers, help="layers the drafter keeps (default: %(default)s)"
    )
    parser.add_argument(
        "--start",
        type=Path,
        default=defaults.start,
        metavar="FOLDER",
        help="drafter to go on from, with the layers that it has and those that it lacks "
        "(default: the target's first layers)",
    )
    _add_run(parser, defaults)


def _add_medusa(parser: argparse.ArgumentParser) -> None:
    defaults = MedusaConfig(target=Path(), out=Path())
    parser.add_argument("--heads", type=int, default=defaults.heads, help="tokens guessed (default: %(default)s)")
    parser.add_argument(
        "--blocks", type=int, default=defaults.blocks, help="residual blocks of a head (default: %(default)s)"
    )
    parser.add_argument(
        "--own-heads", action="store_true", help="a vocabulary matrix for each head, not the target's for all"
    )
    _add_run(parser, defaults)


def _add_eagle3(parser: argparse.ArgumentParser) -> None:
    defaults = Eagle3Config(target=Path(), out=Path())
    parser.add_argument(
        "--unrolled-steps",
        type=int,
        default=defaults.unrolled_steps,
        help="drafts of a chain that training follows (default: %(default)s)",
    )
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        default=defaults.draft_vocab_size,
        help="token ids it can guess, the most frequent ones (default: %(default)s)",
    )
    parser.add_argument(
        "--aux-layers",
        type=int,
        nargs=3,
        default=None,
        metavar="LAYER",
        help="layers of the target whose outputs it reads (default for L layers: 1, L//2-1, L-4)",
    )
    _add_run(parser, defaults)


def _add_run(parser: argparse.ArgumentParser, defaults: RunConfig) -> None:
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face checkpoint folder of the target")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafter")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="most steps (default: %(default)s)")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=defaults.batch_tokens,
        help="tokens of a step, a multiple of 1024 (default: %(default)s)",
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
    parser.add_argument("--drafter", type=Path, required=True, help="folder of the drafter or the heads")
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
    config = DistillConfig(layers=args.layers, start=args.start, **_run_settings(args))
    distill_into(config, args.out, f"Drafter for {args.target.name}")


def _medusa(args: argparse.Namespace) -> None:
    config = MedusaConfig(heads=args.heads, blocks=args.blocks, own_heads=args.own_heads, **_run_settings(args))
    heads = train_medusa(config)
    title = f"Medusa heads for {args.target.name}"
    summary = (
        f"{args.heads} Medusa heads (arXiv 2401.10774) on the frozen `{args.target.name}`, "
        f"{'with output heads of their own' if args.own_heads else 'which share its output head'}, trained "
        "on its probabilities over the corpus and over text it wrote, by `paceline train medusa`."
    )
    publish(config, args.out, title, summary, lambda card: export_heads(heads, heads.layout, args.out, card))


def _eagle3(args: argparse.Namespace) -> None:
    config = Eagle3Config(
        unrolled_steps=args.unrolled_steps,
        draft_vocab_size=args.draft_vocab_size,
        aux_layers=None if args.aux_layers is None else tuple(args.aux_layers),
        **_run_settings(args),
    )
    head = train_eagle3(config)
    title = f"EAGLE-3 head for {args.target.name}"
    summary = (
        f"An EAGLE-3 head (arXiv 2503.01840) on the frozen `{args.target.name}`: reads the outputs of its "
        f"layers {', '.join(map(str, head.taps))}, guesses among {args.draft_vocab_size} token ids, trained on "
        "its probabilities over the corpus and over text it wrote, by `paceline train eagle3`."
    )
    publish(config, args.out, title, summary, lambda card: export_heads(head, head.layout, args.out, card))


def _run_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings that all trainings on a frozen target have."""
    return {
        "target": args.target,
        "out": args.out.with_name(args.out.name + "-run"),
        "steps": args.steps,
        "batch_tokens": args.batch_tokens,
        "seed": args.seed,
        "resume": args.resume,
        "minutes": args.minutes,
        "corpus": args.corpus,
    }


def distill_into(config: DistillConfig, out: Path, title: str) -> None:
    """Distil, export and measure.

    Raises:
        FileNotFoundError: no target there, or no checkpoint to resume from.
        ValueError: the target has fewer layers than asked for.
    """
    drafter = distill(config)
    origin = f"its first {config.layers} layers" if config.start is None else f"`{config.start.name}`, gone on from"
    summary = (
        f"Drafter for `{config.target.name}`: {origin}, distilled on its "
        "probabilities over the corpus and over text the target wrote, by `paceline train distill`."
    )
    publish(config, out, title, summary, lambda card: export_model(drafter, config.target, out, card))


def publish(config: RunConfig, out: Path, title: str, summary: str, export: Callable[[Card], object]) -> None:
    """Export to `out`, measure what ships, and export again with the figures in the card."""
    # Figures are measured on the weights as they ship, rounded to bfloat16.
    export(Card(title=title, summary=summary, figures=""))
    figures = acceptance_table(config.target, out, num_prompts=40, num_new=128, seed=0)
    sys.stdout.write(figures + "\n")
    text = (
        f"Acceptance along the target's own text, 40 held-out prompts x 128 tokens, float32, after "
        f"{finished_steps(config.out)} steps of {config.batch_tokens:,} tokens (seed {config.seed}):\n\n{figures}"
    )
    export(Card(title=title, summary=summary, figures=text))


def _evaluate(args: argparse.Namespace) -> None:
    found = acceptance_table(args.target, args.drafter, args.prompts, args.tokens, args.seed)
    sys.stdout.write(found + "\n")


def acceptance_table(target_folder: Path, drafter_folder: Path, num_prompts: int, num_new: int, seed: int) -> str:
    """A drafter's acceptance on held-out prompts, as a Markdown table.

    Raises:
        FileNotFoundError: a folder lacks config.json, weights or tokenizer.json.
        ValueError: the two do not fit, or there are too few held-out prompts.
    """
    target = load_model(target_folder)
    drafter = load_drafter(drafter_folder, target)
    prompts = encode_prompts(load_tokenizer(target_folder), unseen_prompts(num_prompts, seed))
    return table([measure(target, drafter, prompts, value, num_new, seed) for value in TEMPERATURES])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=as_called("paceline train"), description=__doc__)
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))

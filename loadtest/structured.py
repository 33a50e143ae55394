"""Schema-bound answers with the grammar's forced tokens as guesses, and without: `make bench NAME=structured`.

One fleet, verifier on a core of its own, a drafter on the rest. Requests ask for JSON with many keys and take turns:
with drafters and look-up, and with the grammar as a third source (`tier`); plain, and with the grammar alone (`alone`).
Every answer must be the same whichever sources drafted, and one that ends by itself must follow its schema.

Goals: 1.3 with the grammar alone at either batch size, and never below 0.98.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema_rs

from loadtest.bench import add_round_flags, bench_parser, report, run, show
from loadtest.client import BatchResult, run_batch, same_texts
from loadtest.fleet import DEMO_PAIR, OWN_HARDWARE, bench_fleet, widened_target
from loadtest.streams import Ask
from loadtest.trial import Trial, rounded_error, take_turns

# What requests of a side ask of speculation. Each "with" is compared with the "without" of its kind.
SIDES: dict[str, dict[str, Any]] = {
    "tier, with": {"method": "draft_model+ngram+grammar"},
    "tier, without": {"method": "draft_model+ngram"},
    "alone, with": {"method": "grammar"},
    "alone, without": {"enabled": False},
}
KINDS = ("tier", "alone")
GOAL, LEAST = 1.3, 0.98
BATCH_SIZES = (1, 8)
NUM_KEYS = 12
WORDS = ("status", "position", "language", "identifier", "created", "visible", "priority", "category", "version")
KINDS_OF_VALUE: tuple[Mapping[str, Any], ...] = (
    {"type": "boolean"},
    {"type": "integer", "minimum": 0, "maximum": 999},
    {"enum": ["active", "inactive", "unknown"]},
    {"type": "string", "maxLength": 8},
)
# Results by batch size and side, one a round.
_Results = Mapping[tuple[int, str], Sequence[BatchResult]]


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("structured", __doc__)
    parser.add_argument("--prompts", type=int, default=8, help="answers a turn (default 8)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default 256)")
    parser.add_argument("--temperature", type=float, default=0.8, help="default 0.8")
    parser.add_argument("--target", choices=("98m", "demo"), default="98m", help="the target (default 98m)")
    add_round_flags(parser, 2, 4)
    run(parser, measure)


def schema_of(number: int) -> dict[str, Any]:
    """An object of many keys, all of them required."""
    rng = random.Random(number)
    names = [f"{word}_{index}" for index, word in enumerate(rng.choices(WORDS, k=NUM_KEYS))]
    properties = {name: rng.choice(KINDS_OF_VALUE) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def asks_of(arguments: argparse.Namespace, side: str) -> list[Ask]:
    """The requests of a turn, as one side sends them."""
    return [
        Ask(
            prompt=f"# Record {number} of the table as JSON:\nrecord = ",
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            seed=number,
            speculation=SIDES[side],
            more={"ignore_eos": False, "structured_outputs": {"json": schema_of(number)}},
        )
        for number in range(arguments.prompts)
    ]


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs all rounds and prints the table; True when answers are as they must be and nothing got slower."""
    models = DEMO_PAIR if arguments.target == "demo" else widened_target(arguments.target)
    places = [(batch_size, kind) for batch_size in BATCH_SIZES for kind in KINDS]
    async with bench_fleet(**models, **OWN_HARDWARE) as fleet:

        async def turn(at: tuple[int, str]) -> BatchResult:
            batch_size, side = at
            return await run_batch(fleet.gateway_url, asks_of(arguments, side), batch_size, f"{batch_size}, {side}")

        for side in SIDES:
            await turn((1, side))
        results = await take_turns(
            [(batch_size, side) for batch_size in BATCH_SIZES for side in SIDES],
            turn,
            rounds=arguments.rounds,
            most_rounds=arguments.most_rounds,
            is_known=lambda found: all(_trial(found, *place).is_known() for place in places),
            title="sides",
        )
    rows = [_row(results, *place) for place in places]
    same = same_texts(each for found in results.values() for each in found)
    texts = results[1, "alone, without"][0].texts
    num_finished = _num_valid(texts)
    show(rows)
    print(f"{num_finished} of {len(texts)} answers ended by themselves, all valid; the others were cut off")
    given = {name: getattr(arguments, name) for name in ("prompts", "max_tokens", "temperature", "target")}
    ok = same and all(row["ok"] for row in rows)
    figures = {"same_texts": same, "num_finished": num_finished}
    return report("structured", **given, rows=rows, **figures, ok=ok)


def _trial(results: _Results, batch_size: int, kind: str) -> Trial:
    with_grammar, without = (
        [each.tokens_per_s for each in results[batch_size, f"{kind}, {way}"]] for way in ("with", "without")
    )
    return Trial.of(with_grammar, without)


def _row(results: _Results, batch_size: int, kind: str) -> dict[str, Any]:
    trial, found = _trial(results, batch_size, kind), results[batch_size, f"{kind}, with"]
    return {
        "batch_size": batch_size,
        "kind": kind,
        "tokens_per_s": round(statistics.median(each.tokens_per_s for each in found), 1),
        "acceptance_length": round(found[0].mean_acceptance_length, 2),
        "ratio": round(trial.ratio, 3),
        "error": rounded_error(trial),
        "rounds": len(trial.ratios),
        "ok": trial.meets(least=GOAL if kind == "alone" else LEAST),
    }


def _num_valid(texts: Sequence[str]) -> int:
    """How many answers are whole.

    Raises:
        jsonschema_rs.ValidationError: One is whole and does not follow its schema.
    """
    count = 0
    for number, text in enumerate(texts):
        try:
            value = json.loads(text)
        except ValueError:
            continue
        jsonschema_rs.Draft202012Validator(schema_of(number)).validate(value)
        count += 1
    return count

"""Every way to draft on the same prompts: `make bench NAME=methods`.

A stream, verifier on one core, a drafter with the distilled draft model and one with the EAGLE-3 head on the rest;
requests name their method, so one fleet serves them all, and every text must be that of plain decoding. Three kinds of
prompts: openings of code that the pair never saw, prose from docstrings it never saw, and tables that repeat
themselves. By method and temperature the table shows

  acceptance rate         per position that was checked (a path counts as one chain)
  mean acceptance length  1 + accepted / rounds
  formula                 (1 - a^(g+1)) / (1 - a) at that rate a and the mean number of draft tokens g of a round (the
                          siblings in a tree add no depth, so trees stay below it)
  ratio                   decode tokens/s over plain decoding of the same prompts

With `--nodes N` every round verifies the N best nodes whatever that costs: the methods at equal node budget.
`rejection` is the draft model under the other acceptance rule, whose texts are not those of plain decoding.

Last comes a drafter with random weights. Speculation must cost nothing then: at least 0.98 of plain, and no session
may have verified draft tokens in more than 20 rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest.bench import bench_parser, report, run, show
from loadtest.client import Completions, completed, same_texts
from loadtest.fleet import DEMO_PAIR, OWN_HARDWARE, bench_fleet, widened_target
from loadtest.literature import expected
from loadtest.prompts import prose_prompts, table_prompts
from loadtest.streams import Ask, Completion
from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_EAGLE3, DEMO_MEDUSA
from paceline.core.params import METHODS as ALL_METHODS
from training.export import Card, export_model
from training.loop import new_model
from training.models import load_model

RANDOM = "random drafter"
REJECTION = "rejection"
METHODS = (
    "draft_model",
    "eagle3",
    "medusa",
    "layer_skip",
    "ngram",
    "draft_model+ngram",
    REJECTION,
)
TEMPERATURES = (0.0, 1.0)
LEAST_WITH_RANDOM, MOST_ROUNDS_WITH_RANDOM = 0.98, 20


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("methods", __doc__)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each kind (default 8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt (default 128)")
    parser.add_argument(
        "--nodes", type=int, help="nodes that every round verifies; without it the goodput policy decides"
    )
    parser.add_argument("--methods", default=",".join(METHODS), help="cases to run, with commas between (default all)")
    parser.add_argument(
        "--target", choices=("98m", "400m", "demo"), default="98m", help="widening of the demo target (default 98m)"
    )
    parser.add_argument("--dtype", default="auto", help="weight type (default auto)")
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all methods and prints the table; True when texts agree and a random drafter costs nothing."""
    kinds = {
        "code": unseen_prompts(arguments.prompts),
        "prose": prose_prompts(arguments.prompts),
        "tables": table_prompts(arguments.prompts),
    }
    settings = fleet_settings(arguments)
    chosen = [each for each in arguments.methods.split(",") if each]
    rows = await _measure_fleet(settings, kinds, chosen, arguments) if chosen else []
    if arguments.nodes is None:
        with tempfile.TemporaryDirectory() as folder:
            settings |= {"draft_model": random_drafter(Path(folder) / "random-drafter"), "num_drafters": 1}
            settings["speculative_config"] = json.dumps({"method": "draft_model"})
            rows += await _measure_fleet(settings, {"code": kinds["code"]}, (RANDOM,), arguments)
    show(rows)
    free = all(
        row["ratio"] >= LEAST_WITH_RANDOM and row["most_rounds"] <= MOST_ROUNDS_WITH_RANDOM
        for row in rows
        if row["method"] == RANDOM
    )
    given = {name: getattr(arguments, name) for name in ("prompts", "max_tokens", "nodes", "target", "dtype")}
    return report("methods", **given, cases=rows, ok=free and all(row["same_texts"] for row in rows))


def fleet_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """`FleetSpec` settings of a fleet that serves every method."""
    config: dict[str, Any] = {
        "method": "+".join(ALL_METHODS),
        "medusa_model": str(DEMO_MEDUSA),
        "eagle3_model": str(DEMO_EAGLE3),
    }
    if arguments.nodes is not None:
        config |= {"policy": "fixed", "num_speculative_tokens": arguments.nodes}
    models = DEMO_PAIR if arguments.target == "demo" else widened_target(arguments.target)
    rest = {"dtype": arguments.dtype, "num_drafters": 2, "speculative_config": json.dumps(config)}
    return {**models, **OWN_HARDWARE, **rest}


def speculation_of(case: str) -> dict[str, Any]:
    """Speculation fields of a case's requests."""
    if case == REJECTION:
        return {"method": "draft_model", "acceptance": case}
    return {"method": "draft_model" if case == RANDOM else case}


async def _measure_fleet(
    settings: dict[str, Any], kinds: Mapping[str, Sequence[str]], methods: Sequence[str], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async with bench_fleet(**settings) as fleet:
        for kind, prompts in tqdm(kinds.items(), desc="prompts", unit="kind", leave=False):
            for temperature in TEMPERATURES:
                asks = [
                    Ask(prompt=prompt, max_tokens=arguments.max_tokens, temperature=temperature, seed=seed)
                    for seed, prompt in enumerate(prompts)
                ]
                plain, done = await _measure_kind(fleet.gateway_url, kind, asks, methods)
                rows += [
                    {"prompts": kind, "temperature": temperature, "method": method, **_figures(method, each, plain)}
                    for method, each in done.items()
                ]
    return rows


async def _measure_kind(
    url: str, kind: str, asks: Sequence[Ask], methods: Sequence[str]
) -> tuple[list[Completion], dict[str, list[Completion]]]:
    """All methods take turns on each prompt, so that a slow minute hits all of them."""
    plain: list[Completion] = []
    done: dict[str, list[Completion]] = {method: [] for method in methods}
    for ask in tqdm(asks, desc=f"{kind}, temperature {asks[0].temperature:g}", unit="prompt", leave=False):
        without = replace(ask, speculation={"enabled": False})
        await completed(url, replace(without, max_tokens=4))
        plain.append(await completed(url, without))
        for method in methods:
            done[method].append(await completed(url, replace(ask, speculation=speculation_of(method))))
    return plain, done


def _figures(method: str, done: Sequence[Completion], plain: Sequence[Completion]) -> dict[str, Any]:
    both = Completions(done), Completions(plain)
    accepted, checked = checked_positions(done)
    rate, gamma = accepted / max(1, checked), both[0].mean_gamma
    return {
        "acceptance_rate": round(rate, 3),
        "gamma": round(gamma, 2),
        "mean_acceptance_length": round(both[0].mean_acceptance_length, 2),
        "formula": round(between(rate, gamma), 2),
        "most_rounds": max(each.record["num_spec_steps"] for each in done),
        "tokens_per_s": round(speed(done), 1),
        "ratio": round(speed(done) / speed(plain), 3),
        "batch_size": round(both[0].mean_batch_size, 2),
        "same_texts": method == REJECTION or same_texts(both),
    }


def checked_positions(completions: Sequence[Completion]) -> tuple[int, int]:
    """Accepted draft tokens, and positions checked: those accepted and the one at which a round stopped."""
    accepted = checked = 0
    for completion in completions:
        histogram = completion.record["acceptance_histogram"]
        most = len(histogram) - 1
        for count, rounds in enumerate(histogram):
            accepted += count * rounds
            # The longest run may have ended with the chain; counting it as stopped would be unfair.
            checked += (count + (count < most or most == 0)) * rounds
    return accepted, checked


def between(rate: float, gamma: float) -> float:
    """The closed form at a gamma between two whole numbers."""
    low = int(gamma)
    share = gamma - low
    return (1 - share) * expected(rate, low) + share * expected(rate, low + 1)


def speed(completions: Sequence[Completion]) -> float:
    """Decode tokens/s: tokens after the first piece over the time from it to the last."""
    seconds = sum(each.decode_s for each in completions)
    return sum(each.num_tokens - each.tokens_until(each.pieces[0][0]) for each in completions) / seconds


def random_drafter(folder: Path) -> Path:
    """The demo drafter's shape and tokenizer with weights that were never trained."""
    stranger = new_model(load_model(DEMO_DRAFTER).config)
    card = Card(title="Random", summary="Never trained.", figures="None.", data="None.", licence=None)
    export_model(stranger, DEMO_DRAFTER, folder, card)
    return folder

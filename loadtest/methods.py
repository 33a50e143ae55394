"""Every way to draft on the same prompts: `make bench NAME=methods`.

One stream, verifier on one core, a drafter with the distilled draft model and one with the EAGLE-3 head on the rest;
requests name their method, so one fleet serves them all, and every text must be that of plain decoding. Three kinds of
prompts: openings of code that the pair never saw, prose from docstrings it never saw, and tables that repeat
themselves. By method and temperature the table shows

  a         acceptance rate per position that was checked (a path counts as one chain)
  length    mean acceptance length, 1 + accepted / rounds
  formula   what (1 - a^(g+1)) / (1 - a) says for the mean number of draft tokens g of a round (a tree's siblings are no
            deeper, so trees stay below it)
  ratio     decode tokens/s over plain decoding of the same prompts

With `--nodes N` every round verifies the N best nodes whatever that costs: the methods at equal node budget.
`rejection` and `block` are the draft model under the other acceptance rules, whose texts are not those of plain
decoding.

Last comes a drafter with random weights. Speculation must cost nothing then: at least 0.98 of plain, and no session
may have verified draft tokens in more than 20 rounds. `suffix` looks at outputs of earlier requests as well; each
prompt is put to it once at a temperature.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from loadtest.client import Ask, Completion, Completions, completed, http_client, same_texts
from loadtest.flags import bench_parser
from loadtest.fleet import DEMO_PAIR, OWN_HARDWARE, bench_fleet, machine, widened_target
from loadtest.gains import expected_tokens
from paceline.acceptance.models import load_model
from paceline.checkpoints.corpus import load_corpus, unseen_prompts
from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_EAGLE3, DEMO_MEDUSA
from training.export import Card, export_model
from training.loop import new_model

PLAIN = "plain"
RANDOM = "random drafter"
# What requests of a case ask for.
CASES: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model"},
    "eagle3": {"method": "eagle3"},
    "medusa": {"method": "medusa"},
    "layer_skip": {"method": "layer_skip"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft_model+ngram": {"method": "draft_model+ngram"},
    "rejection": {"method": "draft_model", "acceptance": "rejection"},
    "block": {"method": "draft_model", "acceptance": "block"},
    RANDOM: {"method": "draft_model"},
}
METHODS = tuple(name for name in CASES if name != RANDOM)
ALL_METHODS = "draft_model+eagle3+ngram+suffix+medusa+layer_skip"
OF_OTHER_LAW = ("rejection", "block")
TEMPERATURES = (0.0, 1.0)
LEAST_WITH_RANDOM, MOST_ROUNDS_WITH_RANDOM = 0.98, 20
PROSE_CHARS = 320


@dataclass(slots=True)
class Case:
    """One method on one kind of prompts at one temperature, beside plain decoding."""

    kind: str
    temperature: float
    method: str
    done: list[Completion] = field(default_factory=list)
    plain: list[Completion] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """What goes into the table and the last line."""
        done = Completions(self.done)
        accepted, checked = checked_positions(self.done)
        rate, gamma = accepted / max(1, checked), done.mean_gamma
        return {
            "prompts": self.kind,
            "temperature": self.temperature,
            "method": self.method,
            "acceptance_rate": round(rate, 3),
            "gamma": round(gamma, 2),
            "mean_acceptance_length": round(done.mean_acceptance_length, 2),
            "formula": round(between(rate, gamma), 2),
            "most_rounds": max(each.record["num_spec_steps"] for each in self.done),
            "tokens_per_s": round(speed(self.done), 1),
            "ratio": round(speed(self.done) / speed(self.plain), 3),
            "batch_size": round(done.mean_batch_size, 2),
            "same_texts": self.method in OF_OTHER_LAW or same_texts((done, Completions(self.plain))),
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
    return (1 - share) * expected_tokens(rate, low) + share * expected_tokens(rate, low + 1)


def speed(completions: Sequence[Completion]) -> float:
    """Decode tokens/s: tokens after the first piece over the time from it to the last."""
    seconds = sum(each.decode_s for each in completions)
    return sum(each.num_tokens - each.tokens_until(each.piece_times_s[0]) for each in completions) / seconds


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
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args())) else 1)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all methods and prints the table; True when texts agree and a random drafter costs nothing."""
    kinds = {
        "code": unseen_prompts(arguments.prompts),
        "prose": prose_prompts(arguments.prompts),
        "tables": table_prompts(arguments.prompts),
    }
    settings = fleet_settings(arguments)
    chosen = [name for name in METHODS if name in arguments.methods.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        cases = await _measure_fleet(settings, kinds, chosen, arguments) if chosen else []
        if arguments.nodes is None:
            settings |= {"draft_model": random_drafter(Path(folder) / "random-drafter"), "num_drafters": 1}
            settings["speculative_config"] = json.dumps({"method": "draft_model"})
            cases += await _measure_fleet(settings, {"code": kinds["code"]}, (RANDOM,), arguments)
    rows = [case.figures() for case in cases]
    for row in rows:
        print(_line(row))
    strangers = [row for row in rows if row["method"] == RANDOM]
    ok = all(row["same_texts"] for row in rows) and all(
        row["ratio"] >= LEAST_WITH_RANDOM and row["most_rounds"] <= MOST_ROUNDS_WITH_RANDOM for row in strangers
    )
    policy = "goodput policy" if arguments.nodes is None else f"{arguments.nodes} nodes a round"
    print(
        f"{arguments.prompts} prompts of a kind x {arguments.max_tokens} tokens, batch size 1, {policy}, "
        f"target {arguments.target} in {arguments.dtype}; {machine()}"
    )
    given = {name: getattr(arguments, name) for name in ("prompts", "max_tokens", "nodes", "target", "dtype")}
    print(json.dumps({"bench": "methods", "machine": machine(), **given, "cases": rows, "ok": ok}))
    return ok


def fleet_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """`FleetSpec` settings of a fleet that serves every method."""
    config: dict[str, Any] = {
        "method": ALL_METHODS,
        "medusa_model": str(DEMO_MEDUSA),
        "eagle3_model": str(DEMO_EAGLE3),
    }
    if arguments.nodes is not None:
        config |= {"policy": "fixed", "num_speculative_tokens": arguments.nodes}
    models = DEMO_PAIR if arguments.target == "demo" else widened_target(arguments.target)
    rest = {"dtype": arguments.dtype, "num_drafters": 2, "speculative_config": json.dumps(config)}
    return {**models, **OWN_HARDWARE, **rest}


def _line(row: dict[str, Any]) -> str:
    return (
        "{prompts:7} temperature {temperature:g}  {method:20} a {acceptance_rate:5.3f}  gamma {gamma:5.2f}  "
        "length {mean_acceptance_length:5.2f}  formula {formula:5.2f}  tokens/s {tokens_per_s:6.1f}  ratio {ratio:5.2f}"
    ).format(**row)


async def _measure_fleet(
    settings: dict[str, Any], kinds: dict[str, list[str]], methods: Sequence[str], arguments: argparse.Namespace
) -> list[Case]:
    cases: list[Case] = []
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(bench_fleet(**settings))
        client = await stack.enter_async_context(http_client())
        for kind, prompts in tqdm(kinds.items(), desc="prompts", unit="kind", leave=False):
            for temperature in TEMPERATURES:
                asks = [
                    Ask(prompt=prompt, max_tokens=arguments.max_tokens, temperature=temperature, seed=seed)
                    for seed, prompt in enumerate(prompts)
                ]
                cases += await _measure_kind(client, fleet.gateway_url, kind, asks, methods)
    return cases


async def _measure_kind(
    client: aiohttp.ClientSession, url: str, kind: str, asks: Sequence[Ask], methods: Sequence[str]
) -> list[Case]:
    """All methods take turns on each prompt, so that a slow minute hits all of them."""
    cases = [Case(kind=kind, temperature=asks[0].temperature, method=method) for method in methods]
    for ask in tqdm(asks, desc=f"{kind}, temperature {asks[0].temperature:g}", unit="prompt", leave=False):
        without = replace(ask, speculation={"enabled": False})
        await completed(client, url, replace(without, max_tokens=4))
        plain = await completed(client, url, without)
        for case in cases:
            case.done.append(await completed(client, url, replace(ask, speculation=CASES[case.method])))
            case.plain.append(plain)
    return cases


def prose_prompts(count: int) -> list[str]:
    """Openings of long docstrings of files that the pair never saw."""
    found: list[str] = []
    for file in load_corpus().held_out:
        for node in ast.walk(ast.parse(file.text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= PROSE_CHARS and not file.is_test:
                    found.append(f'"""{text[:PROSE_CHARS].rpartition(" ")[0]}')
    return random.Random(0).sample(found, count)


def table_prompts(count: int) -> list[str]:
    """Tables of constants, a few rows each."""
    shapes = (
        "    ('{name}', {number}, 'the {name} of it'),",
        "    '{name}': {{'code': {number}, 'help': '{name} {number}'}},",
        "    {name} = register('{name}', code={number}, default=None)",
        "    self.assertEqual(parse('{name} {number}'), ('{name}', {number}))",
    )
    names = ["read", "write", "open", "close", "seek", "flush", "truncate", "fileno"]
    prompts: list[str] = []
    for number in range(count):
        rows = [shapes[number % len(shapes)].format(name=name, number=10 * number + k) for k, name in enumerate(names)]
        prompts.append(f"TABLE_{number} = [\n" + "\n".join(rows) + "\n")
    return prompts


def random_drafter(folder: Path) -> Path:
    """The demo drafter's shape and tokenizer with weights that were never trained."""
    stranger = new_model(load_model(DEMO_DRAFTER).config)
    export_model(stranger, DEMO_DRAFTER, folder, Card(title="Random", summary="Never trained.", figures=""))
    return folder

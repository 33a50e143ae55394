"""Acceptance of the demo pair, measured through the fleet: `make bench NAME=acceptance`.

The verifier runs with the fixed policy: every round verifies the best 8 nodes, whatever that does to speed. Two fleets:

* chains (a drafter that gives a node one child): the acceptance rate per checked position. A round that accepts k of g
  chained tokens has checked min(k + 1, g) positions, k of them right; nothing behind a wrong guess was checked.
* trees of at most 8 nodes: the mean acceptance length, 1 + accepted / rounds.

Prompts are cut from standard library files that the pair never saw.
"""

from __future__ import annotations

import argparse
import json

from loadtest.bench import Table, bench_parser, report, run
from loadtest.client import BatchResult, asks_of, run_batch
from loadtest.fleet import bench_fleet

LEAST_ACCEPTANCE_RATE = 0.70
LEAST_ACCEPTANCE_LENGTH = 3.0
NODES = 8
SPECULATIVE_CONFIG = {"method": "draft_model", "num_speculative_tokens": NODES, "policy": "fixed"}
SHAPES = {"chain": ("--draft-width=1",), "tree": ()}


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("acceptance", __doc__)
    parser.add_argument("--prompts", type=int, default=40, help="number of prompts (default 40)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt (default 128)")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at a time (default 1)")
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs all cases and prints them; True when both greedy figures are met."""
    rows: dict[str, dict[str, float]] = {}
    model, table = "", Table()
    for shape, drafter_arg in SHAPES.items():
        fleet = bench_fleet(speculative_config=json.dumps(SPECULATIVE_CONFIG), drafter_arg=drafter_arg)
        async with fleet:
            model = fleet.model_name
            for temperature in (0.0, 1.0):
                asks = asks_of(arguments.prompts, arguments.max_tokens, temperature)
                title = f"{shape}_t{temperature:g}"
                rows[title] = _row(await run_batch(fleet.gateway_url, asks, arguments.concurrency, title))
                table.add({"case": title, **rows[title]})
    ok = (
        rows["chain_t0"]["acceptance_rate"] >= LEAST_ACCEPTANCE_RATE
        and rows["tree_t0"]["mean_acceptance_length"] >= LEAST_ACCEPTANCE_LENGTH
    )
    settings = {"prompts": arguments.prompts, "max_tokens": arguments.max_tokens, "nodes": NODES}
    return report("acceptance", model=model, **settings, **rows, ok=ok)


def _row(result: BatchResult) -> dict[str, float]:
    """Acceptance per checked position is that of a chain; for trees it counts a path as one chain."""
    accepted = checked = 0
    for completion in result.completions:
        for count, rounds in enumerate(completion.record.get("acceptance_histogram", [])):
            accepted += count * rounds
            checked += min(count + 1, NODES) * rounds
    return {
        "acceptance_rate": round(accepted / max(1, checked), 4),
        "mean_acceptance_length": round(result.mean_acceptance_length, 3),
        "mean_gamma": round(result.mean_gamma, 2),
        "mean_batch_size": round(result.mean_batch_size, 2),
        "tokens_per_s": round(result.tokens_per_s, 1),
    }

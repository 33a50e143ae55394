"""Acceptance of the demo pair, measured through the fleet: `make bench NAME=acceptance`.

Two figures. The acceptance rate of single draft tokens (gamma capped at 1 by the request), greedy: how often the
drafter's best guess is the target's choice. And the mean acceptance length with trees of at most 8 nodes. Prompts are
cut from standard library files that the pair never saw.
"""

from __future__ import annotations

import argparse
import asyncio
import json

from loadtest.client import Ask, BatchResult, run_batch
from loadtest.fleet import bench_fleet, machine
from paceline.training.corpus import unseen_prompts

LEAST_ACCEPTANCE_RATE = 0.70
LEAST_ACCEPTANCE_LENGTH = 3.0
TREE_NODES = 8


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = argparse.ArgumentParser(prog="acceptance", description=__doc__)
    parser.add_argument("--prompts", type=int, default=40, help="number of prompts (default 40)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt (default 128)")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at a time (default 1)")
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args())) else 1)


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs all cases on one fleet and prints them; True when both greedy figures are met."""
    prompts = unseen_prompts(arguments.prompts)
    figures: dict[str, object] = {
        "bench": "acceptance",
        "machine": machine(),
        "prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
        "concurrency": arguments.concurrency,
    }
    async with bench_fleet() as fleet:
        figures["model"] = fleet.model_name
        print(f"{'case':28} {'rate':>7} {'length':>7} {'gamma':>6} {'batch':>6} {'tokens/s':>9}")
        for temperature in (0.0, 1.0):
            for nodes in (1, TREE_NODES):
                asks = [
                    Ask(
                        prompt=prompt,
                        max_tokens=arguments.max_tokens,
                        temperature=temperature,
                        seed=index,
                        speculation={"max_draft_tokens": nodes},
                    )
                    for index, prompt in enumerate(prompts)
                ]
                title = f"temperature {temperature:g}, {nodes} node{'s' if nodes > 1 else ''}"
                result = await run_batch(fleet.gateway_url, asks, arguments.concurrency, title)
                _print(title, result)
                figures[f"t{temperature:g}_nodes{nodes}"] = _row(result)
    rate = figures["t0_nodes1"]["acceptance_rate"]  # type: ignore[index]  # rows are dicts
    length = figures[f"t0_nodes{TREE_NODES}"]["mean_acceptance_length"]  # type: ignore[index]
    ok = rate >= LEAST_ACCEPTANCE_RATE and length >= LEAST_ACCEPTANCE_LENGTH
    print(json.dumps({**figures, "ok": ok}))
    return ok


def _print(title: str, result: BatchResult) -> None:
    print(
        f"{title:28} {result.acceptance_rate:7.3f} {result.mean_acceptance_length:7.2f} {result.mean_gamma:6.2f} "
        f"{result.mean_batch_size:6.2f} {result.tokens_per_s:9.1f}"
    )


def _row(result: BatchResult) -> dict[str, float]:
    return {
        "acceptance_rate": round(result.acceptance_rate, 4),
        "mean_acceptance_length": round(result.mean_acceptance_length, 3),
        "mean_gamma": round(result.mean_gamma, 2),
        "mean_batch_size": round(result.mean_batch_size, 2),
        "tokens_per_s": round(result.tokens_per_s, 1),
    }


if __name__ == "__main__":
    main()

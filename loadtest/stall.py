"""A drafter stopped with SIGSTOP for 5 s, and what that does to the time between tokens: `make bench NAME=stall`.

Plain decoding, speculative decoding with the drafter stopped in mid-stream, the same prompts on the same fleet. Counted
are the gaps between pieces while the drafter was stopped. The texts must be equal.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np

from loadtest.client import Ask, Completion, complete, http_client
from loadtest.flags import bench_parser
from loadtest.fleet import bench_fleet, machine
from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.local import LocalFleet

STOPPED_S = 5.0
LEAD_S = 1.0
MOST_STEPS = 2.0


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("stall", __doc__)
    parser.add_argument("--max-tokens", type=int, default=1200, help="tokens of the session (default 1200)")
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args().max_tokens)) else 1)


async def measure(max_tokens: int) -> bool:
    """Runs both cases; True when the median gap is at most two plain steps, and p99 grew by no more than that."""
    ask = Ask(prompt=unseen_prompts(1)[0], max_tokens=max_tokens)
    async with bench_fleet() as fleet, http_client() as client:
        url = fleet.gateway_url
        plain = await complete(client, url, replace(ask, speculation={"enabled": False}))
        stopped, gaps_s = await _with_a_stop(fleet, client, ask)
        model = fleet.model_name
    step_s = statistics.median(plain.gaps_s)
    same = not plain.error and not stopped.error and plain.text == stopped.text
    figures: dict[str, Any] = {
        "bench": "stall",
        "machine": machine(),
        "model": model,
        "batch_size": 1,
        "gaps_while_stopped": len(gaps_s),
        "plain_gap_ms": _quantiles_ms(plain.gaps_s),
        "stopped_gap_ms": _quantiles_ms(gaps_s),
        "median_in_plain_steps": round(statistics.median(gaps_s) / step_s, 2),
        "same_text": same,
    }
    p99 = figures["stopped_gap_ms"][1] - figures["plain_gap_ms"][1]
    figures["ok"] = same and statistics.median(gaps_s) <= MOST_STEPS * step_s and p99 <= 1e3 * MOST_STEPS * step_s
    print(f"plain decoding      gap p50 / p99 / max ms: {figures['plain_gap_ms']}")
    print(f"drafter stopped 5 s gap p50 / p99 / max ms: {figures['stopped_gap_ms']}")
    print(json.dumps(figures))
    return bool(figures["ok"])


async def _with_a_stop(fleet: LocalFleet, client: aiohttp.ClientSession, ask: Ask) -> tuple[Completion, list[float]]:
    """One session with the drafter stopped in its middle, and the gaps between pieces that fell into the stop."""
    clock = asyncio.get_running_loop().time
    started_s = clock()
    task = asyncio.create_task(complete(client, fleet.gateway_url, ask))
    await asyncio.sleep(LEAD_S)
    fleet.pause("drafter")
    from_s = clock() - started_s
    await asyncio.wait({task}, timeout=STOPPED_S)
    fleet.resume("drafter")
    to_s = clock() - started_s
    done = await task
    inside = [at_s for at_s in done.piece_times_s if from_s <= at_s <= to_s]
    return done, [later - sooner for sooner, later in itertools.pairwise(inside)]


def _quantiles_ms(gaps_s: Sequence[float]) -> list[float]:
    return [round(1e3 * float(gap_s), 2) for gap_s in np.quantile(gaps_s, (0.5, 0.99, 1.0))]

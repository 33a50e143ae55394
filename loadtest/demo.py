"""The fleet at work: real prompts, with and without speculation, the same text, and a table. `make demo`.

Starts gateway, verifier, drafter and Valkey as processes of their own, streams a few completions twice (plain, then
speculative) and compares them, then measures both ways at two concurrencies.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from loadtest.client import Ask, BatchResult, asks_of, completed, http_client, run_batch, same_texts
from loadtest.flags import bench_parser
from loadtest.fleet import bench_fleet, machine
from paceline.cluster.foreground import describe_target
from paceline.cluster.local import LocalFleet

PLAIN = {"enabled": False}
SPECULATIVE = {"enabled": True}
DIM, BOLD, RESET = ("\033[2m", "\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def main() -> None:
    """Parses the command line and runs the demo; exit status 1 when any text differs."""
    parser = bench_parser("demo", __doc__)
    parser.add_argument("--prompts", type=int, default=16, help="prompts for the table (default 16)")
    parser.add_argument("--shown", type=int, default=2, help="prompts streamed to the screen (default 2)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per prompt (default 96)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1, 8],
        help="requests at a time, for the table (default 1 8)",
    )
    raise SystemExit(0 if asyncio.run(show(parser.parse_args())) else 1)


async def show(arguments: argparse.Namespace) -> bool:
    """Runs the whole demo; True when all texts were identical."""
    asks = asks_of(arguments.prompts, arguments.max_tokens, arguments.temperature)
    asks = [replace(ask, top_p=0.95) for ask in asks]
    async with bench_fleet() as fleet:
        _introduce(fleet)
        for ask in asks[: arguments.shown]:
            await _show_one(fleet.gateway_url, ask)
        # Prompts once untimed: both ways then find them in the prefix cache.
        await run_batch(fleet.gateway_url, [replace(ask, max_tokens=1) for ask in asks], 1, "warming up")
        same = await _table(fleet.gateway_url, asks, arguments.concurrency)
    verdict = "all texts identical" if same else "TEXTS DIFFER: please report this"
    print(f"\n{BOLD}{verdict}{RESET}; temperature {arguments.temperature:g}, top-p 0.95, {machine()}")
    return same


def _introduce(fleet: LocalFleet) -> None:
    print(f"\n{BOLD}the fleet{RESET}")
    for endpoint in fleet.endpoints:
        print(f"  {endpoint.name:12} {endpoint.address:22} process {fleet.pid(endpoint.name)}")
    assert fleet.checkpoints is not None, "the fleet runs"
    print(f"  target model: {describe_target(fleet.checkpoints.target)}")
    print(f"  draft model:  {', '.join(draft.name for draft in fleet.checkpoints.drafts) or 'none'}\n")


async def _show_one(url: str, ask: Ask) -> None:
    """Streams one prompt twice: what the plain run wrote is shown dim, the speculative one plainly."""
    async with http_client() as client:
        for title, speculation in (("plain decoding", PLAIN), ("speculative decoding", SPECULATIVE)):
            print(f"{BOLD}{title}{RESET}\n{DIM}{ask.prompt}{RESET}", end="", flush=True)
            done = await completed(client, url, replace(ask, speculation=speculation), _write)
            print(f"\n{BOLD}{done.decode_tokens_per_s:.0f} tokens/s{RESET}\n")


def _write(text: str) -> None:
    print(text, end="", flush=True)


async def _table(url: str, asks: Sequence[Ask], concurrencies: Sequence[int]) -> bool:
    same = True
    rows: list[str] = []
    for concurrency in concurrencies:
        plain = await _run(url, asks, concurrency, PLAIN, "plain")
        speculative = await _run(url, asks, concurrency, SPECULATIVE, "speculative")
        same = same and same_texts((plain, speculative))
        rows += [
            _row("plain", concurrency, plain, plain),
            _row("speculative", concurrency, speculative, plain),
        ]
    print(
        f"{'':12} {'streams':>8} {'tokens/s':>9} {'ratio':>6} {'accepted':>9} {'length':>7} {'gamma':>6} {'batch':>6}"
    )
    print("\n".join(rows))
    print(f"{DIM}accepted: accepted / verified draft tokens; length: mean acceptance length, 1 + accepted / rounds;")
    print(f"gamma: draft tokens a round; batch: mean number of sessions in a step{RESET}")
    return same


async def _run(
    url: str, asks: Sequence[Ask], concurrency: int, speculation: dict[str, bool], title: str
) -> BatchResult:
    asks = [replace(ask, speculation=speculation) for ask in asks]
    return await run_batch(url, asks, concurrency, f"{title}, {concurrency} streams")


def _row(name: str, concurrency: int, result: BatchResult, plain: BatchResult) -> str:
    ratio = result.tokens_per_s / plain.tokens_per_s
    start = f"{name:12} {concurrency:8} {result.tokens_per_s:9.1f} {ratio:6.2f}"
    if not result.total("num_spec_steps"):
        return f"{start} {'-':>9} {'-':>7} {'0':>6} {result.mean_batch_size:6.2f}"
    return (
        f"{start} {result.acceptance_rate:9.3f} {result.mean_acceptance_length:7.2f} {result.mean_gamma:6.2f} "
        f"{result.mean_batch_size:6.2f}"
    )

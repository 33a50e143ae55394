"""Prefix-affinity routing against simpler policies, on a trace of conversations: `make bench NAME=routing`.

Plays a trace through simulated verifiers (see `loadtest/routing_world.py`), each with a bounded prefix cache, and
through simulated gateways that choose them by

  ours          the gateway's own router: most of the prompt held, within a bound on the load
  least loaded  the fewest sessions
  round robin   one after the other
  prefix only   most of the prompt held, whatever the load

and prints for each: hit (share of prompt tokens found cached), spread (time that verifiers computed prompts, the
busiest over the mean), the 99th percentile of the wait in a verifier's queue, and mean, median and 99th percentile
of the time to first token. "pooled" is the hit rate of one cache as large as all together.

A verifier computes 10,000 uncached prompt tokens a second, one prompt after the other, and decodes beside that at 30 ms
a token. The trace's clock is stretched so that the fleet would be busy for the share --utilisation of the time
if nothing were ever cached. Gateways see the load of 0.5 to 1 s ago, and with --gateways 2 each request, turns of one
conversation too, comes through either by chance: the worst case, as gateways tell each other nothing.

Without --trace, conversations are made up with the statistics of a real hour: 1.6 turns, prompts of 7,900 tokens in
the median and 88,000 at the 99th percentile, system prompts of 512 to 2,560 tokens, answers of 270 in the median. The
real hour is the file FAST25-release/traces/conversation_trace.jsonl of the public repository kvcache-ai/Mooncake; give
it, plain or gzipped, as --trace. It does not say what answers are, so that there only prompts can be reused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from loadtest.conversations import Request, generated, paced, read_trace
from loadtest.routing_policies import LeastLoaded, Policy, PrefixOnly, RoundRobin, Routed
from loadtest.routing_world import PREFILL_TOKENS_PER_S, Outcome, Simulation, pooled_hit_rate

OURS, LEAST_LOADED, ROUND_ROBIN, PREFIX_ONLY = "ours", "least loaded", "round robin", "prefix only"
# Of the pooled hit rate, with one gateway and with several that share nothing.
LEAST_OF_POOLED = 0.9
LEAST_OF_POOLED_SHARED = 0.5
LEAST_OF_PREFIX_ONLY = 0.9
MOST_OF_SPREAD = 1.1


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = argparse.ArgumentParser(
        prog="routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=None, help="JSON lines in Mooncake's form, plain or gzipped")
    parser.add_argument("--verifiers", type=int, nargs="+", default=[4, 8], help="fleets to try (default 4 8)")
    parser.add_argument("--gateways", type=int, default=1, help="gateways, sharing nothing (default 1)")
    parser.add_argument("--utilisation", type=float, default=0.7, help="without any cache (default 0.7)")
    parser.add_argument("--cache-tokens", type=int, default=1_000_000, help="of each verifier (default 1000000)")
    parser.add_argument("--requests", type=int, default=8_000, help="of the trace made up (default 8000)")
    parser.add_argument("--seed", type=int, default=0, help="of that trace and of who comes where (default 0)")
    arguments = parser.parse_args()
    if min(*arguments.verifiers, arguments.gateways, arguments.requests - 1) < 1:
        parser.error("--verifiers and --gateways must be at least 1, --requests at least 2")
    if arguments.utilisation <= 0 or arguments.cache_tokens < 0:
        parser.error("--utilisation must be above 0 and --cache-tokens 0 or more")
    raise SystemExit(0 if compare(arguments) else 1)


def compare(arguments: argparse.Namespace) -> bool:
    """Prints a table for each fleet and the figures; True when all are within their limits."""
    trace = generated(arguments.requests, arguments.seed) if arguments.trace is None else read_trace(arguments.trace)
    fleets = {}
    for num_verifiers in arguments.verifiers:
        requests = paced(trace, arguments.utilisation * num_verifiers * PREFILL_TOKENS_PER_S)
        outcomes = play(requests, num_verifiers, arguments)
        pooled = pooled_hit_rate(requests, num_verifiers * arguments.cache_tokens)
        _show(num_verifiers, arguments, requests, outcomes, pooled)
        fleets[num_verifiers] = figures(outcomes, pooled, arguments.gateways)
    ok = all(bool(fleet["ok"]) for fleet in fleets.values())
    print(json.dumps({"bench": "routing", "fleets": fleets, "ok": ok}))
    return ok


def play(requests: Sequence[Request], num_verifiers: int, arguments: argparse.Namespace) -> dict[str, Outcome]:
    """Returns what each policy brings about on the same trace."""
    policies: dict[str, Callable[[], Policy]] = {
        OURS: lambda: Routed(arguments.gateways),
        LEAST_LOADED: LeastLoaded,
        ROUND_ROBIN: RoundRobin,
        PREFIX_ONLY: lambda: PrefixOnly(arguments.gateways),
    }
    return {
        name: Simulation(
            requests,
            make(),
            num_verifiers=num_verifiers,
            num_gateways=arguments.gateways,
            cache_tokens=arguments.cache_tokens,
            seed=arguments.seed,
        ).run()
        for name, make in tqdm(policies.items(), desc=f"{num_verifiers} verifiers", unit="policy", leave=False)
    }


def figures(outcomes: dict[str, Outcome], pooled: float, num_gateways: int) -> dict[str, object]:
    """Returns the figures of a fleet, and whether they are within their limits."""
    ours, rivals = outcomes[OURS], (outcomes[LEAST_LOADED], outcomes[ROUND_ROBIN])
    least_of_pooled = LEAST_OF_POOLED if num_gateways == 1 else LEAST_OF_POOLED_SHARED
    limits = {
        "hits_of_pooled": ours.hit_rate >= least_of_pooled * pooled,
        "hits_of_prefix_only": ours.hit_rate >= LEAST_OF_PREFIX_ONLY * outcomes[PREFIX_ONLY].hit_rate,
        "spread": ours.busy_spread <= MOST_OF_SPREAD * outcomes[LEAST_LOADED].busy_spread,
        "mean_ttft": ours.mean_ttft_s < min(rival.mean_ttft_s for rival in rivals),
        "p99_ttft": ours.ttft_s(99) < min(rival.ttft_s(99) for rival in rivals),
    }
    return {
        "hit_rate": round(ours.hit_rate, 3),
        "of_pooled": round(ours.hit_rate / pooled, 3) if pooled else 1.0,
        "spread_of_least_loaded": round(ours.busy_spread / outcomes[LEAST_LOADED].busy_spread, 3),
        "mean_ttft_of_least_loaded": round(ours.mean_ttft_s / rivals[0].mean_ttft_s, 3),
        "mean_ttft_of_round_robin": round(ours.mean_ttft_s / rivals[1].mean_ttft_s, 3),
        "missed": [name for name, within in limits.items() if not within],
        "ok": all(limits.values()),
    }


def _show(
    num_verifiers: int,
    arguments: argparse.Namespace,
    requests: Sequence[Request],
    outcomes: dict[str, Outcome],
    pooled: float,
) -> None:
    print(
        f"{num_verifiers} verifiers with {arguments.cache_tokens:,} cached tokens each, "
        f"{arguments.gateways} gateway(s), {len(requests):,} requests, "
        f"utilisation {arguments.utilisation:g} without a cache; pooled {pooled:.3f}"
    )
    print(f"{'':14}{'hit':>7}{'spread':>8}{'wait p99':>11}{'TTFT mean':>11}{'p50':>9}{'p99':>11}  (seconds)")
    for name, outcome in outcomes.items():
        times = (
            f"{outcome.wait_s(99):11.2f}{outcome.mean_ttft_s:11.2f}{outcome.ttft_s(50):9.2f}{outcome.ttft_s(99):11.2f}"
        )
        print(f"{name:14}{outcome.hit_rate:7.3f}{outcome.busy_spread:8.3f}{times}")
    print()


if __name__ == "__main__":
    main()

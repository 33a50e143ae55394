"""What sessions cost in the store, and how many new ones one gateway takes.

Opens new sessions at a steady rate, whether earlier ones have ended or not, over one gateway of a real fleet. When the
last has ended all of them lie idle in Valkey, records and token logs: its memory is read before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence

from redis.asyncio import Redis

from loadtest.flags import bench_parser
from loadtest.fleet import DEMO_PAIR, bench_fleet, machine
from loadtest.openloop import Load, Opened, open_loop

MOST_BYTES = 2048
BYTES_PER_TOKEN = 4
LEAST_SHARE_IN_TIME = 0.98
# Records are written within half a second; then the server is asked.
SETTLING_S = 2.0


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("sessions", __doc__)
    parser.add_argument("--sessions", type=int, default=3000, help="sessions in all (default 3000)")
    parser.add_argument("--rate", type=float, default=50.0, help="new sessions a second (default 50)")
    parser.add_argument("--max-tokens", type=int, default=4, help="tokens a session generates (default 4)")
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args())) else 1)


async def measure(options: argparse.Namespace) -> bool:
    """Runs the bench; True when both goals are met."""
    settings = {**DEMO_PAIR, "dtype": "float32"}
    async with (
        bench_fleet(**settings, gateway_arg=("--max-sessions=1024",)) as fleet,
        Redis.from_url(fleet.redis_url) as redis,
    ):
        address = fleet.endpoint("gateway").second_address
        await open_loop(address, Load(num_requests=50, rate_per_s=25.0, max_tokens=options.max_tokens), "warming up")
        await asyncio.sleep(SETTLING_S)
        before = await _memory(redis)
        started_s = time.perf_counter()
        load = Load(num_requests=options.sessions, rate_per_s=options.rate, max_tokens=options.max_tokens)
        opened = await open_loop(address, load, "sessions")
        seconds = time.perf_counter() - started_s
        await asyncio.sleep(SETTLING_S)
        after = await _memory(redis)
    return _report(options, opened, seconds, after[0] - before[0], after[1] - before[1])


async def _memory(redis: Redis) -> tuple[int, int]:
    """Bytes in use by the store, and its keys."""
    info = await redis.info("memory")
    return int(info["used_memory"]), int(await redis.dbsize())


def _report(
    options: argparse.Namespace, opened: Sequence[Opened], seconds: float, num_bytes: int, num_keys: int
) -> bool:
    failed = [each.error for each in opened if each.error]
    num_tokens = sum(each.num_tokens for each in opened)
    per_session = (num_bytes - BYTES_PER_TOKEN * num_tokens) / len(opened)
    rate = len(opened) / seconds
    first_s = sorted(each.first_token_s for each in opened if not each.error)
    if failed:
        sys.stdout.write(f"{len(failed)} sessions failed, first: {failed[0]}\n")
    sys.stdout.write(
        f"{len(opened)} sessions of {num_tokens / len(opened):.0f} tokens in {seconds:.1f} s: {rate:.1f} a second "
        f"(asked for {options.rate:g}), first token after {1e3 * statistics.median(first_s):.0f} ms median, "
        f"{1e3 * first_s[int(0.99 * len(first_s))]:.0f} ms p99\n"
        f"in the store: {num_keys} keys, {num_bytes / len(opened):.0f} bytes a session; without {BYTES_PER_TOKEN} "
        f"bytes a token {per_session:.0f} (at most {MOST_BYTES})\n"
    )
    figures = {
        "bench": "sessions",
        "machine": machine(),
        "sessions": len(opened),
        "rate_per_s": round(rate, 2),
        "failed": len(failed),
        "first_token_p50_ms": round(1e3 * statistics.median(first_s), 1),
        "first_token_p99_ms": round(1e3 * first_s[int(0.99 * len(first_s))], 1),
        "bytes_per_session": round(num_bytes / len(opened)),
        "bytes_per_session_without_tokens": round(per_session),
        "ok": not failed
        and num_keys == 2 * len(opened)
        and rate >= LEAST_SHARE_IN_TIME * options.rate
        and per_session < MOST_BYTES,
    }
    print(json.dumps(figures))
    return bool(figures["ok"])

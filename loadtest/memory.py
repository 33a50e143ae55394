"""Memory: what verifier and drafter say they take at start, and what they take. `make bench NAME=memory`.

Both services log an account at start: weights, KV pages, scratch, the rest of the process, and how many tokens the
pages hold. The target is the bundled demo target as it is, not widened, with pages for 64 sessions of 1,000 tokens.

Part 1: 64 sessions of 1,000 tokens (500 of them prompt) at once, with speculation. The largest resident memory of
verifier and drafter must stay within their accounts, plus a fixed allowance for Python objects and the arenas of the
allocators (--allowance-mib).

Part 2: 10,000 short requests (48 prompt tokens, all different; 4 output tokens), 32 at a time. A line is fitted to the
resident memory of each process against the number of requests done, leaving out the first fifth, in which caches fill.
No growth means: at most 2 % of its memory or 8 MiB per 10,000 requests, whichever is larger. Afterwards no session may
be left over in any service, and no process may hold more than 4 files more than before: a pool of connections to the
store may still have filled, a leak would show by the thousand. Session records live for 5 s here, so that the store's
memory, too, comes to rest within the bench.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvloop
from tqdm import tqdm

from loadtest.flags import bench_parser
from loadtest.fleet import DEMO_PAIR, bench_fleet, machine
from loadtest.procfs import num_open_files, resident_bytes
from loadtest.scrape import scrape, sessions_left
from loadtest.streams import HttpWay
from paceline.cluster.local import LocalFleet

MIB = 1024 * 1024
ACCOUNT = "memory is accounted for"
SESSIONS = 64
SESSION_TOKENS = 1000
# 64 sessions x 63 pages of 16 tokens, and some for the nodes they may still commit.
NUM_KV_BLOCKS = 4352
SHORT_PROMPT, SHORT_OUTPUT, CONCURRENCY = 48, 4, 32
VOCABULARY = range(2, 4096)
RECORD_TTL_S = 5
MOST_NEW_FILES = 4
GROWTH_SHARE, GROWTH_MIB, PER_REQUESTS = 0.02, 8.0, 10_000
SAMPLE_S = 0.2
# Connections, records and gauges come to rest within that time.
REST_S = 20


@dataclass(slots=True)
class Watched:
    """One process and what was seen of it.

    Attributes:
        budget_mib: The total it printed; None for services without a model.
        start_mib: Resident memory before any request.
        peak_mib: The most while the 64 sessions ran.
        samples: Requests done, and resident memory then.
    """

    pid: int
    budget: dict[str, float] | None
    start_mib: float
    peak_mib: float = 0.0
    files: tuple[int, int] = (0, 0)
    samples: list[tuple[int, float]] = field(default_factory=list)

    def rss_mib(self) -> float:
        """Resident memory now."""
        return resident_bytes(self.pid) / MIB

    def look(self) -> None:
        """Takes the peak."""
        self.peak_mib = max(self.peak_mib, self.rss_mib())

    def growth(self, warm_up: int) -> tuple[float, float, float]:
        """Returns memory after the warm-up and at the end, and the fitted growth per 10,000 requests, in MiB."""
        counts, sizes = np.array([sample for sample in self.samples if sample[0] >= warm_up]).T
        slope = float(np.polyfit(counts, sizes, 1)[0])
        return float(sizes[0]), float(sizes[-1]), slope * PER_REQUESTS


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("memory", __doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="short requests (default 10000)")
    parser.add_argument(
        "--allowance-mib",
        type=float,
        default=48.0,
        help="what a process may take beyond its account (default 48)",
    )
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        raise SystemExit(0 if runner.run(measure(arguments)) else 1)


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs both parts and prints the table; True when nothing grows and all stays within the accounts."""
    pages = f"--num-kv-blocks={NUM_KV_BLOCKS}"
    fleet = bench_fleet(
        **DEMO_PAIR,
        verifier_arg=(pages, f"--max-num-seqs={SESSIONS}"),
        drafter_arg=(pages,),
        gateway_arg=(f"--record-ttl-s={RECORD_TTL_S}",),
    )
    async with fleet:
        watched = {endpoint.name: _watch(fleet, endpoint.name) for endpoint in fleet.endpoints}
        most_running = await long_sessions(fleet, watched)
        await _rest(fleet)
        before = {name: num_open_files(each.pid) for name, each in watched.items()}
        await short_requests(fleet, watched, arguments.requests)
        left_over = await _rest(fleet)
        for name, each in watched.items():
            each.files = (before[name], num_open_files(each.pid))
        restarts = sum(fleet.restart_count(name) for name in watched)
        model = fleet.model_name
    figures = _figures(watched, arguments, most_running)
    figures |= {"sessions_left_over": left_over, "restarts": restarts}
    figures["ok"] = figures["ok"] and not left_over and not restarts
    _print_table(watched, figures, arguments)
    print(json.dumps({"bench": "memory", "machine": machine(), "model": model, **figures}))
    return bool(figures["ok"])


def _watch(fleet: LocalFleet, name: str) -> Watched:
    pid = fleet.pid(name)
    return Watched(pid=pid, budget=_account(fleet, name), start_mib=resident_bytes(pid) / MIB)


def _account(fleet: LocalFleet, name: str) -> dict[str, float] | None:
    """Reads the account from a service's log; None where it logs none."""
    log = fleet.log_dir / f"{name}.log"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    found = [line for line in lines if ACCOUNT in line]
    if not found:
        return None
    pairs = dict(word.split("=", 1) for word in shlex.split(found[-1]))
    return {key: float(value) for key, value in pairs.items() if key.endswith("_mib") or key == "kv_tokens"}


def _body(prompt_len: int, max_tokens: int, seed: int) -> dict[str, Any]:
    prompt = random.Random(seed).choices(VOCABULARY, k=prompt_len)
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}


async def long_sessions(fleet: LocalFleet, watched: dict[str, Watched]) -> int:
    """Runs 64 sessions of 1,000 tokens at once; returns how many the verifier really ran at a time."""
    half = SESSION_TOKENS // 2
    bodies = [_body(half, SESSION_TOKENS - half, seed) for seed in range(SESSIONS)]
    way = HttpWay(fleet.gateway_url)
    running: list[int] = []

    async def look() -> None:
        for each in watched.values():
            each.look()
        samples = await scrape(fleet.endpoint("verifier").second_address)
        running.append(int(samples["vllm:num_requests_running"]))

    with tqdm(total=SESSIONS, desc=f"{SESSIONS} sessions of {SESSION_TOKENS}", unit="session", leave=False) as bar:

        async def one(body: dict[str, Any]) -> None:
            await way.stream(body)
            bar.update()

        async with _repeating(look):
            await asyncio.gather(*(one(body) for body in bodies))
    return max(running, default=0)


async def short_requests(fleet: LocalFleet, watched: dict[str, Watched], count: int) -> None:
    """Runs short requests, and samples every process beside them."""
    way = HttpWay(fleet.gateway_url)
    seeds = iter(range(1_000_000, 1_000_000 + count))
    with tqdm(total=count, desc="short requests", unit="request", leave=False, miniters=50) as bar:

        async def look() -> None:
            for each in watched.values():
                each.samples.append((int(bar.n), each.rss_mib()))

        async def work() -> None:
            for seed in seeds:
                await way.stream(_body(SHORT_PROMPT, SHORT_OUTPUT, seed))
                bar.update()

        async with _repeating(look):
            await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        await look()


@asynccontextmanager
async def _repeating(look: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            await look()
            await asyncio.sleep(SAMPLE_S)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        if task.done():
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _rest(fleet: LocalFleet) -> dict[str, int]:
    """Waits until connections, records and gauges had time to go; returns the sessions that are still counted."""
    await asyncio.sleep(RECORD_TTL_S + 2)
    for _ in range(REST_S):
        if not await sessions_left(fleet):
            return {}
        await asyncio.sleep(1)
    return await sessions_left(fleet)


def _figures(watched: dict[str, Watched], arguments: argparse.Namespace, most_running: int) -> dict[str, Any]:
    rows = {name: _row(each, arguments) for name, each in watched.items()}
    return {
        "batch_size": most_running,
        "requests": arguments.requests,
        "concurrency": CONCURRENCY,
        "allowance_mib": arguments.allowance_mib,
        "processes": rows,
        "ok": most_running == SESSIONS and all(row["ok"] for row in rows.values()),
    }


def _row(each: Watched, arguments: argparse.Namespace) -> dict[str, Any]:
    warm, end, growth = each.growth(arguments.requests // 5)
    limit = max(GROWTH_SHARE * warm, GROWTH_MIB)
    printed = None if each.budget is None else each.budget["total_mib"]
    within = printed is None or each.peak_mib <= printed + arguments.allowance_mib
    return {
        "budget": each.budget,
        "start_mib": round(each.start_mib, 1),
        "peak_mib": round(each.peak_mib, 1),
        "peak_to_budget": None if printed is None else round(each.peak_mib / printed, 4),
        "warm_mib": round(warm, 1),
        "end_mib": round(end, 1),
        "growth_mib_per_10000": round(growth, 2),
        "growth_limit_mib": round(limit, 1),
        "open_files": list(each.files),
        "ok": within and growth <= limit and each.files[1] <= each.files[0] + MOST_NEW_FILES,
    }


def _print_table(watched: dict[str, Watched], figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(f"{machine()}; MiB; {figures['batch_size']} sessions of {SESSION_TOKENS} tokens at once, then")
    print(f"{arguments.requests} requests of {SHORT_PROMPT} + {SHORT_OUTPUT} tokens, {CONCURRENCY} at a time\n")
    for name, each in watched.items():
        if each.budget is not None:
            print(f"{name} printed: " + ", ".join(f"{key} {value:g}" for key, value in each.budget.items()))
    heads = ("printed", "start", "peak", "ratio", "warm", "end", "growth", "limit", "files")
    print(f"\n{'':12}" + "".join(f"{head:>10}" for head in heads))
    for name, row in figures["processes"].items():
        printed = row["budget"]["total_mib"] if row["budget"] else "-"
        cells = (
            *(printed, row["start_mib"], row["peak_mib"], row["peak_to_budget"] or "-", row["warm_mib"]),
            *(row["end_mib"], row["growth_mib_per_10000"], row["growth_limit_mib"]),
            "{} -> {}".format(*row["open_files"]),
        )
        print(f"{name:12}" + "".join(f"{cell:>10}" for cell in cells))
    print("\npeak: with 64 sessions; ratio: peak to printed; growth: fitted, per 10,000 requests after the warm-up;")
    print(f"files: open before and after the requests; sessions left over: {figures['sessions_left_over'] or 'none'}")

"""64 callers without a key at both doors of a gateway that asks for keys, while a stream of a caller with one runs.

Half of them send bodies of 4 MiB over HTTP, half messages of 4 MiB over gRPC, each over a connection of its own and one
after another, for as long as the load lasts; as many connections again stay silent, and as many calls ask for health
and keep their message back. They run in a process of their own that yields to the fleet, on other cores than the
gateway, whose stalls would otherwise be those of a shared core. Part of the bench `fuzz`.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from loadtest.bench import MIB
from loadtest.fleet import DEMO_PAIR, bench_fleet
from loadtest.procfs import keep_to, resident_bytes
from loadtest.scrape import scrape
from loadtest.streams import Ask, Completion, HttpDoor
from paceline.cluster.local import LocalFleet
from paceline.core.messages import GATEWAY

KEY = "pl-of-the-bench"
NUM_CALLERS = 64
MESSAGE_BYTES = 4 * MIB - 64
PIECE_BYTES = 64 * 1024
GENERATE = "/paceline.rpc.v1.Gateway/Generate"
CHECK = "/grpc.health.v1.Health/Check"
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
STALL = "paceline:event_loop_stall_seconds"
MAX_GROWTH_MIB = 64.0
MAX_STALL_S = 0.05
# The gauge covers the last minute; stalls of the start are older then.
WINDOW_S = 60
LONG = Ask(prompt="The drafter guesses, and the verifier", max_tokens=400, seed=11)
REFUSALS = {"http 401", "grpc UNAUTHENTICATED"}


async def measure_keyless(seconds: float) -> dict[str, Any]:
    """Returns what that many seconds of the load did to a gateway and to a stream under way."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"bench:{hashlib.sha256(KEY.encode()).hexdigest()}\n", encoding="ascii")
        settings = {**DEMO_PAIR, "dtype": "float32", "gateway_arg": ("--api-keys-file", str(keys))}
        async with bench_fleet(**settings) as fleet:
            return await _measure(fleet, seconds)


async def _measure(fleet: LocalFleet, seconds: float) -> dict[str, Any]:
    endpoint, pid = fleet.endpoint("gateway"), fleet.pid("gateway")
    part_cores(fleet)
    door = HttpDoor(fleet.gateway_url, headers={"authorization": f"Bearer {KEY}"})
    calm = await door.ask(LONG)
    await start_is_past(endpoint.address, KEY)
    calm_stall_s = await longest_stall_s(endpoint.address, KEY)
    before = peak = resident_bytes(pid) / MIB
    under_way: list[Completion] = []
    with _callers(endpoint.address, endpoint.second_address, seconds) as answered:
        loading = asyncio.create_task(asyncio.to_thread(answered))
        while not loading.done():
            streaming = asyncio.create_task(door.ask(LONG))
            while not streaming.done():
                peak = max(peak, resident_bytes(pid) / MIB)
                await asyncio.wait({streaming}, timeout=0.05)
            under_way.append(await streaming)
        counts = await loading
    # Scraping it shows that the gateway still answers.
    stall_s = await longest_stall_s(endpoint.address, KEY)
    same = all(done.text == calm.text and not done.error for done in under_way)
    longest_gap_s = max(gap for done in under_way for gap in done.gaps_s)
    only_refused = REFUSALS <= set(counts) <= REFUSALS | {"http closed"}
    return {
        "callers": NUM_CALLERS,
        "seconds": seconds,
        "answers": dict(counts),
        "memory_mib": [round(before, 1), round(peak, 1)],
        "growth_mib": round(peak - before, 1),
        "longest_stall_ms": [round(1e3 * calm_stall_s, 1), round(1e3 * stall_s, 1)],
        "longest_gap_ms": [round(1e3 * max(calm.gaps_s), 1), round(1e3 * longest_gap_s, 1)],
        "streams": len(under_way),
        "same_text": same,
        "ok": peak - before < MAX_GROWTH_MIB and stall_s < MAX_STALL_S and same and only_refused,
    }


def part_cores(fleet: LocalFleet) -> None:
    """Gives the gateway one half of the cores and everybody else the other, so that its own work is seen."""
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    if half:
        for endpoint in fleet.endpoints:
            keep_to(fleet.pid(endpoint.name), cpus[:half] if endpoint.role == GATEWAY else cpus[half:])
        keep_to(os.getpid(), cpus[half:])


async def longest_stall_s(address: str, key: str = "") -> float:
    """Returns the longest stall of a gateway's event loop in the last minute."""
    return (await scrape(address, key))[STALL]


async def start_is_past(address: str, key: str = "") -> None:
    """Waits until the gauge covers no stall of the start any more, a minute at most."""
    for _ in range(WINDOW_S):
        if await longest_stall_s(address, key) < MAX_STALL_S / 2:
            return
        await asyncio.sleep(1)


@contextmanager
def _callers(http: str, rpc: str, seconds: float) -> Iterator[Callable[[], Counter[str]]]:
    """Runs the callers in a process of their own while a block runs; yields what waits for their answers."""
    answers, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_main, args=(http, rpc, seconds, theirs))
    process.start()

    def read() -> Counter[str]:
        counts: Counter[str] = answers.recv() if answers.poll(seconds + 60) else Counter({"nothing": 1})
        return counts

    try:
        yield read
    finally:
        process.terminate()
        process.join()


def _main(http: str, rpc: str, seconds: float, answers: Connection) -> None:
    os.nice(10)
    answers.send(asyncio.run(_call(http, rpc, seconds)))


async def _call(http: str, rpc: str, seconds: float) -> Counter[str]:
    counts: Counter[str] = Counter()
    callers = [
        *(_stay_silent(http) for _ in range(NUM_CALLERS)),
        *(_ask_for_health(rpc) for _ in range(NUM_CALLERS)),
        *(_send_bodies(http, counts) for _ in range(NUM_CALLERS // 2)),
        *(_send_messages(rpc, counts) for _ in range(NUM_CALLERS // 2)),
    ]
    tasks = [asyncio.create_task(each) for each in callers]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    for each in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(each, asyncio.CancelledError):
            counts[f"ended: {each!r}"] += 1
    return counts


async def _send_bodies(address: str, counts: Counter[str]) -> None:
    host, port = address.rsplit(":", 1)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {MESSAGE_BYTES}\r\n\r\n".encode()
    while True:
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = asyncio.create_task(reader.readline())
        try:
            # It may be closed in the midst of its body, after the answer if that came through.
            with suppress(ConnectionError):
                writer.write(head)
                for _ in range(MESSAGE_BYTES // PIECE_BYTES):
                    writer.write(bytes(PIECE_BYTES))
                    await writer.drain()
            [line] = await asyncio.gather(answer, return_exceptions=True)
            counts[f"http {line.split()[1].decode()}" if isinstance(line, bytes) and line else "http closed"] += 1
        finally:
            answer.cancel()
            writer.close()


async def _send_messages(address: str, counts: Counter[str]) -> None:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        call = channel.unary_unary(GENERATE, None, None)
        while True:
            try:
                await call(bytes(MESSAGE_BYTES))
            except grpc.aio.AioRpcError as error:
                counts[f"grpc {error.code().name}"] += 1


async def _stay_silent(address: str) -> None:
    host, port = address.rsplit(":", 1)
    while True:
        reader, writer = await asyncio.open_connection(host, int(port))
        with suppress(ConnectionError):
            await reader.read()
        writer.close()


async def _ask_for_health(address: str) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(3600)
        yield b""

    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        while True:
            with suppress(grpc.aio.AioRpcError):
                await channel.stream_unary(CHECK, None, None)(nothing())
            # The gateway ended it to make room for a later one.
            await asyncio.sleep(0.1)

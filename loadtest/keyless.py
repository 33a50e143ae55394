"""64 callers without a key at both doors of a gateway that asks for keys, while a stream of a caller with one runs.

Half of them send bodies of 4 MiB over HTTP, half messages of 4 MiB over gRPC, each over a connection of its own and one
after another, for as long as the load lasts; as many connections again say nothing, and as many calls ask for health
and keep their message back. They run in a process of their own that yields to the fleet, on other cores than the
gateway, whose stalls would otherwise be those of a core that others have. Part of the bench `fuzz`.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.client import Ask, Completion, complete
from loadtest.fleet import DEMO_PAIR
from loadtest.procfs import keep_to, resident_bytes
from paceline.cluster.local import LocalFleet
from paceline.core.messages import GATEWAY

KEY = "pl-of-the-bench"
NUM_CALLERS = 64
MESSAGE_BYTES = 4 * 1024 * 1024 - 64
PIECE_BYTES = 64 * 1024
GENERATE = "/paceline.rpc.v1.Gateway/Generate"
CHECK = "/grpc.health.v1.Health/Check"
STALL = "paceline:event_loop_stall_seconds"
MIB = 1024 * 1024
MAX_GROWTH_MIB = 64.0
MAX_STALL_S = 0.05
# The gauge tells of the last minute; what a start-up did is older then.
WINDOW_S = 60.0
LONG = Ask(prompt="The drafter guesses, and the verifier", max_tokens=400, seed=11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Doors of the gateway, `host:port`."""

    http: str
    grpc: str


def write_keys(path: Path) -> None:
    """Writes a file of keys with the one that the bench has."""
    path.write_text(f"bench:{hashlib.sha256(KEY.encode()).hexdigest()}\n", encoding="ascii")


def keyed_settings() -> dict[str, Any]:
    """Returns the settings of the fleet that is asked."""
    return {**DEMO_PAIR, "dtype": "float32"}


async def measure_keyless(fleet: LocalFleet, seconds: float) -> dict[str, Any]:
    """Returns what so many seconds of the load did to a gateway and to a stream under way."""
    endpoint = fleet.endpoint("gateway")
    where = Where(http=endpoint.address, grpc=endpoint.second_address)
    pid = fleet.pid("gateway")
    part_cores(fleet)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        calm = await complete(client, fleet.gateway_url, LONG)
        await stalls_of_the_start_past(client, where.http)
        calm_stall_s = await longest_stall_s(client, where.http)
        before = resident_bytes(pid) / MIB
        peak = before
        under_way: list[Completion] = []
        with _callers(where, seconds) as answered:
            loading = asyncio.create_task(asyncio.to_thread(answered))
            while not loading.done():
                streaming = asyncio.create_task(complete(client, fleet.gateway_url, LONG))
                while not streaming.done():
                    peak = max(peak, resident_bytes(pid) / MIB)
                    await asyncio.wait({streaming}, timeout=0.05)
                under_way.append(await streaming)
            counts = await loading
        stall_s = await longest_stall_s(client, where.http)
        healthy = await _is_healthy(where.http)
    gaps_s = [gap for done in under_way for gap in done.gaps_s]
    figures: dict[str, Any] = {
        "callers": NUM_CALLERS,
        "seconds": seconds,
        "answers": dict(counts),
        "memory_mib": [round(before, 1), round(peak, 1)],
        "growth_mib": round(peak - before, 1),
        "longest_stall_ms": [round(1e3 * calm_stall_s, 1), round(1e3 * stall_s, 1)],
        "longest_gap_ms": [round(1e3 * max(calm.gaps_s), 1), round(1e3 * max(gaps_s), 1)],
        "streams": len(under_way),
        "same_text": all(done.text == calm.text and not done.error for done in under_way),
        "health": healthy,
    }
    figures["ok"] = (
        figures["growth_mib"] < MAX_GROWTH_MIB
        and stall_s < MAX_STALL_S
        and bool(figures["same_text"])
        and healthy
        and set(counts) <= {"http 401", "http closed", "grpc UNAUTHENTICATED"}
        and {"http 401", "grpc UNAUTHENTICATED"} <= set(counts)
    )
    return figures


def part_cores(fleet: LocalFleet) -> None:
    """Gives the gateway one half of the cores and everybody else the other, so that what it does itself is seen."""
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    for endpoint in fleet.endpoints if half else ():
        keep_to(fleet.pid(endpoint.name), cpus[:half] if endpoint.role == GATEWAY else cpus[half:])
    if half:
        keep_to(os.getpid(), cpus[half:])


async def longest_stall_s(client: aiohttp.ClientSession, address: str) -> float:
    """Returns the longest stall of a gateway's event loop in the last minute."""
    async with client.get(f"http://{address}/metrics") as response:
        text = await response.text()
    return next(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == STALL
    )


async def stalls_of_the_start_past(client: aiohttp.ClientSession, address: str) -> None:
    """Waits until no stall of the start is told of any more, a minute at most."""
    for _ in range(int(WINDOW_S)):
        if await longest_stall_s(client, address) < MAX_STALL_S / 2:
            return
        await asyncio.sleep(1)


async def _is_healthy(address: str) -> bool:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"http://{address}/health")).is_success


class _callers:  # noqa: N801 - used as a function
    """Runs the callers in a process of their own while a block runs."""

    def __init__(self, where: Where, seconds: float) -> None:
        self._answers, theirs = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("spawn").Process(target=_main, args=(where, seconds, theirs))
        self._seconds = seconds

    def __enter__(self) -> Any:
        self._process.start()
        return self._read

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def _read(self) -> Counter[str]:
        if not self._answers.poll(self._seconds + 60):
            return Counter({"nothing": 1})
        counts: Counter[str] = self._answers.recv()
        return counts


def _main(where: Where, seconds: float, answers: Connection) -> None:
    os.nice(10)
    answers.send(asyncio.run(_call(where, seconds)))


async def _call(where: Where, seconds: float) -> Counter[str]:
    counts: Counter[str] = Counter()
    silent = [asyncio.create_task(_say_nothing(where.http)) for _ in range(NUM_CALLERS)]
    silent += [asyncio.create_task(_ask_for_health(where.grpc)) for _ in range(NUM_CALLERS)]
    callers = [
        asyncio.create_task(_send_bodies(where.http, counts) if number % 2 else _send_messages(where.grpc, counts))
        for number in range(NUM_CALLERS)
    ]
    await asyncio.sleep(seconds)
    for task in (*silent, *callers):
        task.cancel()
    ended = await asyncio.gather(*callers, *silent, return_exceptions=True)
    for each in ended:
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
            writer.write(head)
            for _ in range(MESSAGE_BYTES // PIECE_BYTES):
                writer.write(bytes(PIECE_BYTES))
                await writer.drain()
            counts[f"http {(await answer).split()[1].decode()}"] += 1
        except (ConnectionError, IndexError):
            # Closed in the midst of its body, after the answer if that came through.
            [line] = await asyncio.gather(answer, return_exceptions=True)
            counts[f"http {line.split()[1].decode()}" if isinstance(line, bytes) and line else "http closed"] += 1
        finally:
            answer.cancel()
            writer.close()


async def _send_messages(address: str, counts: Counter[str]) -> None:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = channel.unary_unary(GENERATE, None, None)
        while True:
            try:
                await call(bytes(MESSAGE_BYTES))
            except grpc.aio.AioRpcError as error:
                counts[f"grpc {error.code().name}"] += 1


async def _say_nothing(address: str) -> None:
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

    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        while True:
            with suppress(grpc.aio.AioRpcError):
                await channel.stream_unary(CHECK, None, None)(nothing())
            # Ended for one that came later.
            await asyncio.sleep(0.1)

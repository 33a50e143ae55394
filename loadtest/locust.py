"""Starts a fleet and lets Locust load it with users of both doors: `make locust`.

Locust runs as a process of its own, since it patches the standard library. Its own HTML report shows its rows and,
beside them, TTFT, ITL and E2E. Fails if a request failed, or if a door or a kind of row got none.
"""

from __future__ import annotations

import asyncio
import csv
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench import report
from loadtest.fleet import bench_fleet
from loadtest.shapes import SHAPES
from paceline.core.errors import PacelineError, UnavailableError
from paceline.service.config import exit_with_error, parse, setting

PROG = "locust"
LOCUSTFILE = Path(__file__).with_name("locustfile.py")
# Where `loadtest` lies, for the path of the process.
ROOT = str(LOCUSTFILE.parents[1])
DOORS = ("http", "grpc")
KINDS = ("E2E", "TTFT", "ITL")
# Locust starts, waits for running requests and writes its reports beside the run itself.
MARGIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocustConfig:
    """Settings of a run of Locust."""

    url: str = setting("", help="HTTP door of a running gateway; with --grpc-address. Without both a fleet of its own.")
    grpc_address: str = setting("", help="gRPC door of the same gateway, host:port.")
    shape: str = setting("spike", help="Users over time.", choices=SHAPES)
    users: int = setting(8, help="Most users at once; half of each kind.", low=2, high=10_000)
    seconds: float = setting(60.0, help="Length of the run.", unit="seconds", low=1.0, high=86_400)
    max_tokens: int = setting(48, help="Tokens a request.", low=1)
    prompt: str = setting("", help="Prompt of all requests; without it unseen Python source.")
    dtype: str = setting("auto", help="Weight type of its own fleet.", choices=("auto", "bfloat16", "float32"))
    out: Path = setting(Path("reports/locust"), help="Where reports go: this name with .html and _stats.csv.")


def main() -> None:
    """Parses the command line and runs it; exit status 1 if a request failed or a kind of row is missing."""
    try:
        config = parse(LocustConfig, sys.argv[1:], os.environ, PROG, str(__doc__))
        rows = asyncio.run(measure(config))
    except PacelineError as error:
        exit_with_error(PROG, error)
    problems = missing_or_failed(rows)
    requests = {door: int(rows.get(("E2E", door), {}).get("Request Count", 0)) for door in DOORS}
    ok = report("locust", requests=requests, problems=problems, report=f"{config.out}.html", ok=not problems)
    raise SystemExit(0 if ok else 1)


async def measure(config: LocustConfig) -> dict[tuple[str, str], dict[str, str]]:
    """Runs Locust against the gateway named, or a fleet started for it; returns the rows of `read_rows`.

    Raises:
        PacelineError: The fleet does not start, or Locust does not end in time.
    """
    if config.url:
        return await run_locust(config, config.url, config.grpc_address)
    async with bench_fleet(dtype=config.dtype) as fleet:
        return await run_locust(config, fleet.gateway_url, fleet.endpoint("gateway").second_address)


async def run_locust(config: LocustConfig, url: str, grpc_address: str) -> dict[tuple[str, str], dict[str, str]]:
    """Runs Locust without its web page until the shape ends, and returns the rows of `read_rows`.

    Raises:
        UnavailableError: It does not end in time, or leaves no figures.
    """
    config.out.parent.mkdir(parents=True, exist_ok=True)
    stats = config.out.with_name(f"{config.out.name}_stats.csv")
    stats.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), "--headless", "--only-summary"),
        *("--host", url, "--grpc-address", grpc_address, "--shape", config.shape),
        *("--most-users", str(config.users), "--seconds", str(config.seconds), "--max-tokens", str(config.max_tokens)),
        *("--prompt", config.prompt),
        *("--html", f"{config.out}.html", "--csv", str(config.out), "--stop-timeout", "30"),
        *("--loglevel", "WARNING"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))},
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        await asyncio.wait_for(process.wait(), config.seconds + MARGIN_S)
    except TimeoutError:
        raise UnavailableError(f"Locust did not end within {config.seconds + MARGIN_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not stats.is_file():
        raise UnavailableError(f"Locust ended with status {process.returncode} and left no figures")
    return read_rows(stats)


def read_rows(stats: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Returns Locust's rows by type and name; the sum of all of them is left out, since it mixes the types."""
    with stats.open(encoding="utf-8", newline="") as lines:
        return {(row["Type"], row["Name"]): row for row in csv.DictReader(lines) if row["Name"] != "Aggregated"}


def missing_or_failed(rows: Mapping[tuple[str, str], Mapping[str, str]]) -> list[str]:
    """Returns what is wrong with a run: requests that failed, and rows that nobody filled."""
    failed = [
        f"{row['Failure Count']} of {row['Request Count']} failed: {kind} {name}"
        for (kind, name), row in rows.items()
        if int(row["Failure Count"])
    ]
    wanted = [(kind, door) for door in DOORS for kind in KINDS]
    return failed + [
        f"none: {kind} {door}" for kind, door in wanted if not int(rows.get((kind, door), {}).get("Request Count", 0))
    ]

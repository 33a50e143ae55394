"""vLLM's load client, unmodified, against our gateway: `make bench NAME=vllm`.

`vllm bench serve` sends prompts that the pair never saw, reads `/metrics` before and after, and prints our acceptance
beside its latencies. Its output is shown as it is; its accepted tokens must be those of the gateway's counters. The
first run sets it up in the user's cache folder (minutes).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench import bench_parser, report, run
from loadtest.fleet import bench_fleet, say
from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.checkpoints import DEMO_TARGET
from tools.environments import child_environ, environment
from tools.processes import run_command
from tools.scrape import scrape

QUIET_S = 900.0
OUTPUT_LEN = 64


def main() -> None:
    """Parses the command line and runs the bench; exit status 1 when what the client reads is not what we count."""
    parser = bench_parser("vllm", __doc__)
    parser.add_argument("--num-prompts", type=int, default=32, help="requests (default 32)")
    parser.add_argument("--max-concurrency", type=int, default=4, help="at once (default 4)")
    parser.add_argument("--dtype", default="auto", help="of both models (default auto)")
    parser.add_argument("--lend", action=argparse.BooleanOptionalAction, default=True, help="see paceline up --help")
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs it against a fleet; True when it reports the acceptance that our counters have."""
    vllm = environment("vllm-bench", os.environ, say).with_name("vllm")
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        lines = [json.dumps({"prompt": prompt}) for prompt in unseen_prompts(arguments.num_prompts)]
        prompts.write_text("\n".join(lines), encoding="utf-8")
        async with bench_fleet(dtype=arguments.dtype, lend=arguments.lend) as fleet:
            command = command_line(vllm, fleet.gateway_url, fleet.model_name, prompts, arguments)
            model, said = fleet.model_name, await asyncio.to_thread(_run, command)
            ours = await scrape(fleet.gateway_url.removeprefix("http://"))
    reported = number_after("Accepted tokens:", said)
    counted = int(ours["vllm:spec_decode_num_accepted_tokens_total"])
    # The request by which it makes sure that the server is there comes before its first look.
    ok = reported is not None and counted - OUTPUT_LEN <= reported <= counted
    figures = {"accepted_reported": reported, "accepted_counted": counted}
    return report("vllm", model=model, **figures, acceptance_percent=number_after("Acceptance rate (%):", said), ok=ok)


def command_line(vllm: Path, url: str, model: str, prompts: Path, arguments: argparse.Namespace) -> list[str | Path]:
    """The client's command; its own help explains all of it."""
    options: dict[str, str | Path] = {
        "--base-url": url,
        "--model": model,
        "--tokenizer": DEMO_TARGET,
        "--dataset-name": "custom",
        "--dataset-path": prompts,
        "--custom-output-len": str(OUTPUT_LEN),
        "--num-prompts": str(arguments.num_prompts),
        "--max-concurrency": str(arguments.max_concurrency),
        "--temperature": "0",
    }
    flat: list[str | Path] = [word for option in options.items() for word in option]
    return [vllm, "bench", "serve", *flat, "--skip-chat-template", "--disable-tqdm"]


def number_after(label: str, lines: Sequence[str]) -> float | None:
    """Returns the number that the client has printed after a label; None when it did not."""
    return next((float(line.removeprefix(label)) for line in lines if line.startswith(label)), None)


def _run(command: Sequence[str | Path]) -> list[str]:
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    run_command(command, env=child_environ(os.environ), quiet_s=QUIET_S, on_line=take)
    return lines

"""A plain step inside the running verifier against its packed linears alone: `make bench NAME=step`.

The step is the time between two tokens as a client of the whole fleet sees it: admission, packing, paged attention,
sampling, commit and the way out included, with the verifier on one core. The linears are those of the same target on
the same core, run one after the other by a process of its own, padded as the engine pads them. Both in turn, medians;
the ratio is that of a round, and met within its standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.client import Ask, run_batch
from loadtest.flags import bench_parser
from loadtest.fleet import bench_fleet, machine, widened_target
from loadtest.trial import Trial, rounded_error, take_turns
from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.local import LocalFleet

MOST = 1.4
STEP, LINEARS = "step", "linears"
WORKER = "--linears-of"


def main() -> None:
    """Parses the command line and runs the bench, or one round of its linears."""
    parser = bench_parser("step", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both (default 5)")
    parser.add_argument("--max-tokens", type=int, default=128, help="steps of a round (default 128)")
    parser.add_argument(WORKER, type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.linears_of is not None:
        os.sched_setaffinity(0, {arguments.core})
        print(time_linears(arguments.linears_of, arguments.max_tokens))
        raise SystemExit(0)
    raise SystemExit(0 if asyncio.run(measure(arguments.rounds, arguments.max_tokens)) else 1)


def time_linears(folder: Path, count: int) -> float:
    """Median seconds of all linear layers of a target at one row, on this process's core."""
    import torch

    from paceline.engine.backends.llama_backend import LlamaBackend
    from paceline.engine.loading import load_decoder

    decoder = load_decoder(folder, num_threads=1)
    assert isinstance(decoder.backend, LlamaBackend), "the demo target is of the Llama family"
    layers = [linear for layer in decoder.backend.weights.layers for linear in layer.linears]
    inputs = [torch.zeros(layer.rows_computed(1), layer.in_features, dtype=layer.dtype) for layer in layers]
    hidden = torch.zeros(1, layers[0].in_features)
    seconds = []
    with torch.inference_mode():
        for _ in range(count + 10):
            started_s = time.perf_counter()
            for layer, rows in zip(layers, inputs, strict=True):
                layer.raw(rows)
            decoder.head(hidden)
            seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds[10:])


async def measure(rounds: int, max_tokens: int) -> bool:
    """Runs both in turn and prints them; True when the ratio is met."""
    settings = widened_target("98m")
    core = str(min(os.sched_getaffinity(0)))
    own_core = ("--cpus", core, "--threads", "1")
    async with bench_fleet(**settings, drafter=False, verifier_threads=1, verifier_arg=own_core) as fleet:
        ask = Ask(prompt=unseen_prompts(1)[0], max_tokens=max_tokens, speculation={"enabled": False})
        await run_batch(fleet.gateway_url, [ask], 1, "warming up")

        async def measure_side(side: str) -> float:
            if side == STEP:
                return await _time_steps(fleet, ask)
            return await _linears(settings["model"], core, max_tokens)

        seconds = await take_turns([STEP, LINEARS], measure_side, rounds=rounds, title="step and linears")
    return _report(seconds)


def _report(seconds: Mapping[str, Sequence[float]]) -> bool:
    step_ms, linears_ms = (1e3 * statistics.median(seconds[side]) for side in (STEP, LINEARS))
    trial = Trial.of(seconds[STEP], seconds[LINEARS])
    ok = trial.meets(most=MOST)
    print(f"step in the running verifier {step_ms:7.2f} ms")
    print(f"its packed linears alone     {linears_ms:7.2f} ms")
    print(f"ratio                        {trial.ratio:7.2f}  (at most {MOST}); batch size 1, one core; {machine()}")
    figures = {"bench": "step", "machine": machine(), "batch_size": 1, "step_ms": round(step_ms, 3)}
    ratio = {"ratio": round(trial.ratio, 3), "error": rounded_error(trial), "most": MOST}
    print(json.dumps({**figures, "linears_ms": round(linears_ms, 3), **ratio, "ok": ok}))
    return ok


async def _time_steps(fleet: LocalFleet, ask: Ask) -> float:
    result = await run_batch(fleet.gateway_url, [ask], 1, "decoding")
    return statistics.median(result.completions[0].gaps_s)


async def _linears(target: Path, core: str, count: int) -> float:
    command = [sys.executable, "-m", "loadtest", "step", WORKER, str(target), "--core", core]
    process = await asyncio.create_subprocess_exec(*command, "--max-tokens", str(count), stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"timing the linears failed with status {process.returncode}")
    return float(out.split()[-1])

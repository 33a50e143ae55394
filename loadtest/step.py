"""A plain step inside the running verifier against its packed linears alone: `make bench NAME=step`.

The step is the time between two tokens as a client of the whole fleet sees it: admission, packing, paged attention,
sampling, commit and the way out included, with the verifier on one core. The linears are those of the same target on
the same core, the head among them, run one after the other by a process of its own, padded as the engine pads them.
Both in turn, medians; the ratio is that of a round, and met within its standard error. With --vocab the head has so
many ids, and choosing among them is in the step alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.bench import add_choice_flags, bench_parser, report, run, sampling_of, show
from loadtest.client import asks_of, run_batch
from loadtest.fleet import bench_fleet, widened_target
from loadtest.trial import Trial, rounded_error, take_turns
from loadtest.vocabulary import with_vocabulary

MOST = 1.4
STEP, LINEARS = "step", "linears"
WORKER = "--linears-of"


def main() -> None:
    """Parses the command line and runs the bench, or one round of its linears."""
    parser = bench_parser("step", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both (default 5)")
    parser.add_argument("--max-tokens", type=int, default=128, help="steps of a round (default 128)")
    add_choice_flags(parser)
    parser.add_argument(WORKER, type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=None, help=argparse.SUPPRESS)
    run(parser, measure)


def time_linears(folder: Path, count: int) -> float:
    """Median seconds of all linear layers of a target at one row, on this process's core."""
    import torch

    from paceline.engine.backends.interface import LlamaBackend
    from paceline.engine.loading import load_decoder

    decoder = load_decoder(folder, num_threads=1)
    assert isinstance(decoder.backend, LlamaBackend), "the demo target is of the Llama family"
    layers = [linear for layer in decoder.backend.weights.layers for linear in layer.linears]
    inputs = [torch.zeros(1, layer.in_features, dtype=layer.dtype) for layer in layers]
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


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs both in turn and prints them; True when the ratio is met."""
    if arguments.linears_of is not None:
        os.sched_setaffinity(0, {arguments.core})
        print(time_linears(arguments.linears_of, arguments.max_tokens))
        return True
    settings = with_vocabulary(widened_target("98m"), arguments.vocab)
    core = str(min(os.sched_getaffinity(0)))
    own_core = ("--cpus", core, "--threads", "1")
    (ask,) = asks_of(1, arguments.max_tokens)
    ask = replace(ask, speculation={"enabled": False}, more=sampling_of(arguments))
    async with bench_fleet(**settings, drafter=False, verifier_threads=1, verifier_arg=own_core) as fleet:
        await run_batch(fleet.gateway_url, [ask], 1, "warming up")

        async def measure_side(side: str) -> float:
            if side == LINEARS:
                return await _linears(settings["model"], core, arguments.max_tokens)
            result = await run_batch(fleet.gateway_url, [ask], 1, "decoding")
            return statistics.median(result.completions[0].gaps_s)

        seconds = await take_turns([STEP, LINEARS], measure_side, rounds=arguments.rounds, title="step and linears")
    step_ms, linears_ms = (round(1e3 * statistics.median(seconds[side]), 3) for side in (STEP, LINEARS))
    trial = Trial.of(seconds[STEP], seconds[LINEARS])
    figures: dict[str, Any] = {"step_ms": step_ms, "linears_ms": linears_ms, "ratio": round(trial.ratio, 3)}
    figures |= {"error": rounded_error(trial), "most": MOST}
    show([figures])
    print("batch size 1, one core")
    return report("step", batch_size=1, **figures, ok=trial.meets(most=MOST))


async def _linears(target: Path, core: str, count: int) -> float:
    command = [sys.executable, "-m", "loadtest", "step", WORKER, str(target), "--core", core]
    process = await asyncio.create_subprocess_exec(*command, "--max-tokens", str(count), stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"timing the linears failed with status {process.returncode}")
    return float(out.split()[-1])

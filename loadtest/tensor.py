"""Steps of one rank against those of a tensor parallel model: `make bench NAME=tensor ARGS='--model FOLDER'`.

The ranks are started as a verifier starts them. Beside the steps: what it costs to tell the other ranks of one. On a
CPU this shows that it works and what the ranks' talk costs; ranks on the same cores cannot be faster than one.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from loadtest.flags import bench_parser
from loadtest.fleet import machine
from paceline.core.pages import BlockPool, SessionPages, SlotPool
from paceline.engine.decoder import Decoder
from paceline.engine.identity import weights_hash
from paceline.engine.kv import KVCache
from paceline.engine.loading import load_decoder
from paceline.engine.packing import BatchBuilder
from paceline.verifier.config import VerifierConfig
from paceline.verifier.ranks import other_ranks

ROWS = (1, 8, 64)
BLOCKS = 8
# Copies of no slot in one timing: each of them is a call and nothing else.
CALLS = 200


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("tensor", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder; ranks must divide its heads")
    parser.add_argument("--dtype", default="float32", help="weight type (default float32)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to compare with one (default 2)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each number of rows (default 20)")
    arguments = parser.parse_args()
    for size in (1, arguments.ranks):
        config = VerifierConfig(
            model=arguments.model, dtype=arguments.dtype, device=arguments.device, tensor_parallel_size=size
        )
        print(json.dumps({"bench": "tensor", "machine": machine(), **measure(config, arguments.steps)}))


def measure(config: VerifierConfig, steps: int) -> dict[str, object]:
    """Median milliseconds of steps by rows, and microseconds of a call."""
    size = config.tensor_parallel_size
    with other_ranks(config, weights_hash(config.model, config.dtype, size)) as (own, join):
        decoder = load_decoder(own.model, own.dtype, own.device, own.threads, join())
        cache = decoder.new_cache(BLOCKS)
        times = {
            rows: time_steps(decoder, cache, rows, steps) for rows in tqdm(ROWS, desc=f"{size} ranks", leave=False)
        }
        return {
            "ranks": size,
            "weight_bytes": decoder.weight_bytes,
            "step_ms": {rows: round(1e3 * seconds, 3) for rows, seconds in times.items()},
            "call_us": round(1e6 * time_calls(cache), 1),
        }


def time_steps(decoder: Decoder, cache: KVCache, rows: int, steps: int) -> float:
    """Median seconds of a step of so many tree nodes without any context."""
    builder, nowhere = BatchBuilder(), SessionPages([], BlockPool(0))
    scratch = SlotPool(first_block=0, num_blocks=BLOCKS)
    for _ in range(rows):
        slot = scratch.take()
        assert slot is not None, "there are slots for all rows"
        builder.add_node(nowhere, token_id=0, position=0, slot=slot, ancestors=())
    batch = builder.build()
    seconds: list[float] = []
    for _ in range(steps + 1):
        started_s = time.perf_counter()
        decoder.forward(batch, cache).cpu()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds[1:])


def time_calls(cache: KVCache) -> float:
    """Seconds that it takes to tell the other ranks of a call."""
    none = np.zeros(0, np.int64)
    started_s = time.perf_counter()
    for _ in range(CALLS):
        cache.copy_slots(none, none)
    return (time.perf_counter() - started_s) / CALLS

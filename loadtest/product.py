"""The matrix products of a CPU step beside torch's (oneDNN, MKL), on one core: `make bench NAME=product`.

Weights are those of a layer of 98 M and of a head of SmolLM2, read from memory: as many copies as do not fit the cache
take turns. Once for each set of instructions that this machine has, in a child that is held to it. In the table

  GB/s         of weights, and their share of what a plain copy of an array reads and writes in the same process
  GFMA/s       fused multiply-adds
  torch        its time over ours: packed float32, and bfloat16 where the CPU multiplies that itself; above 1: ours is
               faster
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.bench import bench_parser, report, run, show
from loadtest.fleet import say

# By the last of their instructions as /proc/cpuinfo calls it: what numba compiles for, and what torch is held to.
SETS = {
    "AVX2": ("fma", "haswell", "+avx2,+fma", {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}),
    "AVX-512": ("avx512vl", "skylake-avx512", "+avx512f,+avx2,+fma", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    "AVX-512 and BF16": ("avx512_bf16", "znver4", "+avx512f,+avx512bf16,+avx2,+fma,-sse4a", {}),
}
ROWS = (1, 2, 4, 8, 16, 64)
SHAPES = ((12288, 768), (49152, 576))
# Together with as many copies larger than any last cache.
WORKING_SET_BYTES = 256 << 20
LEAST_SHARE = 0.8
WORKER = "--worker"
THEIRS = ("torch float32", "torch bfloat16")


def main() -> None:
    """Parses the command line and runs the bench, or one set of instructions of it."""
    parser = bench_parser("product", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="passes over all copies; the fastest counts (default 5)")
    parser.add_argument(WORKER, action="store_true", help=argparse.SUPPRESS)
    run(parser, measure)


def instruction_sets() -> dict[str, dict[str, str]]:
    """Environments of children that use no other instructions, of the sets that this machine has; and its own."""
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii").split() if platform.machine() == "x86_64" else []
    sets = {
        name: {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, **torch_too}
        for name, (flag, cpu, features, torch_too) in SETS.items()
        if flag in flags
    }
    return {"this machine's": {}, **sets}


async def measure(arguments: argparse.Namespace) -> bool:
    """Prints a table for each set; True when one row reads at `LEAST_SHARE` of a copy and torch is never faster."""
    if arguments.worker:
        sys.stdout.write(json.dumps(_rows(arguments.rounds)))
        return True
    found = {}
    for name, environment in instruction_sets().items():
        command = [sys.executable, "-m", "loadtest", "product", WORKER, "--rounds", str(arguments.rounds)]
        child = await asyncio.create_subprocess_exec(
            *command, env=os.environ | environment, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await child.communicate()
        found[name] = json.loads(output)
        say(f"instructions: {name}")
        show(found[name])
    rows = [row for each in found.values() for row in each]
    slower = [row for row in rows if any(row[name] is not None and row[name] < 1.0 for name in THEIRS)]
    ok = not slower and all(row["of a copy"] >= LEAST_SHARE for row in rows if row["rows"] == 1)
    return report("product", ok=ok, sets=found)


def _rows(rounds: int) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    source, target = torch.ones(64 << 20), torch.ones(64 << 20)
    copy_gb_s = (source.nbytes + target.nbytes) / _fastest_s(lambda: target.copy_(source), 5) / 1e9
    return [
        _row(shape, kind, rows, rounds, copy_gb_s)
        for kind in (torch.bfloat16, torch.float32)
        for shape in SHAPES
        for rows in ROWS
    ]


def _row(shape: tuple[int, int], kind: Any, rows: int, rounds: int, copy_gb_s: float) -> dict[str, Any]:
    import torch

    from paceline.engine.backends.cpu.product import Product

    weight = torch.randn(shape).to(kind)
    copies = max(1, WORKING_SET_BYTES // weight.nbytes)
    inputs = torch.randn(rows, shape[1]).to(kind)
    ours_s = _in_turn([Product(weight) for _ in range(copies)], lambda each: each(inputs, kind), rounds)
    torch_s = {torch.float32: _torch_s(weight.float(), inputs.float(), copies, rounds)}
    if torch.cpu._is_avx512_bf16_supported() and kind is torch.bfloat16:  # noqa: SLF001 - there is no other way
        torch_s[torch.bfloat16] = _torch_s(weight, inputs, copies, rounds)
    rate = weight.nbytes / ours_s / 1e9
    theirs = [round(torch_s[each] / ours_s, 2) if each in torch_s else None for each in (torch.float32, torch.bfloat16)]
    return {
        "out x in": f"{shape[0]} x {shape[1]}",
        "weights": str(kind).removeprefix("torch."),
        "rows": rows,
        "ms": round(1e3 * ours_s, 2),
        "GB/s": round(rate, 1),
        "of a copy": round(rate / copy_gb_s, 2),
        "GFMA/s": round(weight.numel() * rows / ours_s / 1e9, 1),
        **dict(zip(THEIRS, theirs, strict=True)),
    }


def _torch_s(weight: Any, inputs: Any, copies: int, rounds: int) -> float:
    """Seconds of torch's own packed product."""
    import torch

    pack, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
    with torch.inference_mode():
        packed = [pack(weight.clone(), len(inputs)) for _ in range(copies)]
        return _in_turn(packed, lambda each: linear(inputs, each, None, "none", [], ""), rounds)


def _in_turn(products: list[Any], multiply: Callable[[Any], Any], rounds: int) -> float:
    """Seconds of a product, where each is out of the cache when its turn comes again."""

    def all_of_them() -> None:
        for each in products:
            multiply(each)

    return _fastest_s(all_of_them, rounds) / len(products)


def _fastest_s(function: Callable[[], Any], times: int) -> float:
    function()
    found = float("inf")
    for _ in range(times):
        started_s = time.perf_counter()
        function()
        found = min(found, time.perf_counter() - started_s)
    return found

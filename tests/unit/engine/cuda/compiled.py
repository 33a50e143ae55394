"""Compiles what models of real size launch for GPUs that are not there, and says what came of it, a line a kernel.

A process of its own, since the tests' has kernels interpreted: `python -m tests.unit.engine.cuda.compiled 80 89 90`.
Tensors have no memory here, and torch, which takes seconds to load, is only as much as launches ask of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

# Kinds of numbers, as Triton names them, and their bytes.
KINDS = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int32": "i32", "int64": "i64"}
BYTES = {"bf16": 2, "fp32": 4, "fp64": 8, "i32": 4, "i64": 8}


class Meta:
    """A contiguous tensor of some shape and kind."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Meta:
        return Meta(self.shape[1:], self.dtype)

    def new_empty(self, shape: Any, dtype: str | None = None) -> Meta:
        return Meta(shape if isinstance(shape, tuple) else (shape,), dtype or self.dtype)

    def add_(self, _: int) -> None:
        """Launches nothing of ours."""

    def is_contiguous(self) -> bool:
        return True

    def stride(self, dim: int) -> int:
        return 1 if dim == 1 else self.shape[1]

    def element_size(self) -> int:
        return BYTES[self.dtype]


class Torch(ModuleType):
    Tensor = Meta

    def __getattr__(self, name: str) -> str:
        return KINDS[name]

    def empty_like(self, tensor: Meta) -> Meta:
        return Meta(tensor.shape, tensor.dtype)


sys.modules["torch"] = torch = Torch("torch")

from paceline.core.pages import BLOCK_SIZE  # noqa: E402
from paceline.engine.backends.cuda import attention, launch  # noqa: E402
from paceline.engine.backends.cuda.attention import Lanes, attend, most_parts  # noqa: E402
from paceline.engine.backends.cuda.choose import CHOICE_WORDS, Questions, choose, rank  # noqa: E402
from paceline.engine.backends.cuda.layer_kernels import add_norm, go_down, move, rope_store, silu_mul  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def meta(*shape: int, kind: str = torch.bfloat16) -> Any:
    return Meta(shape, kind)


def attention_of(heads: int, dim: int, width: int, kind: str = torch.bfloat16) -> None:
    """Attention in a layer of a model with 8 KV heads."""
    rows, kv_heads, ints, longs = 64, 8, torch.int32, torch.int64
    lanes = Lanes(
        contexts=meta(rows, kind=ints), node_bits=meta(rows, kind=longs), row_parts=meta(rows, 2, kind=ints),
        lane_rows=meta(rows, width, kind=ints), lane_starts=meta(rows, kind=ints), lane_nodes=meta(rows, kind=ints),
        node_slots=meta(rows, attention.NODES, kind=ints), parts=meta(most_parts(rows, kv_heads), 4, kind=ints),
        tables=meta(1 << 18, kind=ints),
    )  # fmt: skip
    keys = meta(4096, kv_heads, BLOCK_SIZE, dim, kind=kind)
    attend(lanes, meta(rows, heads, dim, kind=kind), keys, keys, 0.1)


def rest(hidden: int, inner: int, heads: int, dim: int, normed: bool) -> None:
    """All else in such a layer."""
    rows, cache, halves = 64, meta(2, 4096, 8, BLOCK_SIZE, dim), meta(64, dim // 2, kind=torch.float32)
    residual, slots = meta(rows, hidden, kind=torch.float32), meta(rows, kind=torch.int64)
    add_norm(residual, meta(rows, hidden), meta(hidden, kind=torch.float32), 1e-5, meta(rows, hidden))
    norms = meta(heads + 8, dim, kind=torch.float32) if normed else None
    qkv, query = meta(rows, (heads + 16) * dim), meta(rows, heads, dim)
    rope_store(qkv, halves, halves, slots, norms, 1e-5, query, cache[0], cache[1])
    silu_mul(meta(rows, 2 * inner))
    move(cache, cache, slots, slots)


def sampler(vocab: int) -> None:
    """Tokens and rankings, and what takes these to the next level."""
    rows, ints = meta(64, kind=torch.int64), meta(64, kind=torch.int32)
    found, below = meta(16, 64, 2, 16, kind=torch.int32), meta(15, 64, 3, kind=torch.int64)
    go_down(found, meta(1, kind=torch.int64), below, (ints, ints, rows, rows, rows, ints))
    questions = Questions(rows=rows, positions=rows, choices=meta(64, CHOICE_WORDS, kind=torch.int64))
    for ask in (choose, rank):
        ask(meta(64, vocab, kind=torch.float32), questions)


def launches() -> dict[str, Launch]:
    """What is launched for models of 1B and 8B, by a name for each; equal ones once."""
    seen: dict[str, Launch] = {}

    def keep(kernel: Any, _: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        named = " ".join(f"{name}={value}" for name, value in constants.items())
        seen.setdefault(f"{kernel.fn.__name__} {named}", (kernel, arguments, constants))

    launch.run = keep
    for heads, dim, width in ((32, 128, 4), (32, 128, 16), (32, 64, 8), (16, 256, 16)):
        attention_of(heads, dim, width)
    attention_of(32, 128, 8, torch.float32)
    rest(4096, 14336, 32, 128, normed=True)
    sampler(128_256)
    return seen


def source_of(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton would compile when this is launched, and its options."""
    names = dict(zip(kernel.arg_names, arguments, strict=False))
    fixed = {name: value for name, value in constants.items() if name in kernel.arg_names}
    kinds = {name: kind_of(value) for name, value in names.items()} | dict.fromkeys(fixed, "constexpr")
    changing = {each.name for each in kernel.params if each.do_not_specialize}
    aligned = [
        name for name, value in names.items() if isinstance(value, Meta) or (value % 16 == 0 and name not in changing)
    ]
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = {name: value for name, value in constants.items() if name not in fixed}
    return ASTSource(kernel, kinds, constexprs=fixed, attrs=attrs), options


def kind_of(value: Any) -> str:
    return f"*{value.dtype}" if isinstance(value, Meta) else "fp32" if isinstance(value, float) else "i32"


def report(name: str, found: Launch, capability: int) -> dict[str, Any]:
    """Compiles one, and reads what the machine code needs and which products are fused with sums."""
    source, options = source_of(*found)
    made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    usage = next(line for line in said.stdout.splitlines() if "REG:" in line)
    needs = dict(part.split(":")[:2] for part in usage.split() if part.split(":")[0] in ("REG", "STACK", "LOCAL"))
    return {
        "kernel": name.split()[0], "name": name, "sm": capability, "registers": int(needs["REG"]),
        "spilled_bytes": int(needs["STACK"]) + int(needs["LOCAL"]), "shared_bytes": made.metadata.shared,
        "fused": made.asm["ptx"].count("fma.rn.f"),
    }  # fmt: skip


def reports(capabilities: list[int]) -> Iterator[dict[str, Any]]:
    # ptxas is a process of its own, so two threads fill two cores.
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(report, name, found, capability)
            for name, found in launches().items()
            for capability in capabilities
        ]
        for job in jobs:
            yield job.result()


if __name__ == "__main__":
    for line in reports([int(argument) for argument in sys.argv[1:]]):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

"""A long prompt beside streams on a model of random weights: `taskset -c 0 make bench NAME=long_prompt`.

The model has the shape of Llama-3.2-1B, with weights of 16 bits. A fleet without drafters serves streams; once they
run, a prompt comes whose steps would take tens of seconds if rows alone bounded them. The bench is met when the prompt
is answered, no stream breaks off, and no process is restarted. It prints the longest time between two tokens of a
stream while the prompt is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from shutil import copyfile
from typing import Any

import grpc
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from loadtest.bench import MIB, bench_parser, report, run
from loadtest.fleet import bench_fleet
from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.cluster.local import LocalFleet
from paceline.rpc.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from paceline.service.process import CHANNEL_OPTIONS

# Of meta-llama/Llama-3.2-1B.
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
WEIGHT_STD = 0.02
# Tokens that each stream has when the prompt comes.
LEAD_TOKENS = 4
STREAM_TOKENS = 16_000
START_S = 600.0


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("long_prompt", __doc__)
    parser.add_argument("--prompt-tokens", type=int, default=8000, help="(default 8000)")
    parser.add_argument("--streams", type=int, default=2, help="beside it (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="of the verifier (default 1)")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="for the prompt (default 3600)")
    parser.add_argument("--checkpoint", type=Path, help="folder to make the model in, or find it (default: a new one)")
    run(parser, measure)


@dataclass(slots=True, kw_only=True)
class Times:
    """When tokens of a stream came, seconds, and its error; empty: none. `begun` is set after a few, or the error."""

    at_s: list[float] = field(default_factory=list)
    error: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def gaps_s(self, since_s: float, until_s: float) -> list[float]:
        """Times between tokens that touch an interval."""
        within = pairwise([*(each for each in self.at_s if each <= until_s), until_s])
        return [later - sooner for sooner, later in within if later > since_s]


async def measure(options: argparse.Namespace) -> bool:
    """Runs the streams and the prompt; True when all of them were served."""
    async with AsyncExitStack() as stack:
        folder = options.checkpoint or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "llama-1b"
        if not folder.exists():
            save_random(folder)
        fleet = bench_fleet(model=folder, drafter=False, verifier_threads=options.threads, start_timeout_s=START_S)
        await stack.enter_async_context(fleet)
        address = fleet.endpoint("gateway").second_address
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))
        stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
        return await _measured(options, fleet, stub)


async def _measured(options: argparse.Namespace, fleet: LocalFleet, stub: gateway_pb2_grpc.GatewayAsyncStub) -> bool:
    streams = [Times() for _ in range(options.streams)]
    tasks = [
        asyncio.create_task(answer(stub, f"stream {number}", STREAM_TOKENS, times))
        for number, times in enumerate(streams)
    ]
    await asyncio.wait_for(asyncio.gather(*(each.begun.wait() for each in streams)), START_S)
    sent_s, prompt = time.perf_counter(), Times()
    with suppress(TimeoutError):
        async with asyncio.timeout(options.timeout_s):
            await answer(stub, prompt_of(options.prompt_tokens), 4, prompt)
    ended_s = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gaps_s = [gap for each in streams for gap in each.gaps_s(sent_s, ended_s)]
    errors = [each.error for each in (prompt, *streams) if each.error]
    restarts = fleet.restart_count("verifier-0")
    print(f"prompt of {options.prompt_tokens} tokens: {len(prompt.at_s)} tokens after {ended_s - sent_s:.1f} s")
    print(f"streams: gap median {statistics.median(gaps_s):.2f} s, largest {max(gaps_s):.2f} s; errors: {errors}")
    return report(
        "long_prompt",
        prompt_tokens=options.prompt_tokens,
        prompt_s=round(ended_s - sent_s, 1),
        gap_p50_s=round(statistics.median(gaps_s), 3),
        gap_max_s=round(max(gaps_s), 3),
        stream_tokens=[len(each.at_s) for each in streams],
        verifier_mib=resident_mib(fleet.pid("verifier")),
        restarts=restarts,
        errors=errors,
        ok=not errors and not restarts and len(prompt.at_s) > 0,
    )


def prompt_of(num_tokens: int) -> str:
    """A text of so many tokens."""
    text = " ".join(str(7919 * number % 1000) for number in range(num_tokens))
    _, end = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).encode(text).offsets[num_tokens - 1]
    return text[:end]


async def answer(stub: gateway_pb2_grpc.GatewayAsyncStub, prompt: str, max_tokens: int, times: Times) -> None:
    """Notes when the tokens of an answer come."""
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, top_p=1.0, repetition_penalty=1.0, ignore_eos=True)
    request = gateway_pb2.GatewayGenerateRequest(prompt=prompt, sampling=sampling)
    try:
        async for response in stub.Generate(request):
            times.at_s += [time.perf_counter()] * len(response.token_ids)
            if len(times.at_s) >= LEAD_TOKENS:
                times.begun.set()
    except grpc.aio.AioRpcError as error:
        times.error = f"{error.code().name}: {error.details()}"
        times.begun.set()


def resident_mib(pid: int) -> int:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 // MIB for line in lines if line.startswith("VmRSS:"))


def save_random(folder: Path) -> None:
    """Writes the checkpoint, 2.5 GB, with the demo target's tokenizer."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(7)
    hidden, inner, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_key_value_heads"] * 64

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, WEIGHT_STD, generator=generator)

    norm = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": weight(SHAPE["vocab_size"], hidden), "model.norm.weight": norm}
    linears = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": weight(*shape) for name, shape in linears.items()}
        tensors |= {f"{prefix}.{name}.weight": norm.clone() for name in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SHAPE))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(DEMO_TARGET / name, folder / name)


if __name__ == "__main__":
    main()

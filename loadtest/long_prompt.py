"""A long prompt beside streams on a model of random weights: `taskset -c 0 make bench NAME=long_prompt`.

The model has the shape of Llama-3.2-1B, with weights of 16 bits. A fleet without drafters serves streams; once they
run, a prompt comes whose steps would take tens of seconds if rows alone bounded them. The bench is met when the prompt
is answered, no stream breaks off, and no process is restarted. It prints the longest time between two tokens of a
stream while the prompt is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from loadtest.bench import MIB, bench_parser, report, run
from loadtest.fleet import bench_fleet
from loadtest.streams import Ask, Completion, GrpcDoor
from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.cluster.local import LocalFleet
from tools.procfs import resident_bytes
from tools.scrape import scrape

# Of meta-llama/Llama-3.2-1B.
SHAPE: dict[str, Any] = {
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
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Tokens that each stream has when the prompt comes.
LEAD_TOKENS, TOKENS = 4, "vllm:generation_tokens_total"
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


async def measure(options: argparse.Namespace) -> bool:
    """Runs the streams and the prompt; True when all of them were served."""
    async with AsyncExitStack() as stack:
        folder = options.checkpoint or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "llama-1b"
        if not folder.exists():
            save_random(folder)
        fleet = bench_fleet(model=folder, drafter=False, verifier_threads=options.threads, start_timeout_s=START_S)
        await stack.enter_async_context(fleet)
        return await _measured(options, fleet)


async def _measured(options: argparse.Namespace, fleet: LocalFleet) -> bool:
    door, origin_s = GrpcDoor(fleet.endpoint("gateway").second_address), time.perf_counter()
    streams = [Completion() for _ in range(options.streams)]
    tasks = [
        asyncio.create_task(door.ask(Ask(prompt=f"stream {number}", max_tokens=STREAM_TOKENS), origin_s, into=done))
        for number, done in enumerate(streams)
    ]
    async with asyncio.timeout(START_S):
        address = fleet.endpoint("verifier").second_address
        while (await scrape(address)).get(TOKENS, 0.0) < LEAD_TOKENS * len(streams):  # noqa: ASYNC110 - only polling shows it
            await asyncio.sleep(0.5)
    asked = Ask(prompt=prompt_of(options.prompt_tokens), max_tokens=4)
    prompt = await door.ask(asked, origin_s, timeout_s=options.timeout_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await door.close()
    gaps = [gap for each in streams for gap in gaps_s(each, prompt.started_s, prompt.ended_s)]
    errors = [each.message for each in (prompt, *streams) if each.error]
    restarts = fleet.restart_count("verifier-0")
    print(f"prompt of {options.prompt_tokens} tokens: {prompt.num_tokens} tokens after {prompt.e2e_s:.1f} s")
    print(f"streams: gap median {statistics.median(gaps):.2f} s, largest {max(gaps):.2f} s; errors: {errors}")
    return report(
        "long_prompt",
        prompt_tokens=options.prompt_tokens,
        prompt_s=round(prompt.e2e_s, 1),
        gap_p50_s=round(statistics.median(gaps), 3),
        gap_max_s=round(max(gaps), 3),
        stream_tokens=[each.num_tokens for each in streams],
        verifier_mib=resident_bytes(fleet.pid("verifier")) // MIB,
        restarts=restarts,
        errors=errors,
        ok=not errors and not restarts and prompt.num_tokens > 0,
    )


def gaps_s(stream: Completion, since_s: float, until_s: float) -> Sequence[float]:
    """Times between tokens of a stream that touch an interval."""
    times_s = [*(at_s for at_s, _ in stream.counts if at_s <= until_s), until_s]
    return [later - sooner for sooner, later in pairwise(times_s) if later > since_s]


def prompt_of(num_tokens: int) -> str:
    """A text of so many tokens."""
    text = " ".join(str(7919 * number % 1000) for number in range(num_tokens))
    _, end = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).encode(text).offsets[num_tokens - 1]
    return text[:end]


def save_random(folder: Path) -> None:
    """Writes the checkpoint, 2.5 GB, with the demo target's tokenizer."""
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(DEMO_TARGET / name, folder / name)


if __name__ == "__main__":
    main()

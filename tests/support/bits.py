"""Prints digests of what the demo pair computes by the instructions that the environment allows.

`python -m tests.support.bits --texts 200`; numba compiles for them, so one machine shows what several would compute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

MODELS = Path(__file__).parents[2] / "services" / "paceline" / "models"
NUM_PROMPTS, NUM_TOKENS = 20, 24


def digests(num_texts: int) -> dict[str, Any]:
    """Digests of logits and of as many texts, in bfloat16 and float32."""
    from tokenizers import Tokenizer

    from paceline.checkpoints.corpus import unseen_prompts
    from paceline.engine.backends.cpu import simd
    from paceline.engine.loading import load_decoder

    encode = Tokenizer.from_file(str(MODELS / "demo-target" / "tokenizer.json")).encode
    prompts = [encode(prompt).ids for prompt in unseen_prompts(NUM_PROMPTS)]
    found: dict[str, Any] = {"cpu": simd.CPU_NAME}
    for dtype in ("bfloat16", "float32"):
        decoders = {name: load_decoder(MODELS / name, dtype, "cpu", 1) for name in ("demo-target", "demo-drafter")}
        logits = [_logits(each, prompt) for each in decoders.values() for prompt in prompts]
        found[f"{dtype} logits"] = _digest(*logits)
        if num_texts:
            texts = _texts(prompts, num_texts, dtype)
            found[f"{dtype} texts"] = _digest(*(np.array(text) for text in texts))
            assert len(set(map(tuple, texts))) > num_texts // 2, "texts differ among themselves"
    return found


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _logits(decoder: Any, token_ids: list[int]) -> np.ndarray:
    from paceline.core.pages import BLOCK_SIZE, BlockPool, SessionPages
    from paceline.engine.packing import BatchBuilder, PrefixRows

    pages, builder = SessionPages(token_ids, BlockPool(0)), BatchBuilder()
    pages.blocks = list(range(-(-len(token_ids) // BLOCK_SIZE)))
    builder.add_prefixes([PrefixRows(pages, 0, len(token_ids))])
    batch = replace(builder.build(), logit_rows=np.arange(len(token_ids)))
    logits: np.ndarray = decoder.forward(batch, decoder.new_cache(len(pages.blocks))).numpy()
    return logits


def _texts(prompts: list[list[int]], count: int, dtype: str) -> list[list[int]]:
    """Half of them greedy, with drafts of the tier."""
    from paceline.core.params import SamplingParams
    from tests.support.engines import EnginePair

    pair = EnginePair(
        MODELS / "demo-target", MODELS / "demo-drafter", dtype=dtype, num_blocks=2048, num_draft_blocks=2048
    )
    for number in range(count):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8 * (number % 2), top_p=0.95, seed=number)
        pair.submit(str(number), prompts[number % len(prompts)][: 20 + number], sampling)
    pair.run()
    return [pair.sessions[str(number)].token_ids for number in range(count)]


def digests_with(environment: dict[str, str], num_texts: int) -> dict[str, Any]:
    """What a child prints under an environment, which it compiles for: a minute or two the first time."""
    command = [sys.executable, "-m", "tests.support.bits", "--texts", str(num_texts)]
    done = subprocess.run(
        command, env=os.environ | environment, check=True, capture_output=True, text=True, timeout=1200
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=200)
    sys.stdout.write(json.dumps(digests(parser.parse_args().texts)))

"""LoRA, and a prompt of 8,000 tokens out of the prefix cache: with drafts the texts are those without.

One server has both. Without its drafter it decodes plainly, so that it also says what is right.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.cluster.checkpoints import DEMO_DRAFTER
from tests.vllm.client import ACCEPTED, DRAFTED, ask, choices, client, metrics, until_drafted
from tests.vllm.servers import STEADY_PROPOSER, Drafter, Vllm, vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONTEXT, LONG = 9216, 8000
NUM_TOKENS = 64
LORA, RANK = "adapted", 8
DRAFTED_S = 120.0
CACHED = "vllm:prefix_cache_hits_total"


def lengthened(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint whose configuration allows the long prompt; what it says there is of no matter."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def adapter(target: Path, folder: Path) -> Path:
    """A LoRA adapter of random weights that changes what the target says."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    settings |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": str(target)}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    random = torch.Generator().manual_seed(1)
    weights = {}
    for name, weight in load_file(target / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            rows, columns = weight.shape
            base = f"base_model.model.{name.removesuffix('.weight')}"
            weights[f"{base}.lora_A.weight"] = torch.randn(RANK, columns, generator=random) * columns**-0.5
            weights[f"{base}.lora_B.weight"] = torch.randn(rows, RANK, generator=random) * 0.02
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def own_drafter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafter]:
    """Not started yet."""
    folder = tmp_path_factory.mktemp("long-drafter")
    drafter = Drafter(folder, lengthened(DEMO_DRAFTER, folder / "model"))
    yield drafter
    drafter.stop()


@pytest.fixture(scope="module")
def server(target: Path, own_drafter: Drafter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    folder = tmp_path_factory.mktemp("long")
    target = lengthened(target, folder / "model")
    more = ["--max-model-len", str(CONTEXT), "--enable-prefix-caching", "--enable-lora", "--max-lora-rank", str(RANK)]
    more += ["--lora-modules", f"{LORA}={adapter(target, folder / 'lora')}"]
    with vllm(target, folder, own_drafter.address, STEADY_PROPOSER, more) as started:
        yield started


@pytest.fixture
def undrafted(own_drafter: Drafter, server: Vllm) -> Iterator[Vllm]:
    yield server
    own_drafter.stop()


async def text_of(server: Vllm, prompt: Sequence[int], **settings: Any) -> list[int]:
    async with client() as http:
        (text,) = await choices(http, server.url, ask(prompt, NUM_TOKENS, **settings))
    return text


async def drafted_text_of(server: Vllm, prompt: Sequence[int], **settings: Any) -> list[int]:
    """A text of which some guesses were verified; a drafter has to read the prompt first."""
    deadline_s = time.monotonic() + DRAFTED_S
    while True:
        before = (await metrics(server.url))[DRAFTED]
        text = await text_of(server, prompt, **settings)
        if (await metrics(server.url))[DRAFTED] > before:
            return text
        assert time.monotonic() < deadline_s, "nothing was drafted"


async def test_with_an_adapter_texts_are_those_without_drafts(undrafted, own_drafter, prompts) -> None:
    base = await text_of(undrafted, prompts[0])
    adapted = [await text_of(undrafted, prompt, model=LORA) for prompt in prompts[:4]]
    assert adapted[0] != base
    own_drafter.start()
    await until_drafted(undrafted.url, prompts[-1])
    before = (await metrics(undrafted.url))[ACCEPTED]
    found = await asyncio.gather(*(drafted_text_of(undrafted, prompt, model=LORA) for prompt in prompts[:4]))
    assert found == adapted
    assert (await metrics(undrafted.url))[ACCEPTED] > before


async def test_a_prompt_of_8000_tokens_from_the_prefix_cache_is_drafted_for(undrafted, own_drafter, prompts) -> None:
    tokens = [token for prompt in prompts for token in prompt]
    prompt = (tokens * (LONG // len(tokens) + 1))[:LONG]
    expected = await text_of(undrafted, prompt)
    own_drafter.start()
    await until_drafted(undrafted.url, prompts[-1])
    before = (await metrics(undrafted.url))[CACHED]
    assert await drafted_text_of(undrafted, prompt) == expected
    assert (await metrics(undrafted.url))[CACHED] >= before + LONG - 100

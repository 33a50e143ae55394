"""What the fleet promises, shown on real processes and a real model: the same seed gives the same tokens, always."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import torch
from loadtest.client import run_batch
from loadtest.streams import Ask
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.checkpoints import DEMO_TARGET
from tests.fleet.client import Sampled, sample, sample_all
from tests.support.fleet_runner import FleetRunner

NUM_PROMPTS = 16
NUM_TOKENS = 96
PLAIN = {"enabled": False}
EITHER_FLEET = pytest.mark.parametrize("fleet_name", ["trees", pytest.param("chains", marks=pytest.mark.full)])


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return unseen_prompts(NUM_PROMPTS)


@pytest.fixture(scope="module")
def oracle(prompts) -> list[str]:
    """Greedy text of transformers' own `generate`, float32; prompts side by side give what each gives alone."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        out = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0)
    torch.set_num_threads(threads)
    return tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def texts_of(url: str, asks: list[Ask], concurrency: int) -> list[str]:
    return [each.text for each in asyncio.run(run_batch(url, asks, concurrency, "texts")).completions]


@pytest.mark.parametrize("speculation", [None, PLAIN], ids=["speculative", "plain"])
def test_greedy_text_is_that_of_generate(trees, prompts, oracle, speculation):
    asks = [Ask(prompt=prompt, max_tokens=NUM_TOKENS, speculation=speculation) for prompt in prompts]
    assert texts_of(trees.url, asks, 8) == oracle


@pytest.mark.full
def test_greedy_text_is_that_of_generate_with_fixed_chains(chains, prompts, oracle):
    asks = [Ask(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    assert texts_of(chains.url, asks, 8) == oracle


@pytest.fixture(scope="module")
def sampled_plainly(trees, prompts) -> list[list[int]]:
    """Sampled tokens without speculation, one session at a time."""
    return sample_all(trees, [Sampled(prompt=prompt, seed=seed) for seed, prompt in enumerate(prompts)], 1)


@EITHER_FLEET
# One session at a time takes its time; what gamma alone could change, a batch shows as well.
@pytest.mark.parametrize(
    ("gamma", "concurrency"),
    [(4, 16), *(pytest.param(*each, marks=pytest.mark.full) for each in ((0, 16), (1, 16), (8, 16), (4, 1)))],
)
def test_gamma_tree_shape_and_batch_change_no_sampled_token(
    request, prompts, sampled_plainly, fleet_name, gamma, concurrency
):
    runner = request.getfixturevalue(fleet_name)
    asks = [Sampled(prompt=prompt, seed=seed, gamma=gamma) for seed, prompt in enumerate(prompts)]
    assert sample_all(runner, asks, concurrency) == sampled_plainly


@EITHER_FLEET
def test_a_drafter_killed_in_mid_stream_and_restarted_changes_no_token(request, prompts, sampled_plainly, fleet_name):
    runner = request.getfixturevalue(fleet_name)
    restarts = runner.fleet.restart_count("drafter")

    async def story() -> list[list[int]]:
        pieces_seen = asyncio.Event()
        asks = [Sampled(prompt=prompt, seed=seed, gamma=8) for seed, prompt in enumerate(prompts)]
        tasks = [asyncio.create_task(sample(runner, ask, on_piece=pieces_seen.set)) for ask in asks]
        await pieces_seen.wait()
        runner.fleet.kill("drafter")
        return await asyncio.gather(*tasks)

    assert asyncio.run(story()) == sampled_plainly
    runner.call(runner.fleet.until_restarted("drafter", restarts + 1), 60)
    asks = [Sampled(prompt=prompt, seed=seed, gamma=8) for seed, prompt in enumerate(prompts)]
    assert sample_all(runner, asks, 16) == sampled_plainly


def fallbacks(runner: FleetRunner, reason: str) -> float:
    """How often the verifier says it went on without its drafter."""
    page = httpx.get(f"http://{runner.fleet.endpoint('verifier').second_address}/metrics", trust_env=False).text
    for line in page.splitlines():
        if line.startswith(f'paceline:fallbacks_total{{reason="{reason}"}}'):
            return float(line.rpartition(" ")[2])
    return 0.0


@pytest.mark.full
def test_a_stopped_drafter_costs_no_token_and_is_not_waited_for_step_after_step(trees, prompts):
    """SIGSTOP for 5 s. What it does to the time between tokens is measured by the bench `stall`."""
    plain = [Ask(prompt=prompt, max_tokens=800, speculation=PLAIN) for prompt in prompts[:2]]
    quiet = texts_of(trees.url, plain, 2)
    before = fallbacks(trees, "drafter_silent")

    async def story() -> list[str]:
        drafted = [Ask(prompt=prompt, max_tokens=800) for prompt in prompts[:2]]
        task = asyncio.create_task(run_batch(trees.url, drafted, 2, "drafter stopped"))
        trees.fleet.pause("drafter")
        try:
            await asyncio.wait({task}, timeout=5)
        finally:
            trees.fleet.resume("drafter")
        return [each.text for each in (await task).completions]

    assert asyncio.run(story()) == quiet
    # Without blame for silence each of the 1,600 tokens would have been waited for.
    assert fallbacks(trees, "drafter_silent") - before <= 80

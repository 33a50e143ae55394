"""The heads that ship with the demo target: what was trained is what is served, and it is of use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_EAGLE3, DEMO_MEDUSA, DEMO_TARGET
from paceline.core.draft_policy import FixedGamma
from paceline.core.pages import BLOCK_SIZE
from paceline.core.params import MEDUSA, SamplingParams, SpeculationParams
from paceline.engine.eagle3 import load_eagle3, load_fusion
from paceline.engine.loading import load_decoder
from paceline.engine.medusa_heads import MedusaHeads
from tests.support.engines import EnginePair
from tests.unit.engine.tiny_models import NUM_BLOCKS, SCRATCH, TABLE, branch, chain, pack
from training.acceptance import load_drafter
from training.models import load_model, load_tokenizer

MOST_BYTES = 6_000_000
LENGTH = 40


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(DEMO_TARGET)
    return [tokenizer.encode(prompt).ids[:64] for prompt in unseen_prompts(6, seed=3)]


@pytest.fixture(scope="module")
def target():
    return load_model(DEMO_TARGET)


def streams(target, ids) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return tuple(stream[0] for stream in target(torch.tensor([ids]), output_hidden_states=True).hidden_states)


@pytest.mark.parametrize("folder", [DEMO_MEDUSA, DEMO_EAGLE3], ids=["medusa", "eagle3"])
def test_heads_are_small(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) < MOST_BYTES


def test_the_eagle3_head_says_in_service_what_it_said_in_training(target, prompts):
    ids = prompts[0][:LENGTH]
    trained = load_drafter(DEMO_EAGLE3, target)
    hidden = streams(target, ids)
    states = torch.cat([hidden[-1], *(hidden[layer + 1] for layer in trained.taps)], dim=-1)
    with torch.no_grad():
        first, second = (each.states[0] @ each.head.T for each in trained.chain(torch.tensor([ids]), states[None], 2))
    decoder = load_eagle3(DEMO_EAGLE3, DEMO_TARGET, "float32", "cpu")
    features = load_fusion(DEMO_EAGLE3, load_decoder(DEMO_TARGET, "float32", "cpu")).states(
        dict(enumerate(hidden)), hidden[-1]
    )
    cache = decoder.new_cache(NUM_BLOCKS)
    rows = LENGTH - 2
    known = pack(chain(ids[1 : rows + 1]), [TABLE])
    served = decoder.forward(replace(known, features=features[:rows].numpy()), cache)
    torch.testing.assert_close(served[:, trained.draft_ids], first[:rows], atol=2e-3, rtol=2e-3)
    own = cache.states[TABLE[(rows - 1) // BLOCK_SIZE] * BLOCK_SIZE + (rows - 1) % BLOCK_SIZE]
    drafted = replace(pack(branch(ids[-1:], rows, SCRATCH[:1]), [TABLE]), features=own[None].numpy())
    torch.testing.assert_close(
        decoder.forward(drafted, cache)[:, trained.draft_ids], second[rows - 1 : rows], atol=2e-3, rtol=2e-3
    )


def test_the_medusa_heads_say_in_service_what_they_said_in_training(target, prompts):
    ids = prompts[0][:LENGTH]
    trained = load_drafter(DEMO_MEDUSA, target)
    final = streams(target, ids)[-1]
    with torch.no_grad():
        expected = [each.states[0] @ each.head.T for each in trained.chain(torch.tensor([ids]), final[None], 4)]
    served = MedusaHeads.load(DEMO_MEDUSA, load_decoder(DEMO_TARGET, "float32", "cpu"))(final, len(expected))
    for head, rows in enumerate(expected):
        torch.testing.assert_close(served[head][: len(rows)], rows, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("method", ["eagle3", MEDUSA])
def test_heads_are_accepted_and_change_no_token(method, prompts):
    pairs = {
        "eagle3": {"eagle3_model": DEMO_EAGLE3},
        MEDUSA: {"methods": (MEDUSA,), "medusa_model": DEMO_MEDUSA},
    }
    sampling = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    texts, accepted, rounds = [], 0, 0
    for speculation in (SpeculationParams(enabled=False), SpeculationParams(method=method)):
        pair = EnginePair(DEMO_TARGET, DEMO_DRAFTER, policy=FixedGamma(gamma=4), **pairs[method])
        if method == MEDUSA:
            pair.kill_drafter()
        for index, prompt in enumerate(prompts):
            pair.submit(f"s{index}", prompt, sampling, speculation)
        pair.run(draft_steps=6)
        texts.append([generated.token_ids for generated in pair.sessions.values()])
        for generated in pair.sessions.values():
            accepted += generated.result.speculation.num_accepted_draft_tokens
            rounds += generated.result.speculation.num_spec_steps
    assert texts[0] == texts[1]
    assert accepted / rounds > (0.3 if method == MEDUSA else 0.8), "what ships is of use"

"""The rejection rule on real (tiny) engines; its proof is tests/contract/test_served_rules.py."""

from __future__ import annotations

import random

import pytest

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.params import NGRAM, REJECTION, SamplingParams, SpeculationParams
from tests.support.engines import EnginePair

GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=5, ignore_eos=True)
PROMPT = [random.Random(3).randrange(250) for _ in range(30)]


def engines(folders, **settings) -> EnginePair:
    return EnginePair(*folders, **{"policy": FixedGamma(gamma=4), **settings})


def run(pair: EnginePair, sampling: SamplingParams, name: str = "s", **speculation):
    pair.submit(name, PROMPT, sampling, SpeculationParams(acceptance=REJECTION, **speculation))
    pair.run()
    return pair.sessions[name]


@pytest.fixture(scope="module")
def plain(tiny_pair) -> list[int]:
    return run(engines(tiny_pair), GREEDY, enabled=False).token_ids


@pytest.mark.parametrize("policy", [FixedGamma(gamma=1), FixedGamma(gamma=6), Goodput()], ids=["1", "6", "goodput"])
def test_at_temperature_0_it_gives_the_greedy_text(tiny_pair, plain, policy):
    session = run(engines(tiny_pair, policy=policy, methods=(NGRAM,)), GREEDY)
    assert session.token_ids == plain
    # What pays is measured.
    assert session.result.speculation.num_accepted_draft_tokens or not isinstance(policy, FixedGamma)


def test_only_the_drafter_tier_feeds_a_chain(tiny_pair):
    pair = engines(tiny_pair, methods=(NGRAM,))
    pair.kill_drafter()
    assert run(pair, SAMPLED).result.speculation.num_draft_tokens == 0

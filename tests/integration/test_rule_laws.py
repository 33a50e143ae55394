"""Engines of the demo pair commit tokens of the target's law: chi-square tests against transformers' own logits.

Seeds are fixed, so each test gives the same counts every time; a p-value below 1e-6 fails.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.core.draft_policy import FixedGamma
from paceline.core.params import COUPLED, REJECTION, SamplingParams, SpeculationParams
from tests.support.engines import EnginePair
from tests.support.reference_sampling import RowHistory, process

PROMPT_LEN = 17
NUM_SESSIONS = 256
LENGTH = 3
LEAST_EXPECTED = 5.0
DETECTED = 1e-6
Law = dict[tuple[int, ...], float]


def sampling(temperature: float, seed: int = 0) -> SamplingParams:
    """Drafts are verified for the second to the fourth token; the first three are counted."""
    return SamplingParams(
        max_tokens=LENGTH + 1,
        temperature=temperature,
        top_k=8,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        seed=seed,
        ignore_eos=True,
    )


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    text = "def read_lines(path):\n    with open(path) as handle:\n        return"
    ids: list[int] = tokenizer.encode(text).ids
    return ids[:PROMPT_LEN]


@pytest.fixture(scope="module")
def exact(prompt: list[int]) -> Callable[[float], Law]:
    """The law of the first tokens, by temperature."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32).eval()

    def rows(paths: Sequence[tuple[int, ...]]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([[*prompt, *path] for path in paths])).logits[:, -1].numpy()

    def law_of(temperature: float) -> Law:
        law: Law = {(): 1.0}
        for _ in range(LENGTH):
            longer: Law = {}
            for path, row in zip(law, rows(list(law)), strict=True):
                weights = process(
                    row, sampling(temperature), RowHistory(prompt_token_ids=prompt, output_token_ids=path)
                )
                probs = np.exp(weights - weights.max())
                for token_id in np.flatnonzero(probs):
                    longer[(*path, int(token_id))] = law[path] * float(probs[token_id] / probs.sum())
            law = longer
        return law

    return law_of


@pytest.fixture(scope="module")
def pair() -> EnginePair:
    return EnginePair(DEMO_TARGET, DEMO_DRAFTER, policy=FixedGamma(gamma=2))


names = itertools.count()


def counts(pair: EnginePair, prompt: list[int], rule: str, temperature: float, *, dies: bool = False) -> Counter:
    """First tokens of many sessions, one seed each."""
    sessions = [f"s{next(names)}" for _ in range(NUM_SESSIONS)]
    for seed, name in enumerate(sessions):
        pair.submit(name, prompt, sampling(temperature, seed), SpeculationParams(acceptance=rule))
    # Sessions come to run one after the other, so the drafter dies in the middle of many of them.
    while dies and pair.target.has_work():
        for _ in range(5):
            pair.round()
        pair.kill_drafter()
        pair.round()
        pair.start_drafter()
    pair.run()
    records = [pair.sessions[name].result.speculation for name in sessions]
    assert sum(record.num_accepted_draft_tokens for record in records) > NUM_SESSIONS / 8
    return Counter(tuple(pair.sessions[name].token_ids[:LENGTH]) for name in sessions)


def p_value(found: Counter, law: Law) -> float:
    """Of Pearson's chi-square; what is expected too rarely shares a bin."""
    assert found.keys() <= law.keys(), "a token that the target rules out"
    total = sum(found.values())
    bins: list[tuple[float, int]] = []
    rare_expected, rare_found = 0.0, 0
    for outcome, probability in law.items():
        if total * probability >= LEAST_EXPECTED:
            bins.append((total * probability, found[outcome]))
        else:
            rare_expected, rare_found = rare_expected + total * probability, rare_found + found[outcome]
    if rare_expected > 0.0:
        bins.append((rare_expected, rare_found))
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in bins)
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("temperature", [pytest.param(0.7, marks=pytest.mark.full), 1.3])
@pytest.mark.parametrize("rule", [COUPLED, REJECTION])
def test_tokens_have_the_law_of_the_target(pair, prompt, exact, rule, temperature):
    assert p_value(counts(pair, prompt, rule, temperature), exact(temperature)) > DETECTED


@pytest.mark.full
def test_so_they_have_when_drafters_die_in_mid_chain(pair, prompt, exact):
    assert p_value(counts(pair, prompt, REJECTION, 1.3, dies=True), exact(1.3)) > DETECTED

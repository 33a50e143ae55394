"""Proof that the coupled rule commits the target's law, and, for every noise, plain decoding's tokens.

Draft and target token of one position are two winners of one race: with E_v exponential, the draft's is
argmin E_v / draft_v, the target's argmin E_v / target_v (Gumbel-max: noise = -log E). `race_law` integrates
their joint law in closed form; laws of whole runs are exact sums over it, compared to 1e-12. The stronger
statement needs no law at all: for every value of the noise, and every tree, the committed tokens are those of
decoding without drafts.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.laws import coupled_choice, coupled_match_prob
from tests.support.reference_sampling import gumbel
from tests.unit.core.toy_models import (
    SHAPES,
    FloatArray,
    Law,
    Model,
    Tokens,
    laws,
    normalised,
    race_law,
    random_model,
    total_variation,
)

law_pairs = st.integers(2, 5).flatmap(lambda vocab: st.tuples(laws(vocab), laws(vocab)))


@given(law_pairs)
def test_coupled_tokens_have_the_laws_of_draft_and_target(pair: tuple[FloatArray, FloatArray]) -> None:
    draft, target = pair
    joint = race_law(draft, target)
    np.testing.assert_allclose(joint.sum(axis=1), draft, atol=1e-12)
    np.testing.assert_allclose(joint.sum(axis=0), target, atol=1e-12)


@given(law_pairs)
def test_coupled_acceptance_is_the_formula_and_within_its_bounds(pair: tuple[FloatArray, FloatArray]) -> None:
    """The coupled rule's acceptance, and the bounds of 2408.07978."""
    draft, target = pair
    match = coupled_match_prob(target, draft)
    distance = 0.5 * float(np.abs(target - draft).sum())
    assert match == pytest.approx(float(np.trace(race_law(draft, target))), abs=1e-12)
    assert (1.0 - distance) / (1.0 + distance) - 1e-12 <= match <= 1.0 - distance + 1e-12


def coupled_chain_law(gamma: int, target: Model, draft: Model) -> tuple[Law, float]:
    """Exact law of the run a chain of coupled drafts commits, and the expected number accepted."""
    law: Law = defaultdict(float)
    alive: Law = {(): 1.0}
    accepted = 0.0
    for _ in range(gamma):
        survivors: Law = defaultdict(float)
        for prefix, prob in alive.items():
            joint = race_law(draft[prefix], target[prefix])
            for guess, token in itertools.product(range(len(joint)), repeat=2):
                into = survivors if guess == token else law
                into[(*prefix, token)] += prob * float(joint[guess, token])
        accepted += sum(survivors.values())
        alive = survivors
    for prefix, prob in alive.items():
        for token, next_prob in enumerate(target[prefix]):
            law[(*prefix, token)] += prob * float(next_prob)
    return law, accepted


@pytest.mark.parametrize(("vocab", "gamma"), SHAPES)
def test_coupled_chains_commit_the_law_of_the_target(vocab: int, gamma: int) -> None:
    rng = np.random.default_rng(7 * vocab + gamma)
    target, draft = random_model(rng, vocab, gamma), random_model(rng, vocab, gamma - 1)
    law, accepted = coupled_chain_law(gamma, target, draft)
    assert total_variation(law, target, gamma + 1) < 1e-12
    reached: Law = {(): 1.0}
    expected = 0.0
    for _ in range(gamma):
        step: Law = defaultdict(float)
        for prefix, prob in reached.items():
            expected += prob * coupled_match_prob(target[prefix], draft[prefix])
            for token, both in enumerate(np.diag(race_law(draft[prefix], target[prefix]))):
                step[(*prefix, token)] += prob * float(both)
        reached = step
    assert accepted == pytest.approx(expected, abs=1e-12)


def test_the_code_draws_pairs_with_the_closed_joint_law() -> None:
    """One fixed seed, 20,000 positions' worth of noise: every count within five standard deviations."""
    draft, target = normalised([4, 3, 2, 1]), normalised([2, 5, 0, 3])
    noise = gumbel(2024, 0, np.arange(80_000)).reshape(-1, 4)
    with np.errstate(divide="ignore"):
        log_draft, log_target = np.log(draft), np.log(target)
    counts = np.zeros((4, 4))
    for field in noise:
        counts[coupled_choice(log_draft, field), coupled_choice(log_target, field)] += 1
    expected = race_law(draft, target) * len(noise)
    assert np.all(np.abs(counts - expected) <= 5.0 * np.sqrt(expected))


@given(law_pairs, st.data())
def test_the_coupled_choice_is_the_winner_of_the_race(pair: tuple[FloatArray, FloatArray], data: st.DataObject) -> None:
    probs = pair[0]
    clocks = data.draw(st.lists(st.floats(0.01, 20.0), min_size=len(probs), max_size=len(probs), unique=True))
    with np.errstate(divide="ignore"):
        arrivals = np.array(clocks) / probs
        chosen = coupled_choice(np.log(probs), -np.log(clocks))
    assert arrivals[chosen] <= arrivals.min() * (1.0 + 1e-12)


def test_the_coupled_choice_takes_the_lowest_id_among_equals_and_is_greedy_without_noise() -> None:
    assert coupled_choice(np.array([0.0, 2.0, 2.0]), None) == 1
    assert coupled_choice(np.array([0.0, 1.0, 2.0]), np.array([2.0, 1.0, 0.0])) == 0
    assert coupled_choice(np.array([-math.inf, -5.0]), np.array([20.0, -3.0])) == 1


class Tree:
    """Any guesses at all: a node is a path of tokens behind the root, closed under prefixes."""

    def __init__(self, paths: Sequence[Tokens]) -> None:
        self.nodes = {path[:length] for path in paths for length in range(1, len(path) + 1)}

    def committed(self, choose: Callable[[Tokens], int], prefix: Tokens) -> Tokens:
        """Walks while the target's token is among the children; commits every target token met."""
        run: Tokens = ()
        while True:
            run = (*run, choose((*prefix, *run)))
            if run not in self.nodes:
                return run


VOCAB, LENGTH = 4, 6
scores = st.one_of(st.floats(-3.0, 3.0), st.integers(-1, 1).map(float), st.just(-math.inf))
paths = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple)
trees = st.lists(paths, max_size=8).map(Tree)


@settings(deadline=None, max_examples=50)
@given(st.data(), st.lists(trees, min_size=LENGTH, max_size=LENGTH), st.booleans())
def test_coupled_tokens_are_those_of_plain_decoding_for_every_noise_and_every_tree(
    data: st.DataObject, drafted: list[Tree], with_target_tokens: bool
) -> None:
    """Pathwise: any noise, any target, any tree, even one that has seen the target's tokens."""
    field = st.lists(st.floats(-3.0, 20.0), min_size=VOCAB, max_size=VOCAB).map(np.array)
    noise = [data.draw(field) for _ in range(LENGTH + 4)]
    rows: dict[Tokens, FloatArray] = {}

    def choose(prefix: Tokens) -> int:
        if prefix not in rows:
            row = st.lists(scores, min_size=VOCAB, max_size=VOCAB).filter(lambda row: max(row) > -math.inf)
            rows[prefix] = np.array(data.draw(row))
        return coupled_choice(rows[prefix], noise[len(prefix)])

    plain: Tokens = ()
    while len(plain) < LENGTH + 3:
        plain = (*plain, choose(plain))
    tokens: Tokens = ()
    while len(tokens) < LENGTH:
        tree = drafted[len(tokens)]
        if with_target_tokens:
            tree.nodes.add(plain[len(tokens) : len(tokens) + 1])
        tokens = (*tokens, *tree.committed(choose, tokens))
    assert tokens[:LENGTH] == plain[:LENGTH]

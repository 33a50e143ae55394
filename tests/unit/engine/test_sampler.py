"""The compiled sampler chooses the very token of the numpy reference, for any request and any row."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.core.errors import LocalProtocolError
from paceline.core.noise import BLOCK, exact_exp
from paceline.core.params import SamplingParams
from paceline.core.processors import Truncation, UnusableLogitsError
from paceline.engine.backends.cpu import noise_kernels, row_kernels
from paceline.engine.sampler import RowSampler
from tests.support.laws import coupled_choice
from tests.support.reference_sampling import (
    RowHistory,
    exponential,
    gumbel,
    in_units,
    mass_of_all,
    masses_of,
    noise_words,
    process,
)
from tests.support.rounds import choose

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row with everything that decides its token."""

    params: SamplingParams
    logits: Logits
    history: RowHistory
    position: int

    def sampler(self) -> RowSampler:
        return RowSampler(
            self.params,
            len(self.logits),
            tuple(self.history.eos_token_ids),
            self.history.prompt_token_ids,
            self.history.output_token_ids,
        )

    def perturbed(self, path: tuple[int, ...] = ()) -> npt.NDArray[np.float64]:
        """Scores of the reference, noise included unless greedy."""
        outputs = (*self.history.output_token_ids, *path)
        history = RowHistory(
            prompt_token_ids=self.history.prompt_token_ids,
            output_token_ids=outputs,
            eos_token_ids=self.history.eos_token_ids,
        )
        weights = process(self.logits, self.params, history)
        if self.params.temperature < 1e-5:
            return weights
        return weights + gumbel(self.params.seed, self.position, np.arange(len(weights)))


def off_or(off: Any, strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(off), strategy)


@st.composite
def logit_rows(draw: st.DrawFn, vocab: int) -> Logits:
    """Rows of all shapes: peaked, flat, on a coarse grid (many ties), all equal, partly masked."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = rng.standard_normal(vocab) * draw(st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]))
    if draw(st.booleans()):
        row = np.round(row)
    if draw(st.booleans()):
        row[rng.integers(vocab, size=3)] += 15.0
    if draw(st.booleans()):
        row[rng.random(vocab) < 0.3] = -np.inf
        row[rng.integers(vocab, size=5)] = rng.standard_normal(5)
    return row.astype(np.float32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    vocab = draw(st.one_of(st.integers(1, 40), st.integers(100, 700)))
    ids = st.integers(0, vocab - 1)
    params = SamplingParams(
        max_tokens=50,
        temperature=draw(st.one_of(st.sampled_from([0.0, 0.01, 1.0, 100.0]), st.floats(0.1, 3.0))),
        top_p=draw(off_or(1.0, st.floats(1e-6, 1.0))),
        top_k=draw(off_or(0, st.integers(1, vocab + 1))),
        min_p=draw(off_or(0.0, st.floats(0.0, 1.0))),
        repetition_penalty=draw(off_or(1.0, st.floats(0.3, 3.0))),
        presence_penalty=draw(off_or(0.0, st.floats(-2.0, 2.0))),
        frequency_penalty=draw(off_or(0.0, st.floats(-2.0, 2.0))),
        logit_bias=tuple(draw(st.lists(st.tuples(ids, st.floats(-5.0, 5.0)), max_size=4))),
        min_tokens=draw(st.integers(0, 3)) if vocab > 3 else 0,
        stop_token_ids=tuple(draw(st.lists(ids, max_size=2))),
        bad_words=tuple(draw(off_or((), st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4)))),
        allowed_token_ids=tuple(draw(off_or((), st.lists(ids, min_size=1, max_size=vocab)))),
        seed=draw(st.integers(0, 2**64 - 1)),
    )
    history = RowHistory(
        prompt_token_ids=tuple(draw(st.lists(ids, max_size=6))),
        output_token_ids=tuple(draw(st.lists(ids, max_size=6))),
        eos_token_ids=(vocab - 1,),
    )
    position = draw(st.one_of(st.integers(0, 5000), st.integers(0, 2**40)))
    return Case(params=params, logits=draw(logit_rows(vocab)), history=history, position=position)


def plain(logits: Logits, position: int = 5, **fields: Any) -> Case:
    params = SamplingParams(max_tokens=50, **fields)
    return Case(params=params, logits=logits, history=RowHistory(), position=position)


def law(sampler: RowSampler, logits: Logits, path: tuple[int, ...] = ()) -> npt.NDArray[np.float64]:
    """What is chosen behind a path."""
    row = logits.copy()
    sampler.change(row, path)
    return sampler.probabilities(row)


def usable(case: Case) -> bool:
    """Masks may leave nothing; that is another test's matter."""
    try:
        case.perturbed()
    except UnusableLogitsError:
        return False
    return True


@settings(deadline=None, max_examples=400)
@given(cases().filter(usable))
def test_the_token_is_that_of_the_reference(case: Case) -> None:
    before = case.logits.copy()
    assert choose(case.sampler(), case.logits, case.position) == coupled_choice(case.perturbed(), None)
    np.testing.assert_array_equal(case.logits, before)


@settings(deadline=None, max_examples=200)
@given(cases().filter(usable), st.integers(1, 9), st.data())
def test_a_ranking_is_the_order_of_the_reference_scores_with_the_path_as_history(
    case: Case, count: int, data: st.DataObject
) -> None:
    path = tuple(data.draw(st.lists(st.integers(0, len(case.logits) - 1), max_size=3)))
    history = replace(case.history, output_token_ids=(*case.history.output_token_ids, *path))
    assume(usable(replace(case, history=history)))
    scores = case.perturbed(path)
    order = [int(i) for i in np.argsort(-scores, kind="stable") if scores[i] > -np.inf][:count]
    sampler = case.sampler()
    token_ids, weights = sampler.rank(case.logits, case.position, count, path)
    assert token_ids == order
    np.testing.assert_allclose(weights, np.exp(scores - scores.max())[order], rtol=1e-12)
    assert choose(sampler, case.logits, case.position) == coupled_choice(case.perturbed(), None)


@settings(deadline=None, max_examples=200)
@given(cases().filter(usable), st.data())
def test_law_and_choice_behind_a_path_are_those_of_the_reference(case: Case, data: st.DataObject) -> None:
    path = tuple(data.draw(st.lists(st.integers(0, len(case.logits) - 1), max_size=3)))
    history = replace(case.history, output_token_ids=(*case.history.output_token_ids, *path))
    assume(usable(replace(case, history=history)))
    weights = process(case.logits, case.params, history)
    if case.params.temperature < 1e-5:
        expected = (np.arange(len(weights)) == np.argmax(weights)).astype(float)
    else:
        expected = np.exp(weights - weights.max())
    sampler = case.sampler()
    np.testing.assert_allclose(law(sampler, case.logits, path), expected / expected.sum(), rtol=1e-12, atol=1e-300)
    assert choose(sampler, case.logits, case.position, path) == coupled_choice(case.perturbed(path), None)
    assert choose(sampler, case.logits, case.position) == coupled_choice(case.perturbed(), None)


@settings(deadline=None)
@given(cases().filter(usable), st.data())
def test_pushing_tokens_one_by_one_equals_starting_with_them(case: Case, data: st.DataObject) -> None:
    more = data.draw(st.lists(st.integers(0, len(case.logits) - 1), max_size=100))
    pushed = case.sampler()
    for token_id in more:
        pushed.push(token_id)
    started = RowSampler(
        case.params,
        len(case.logits),
        tuple(case.history.eos_token_ids),
        case.history.prompt_token_ids,
        (*case.history.output_token_ids, *more),
    )
    assert choose(pushed, case.logits, case.position) == choose(started, case.logits, case.position)


@settings(deadline=None)
@given(cases().filter(usable), st.integers(0, 8))
def test_log_probabilities_are_those_of_the_raw_logits(case: Case, count: int) -> None:
    logits = case.logits.astype(np.float64)
    exact = logits - logits.max()
    exact -= math.log(np.exp(exact).sum())
    token_id = int(np.argmax(logits))
    found = case.sampler().logprobs(case.logits, token_id, count)
    order = [int(i) for i in np.argsort(-logits, kind="stable") if logits[i] > -np.inf][:count]
    assert (found.token_id, [token for token, _ in found.top]) == (token_id, order)
    assert found.logprob == pytest.approx(exact[token_id], abs=1e-12)
    np.testing.assert_allclose([logprob for _, logprob in found.top], exact[order], atol=1e-12)


def test_an_improbable_token_wins_when_its_noise_is_large_enough() -> None:
    """Chunks far below the best may be skipped only where no noise could lift them."""
    noise = gumbel(5, 5, np.arange(400_000))
    lucky, usual = int(np.argmax(noise)), 10
    assert noise[lucky] > 15.0
    row = np.full(400_000, -40.0, dtype=np.float32)
    row[lucky] = 0.0
    row[usual] = noise[lucky] - noise[usual] - 0.01
    assert choose(plain(row, seed=5).sampler(), row, 5) == lucky
    row[usual] += np.float32(0.02)
    assert choose(plain(row, seed=5).sampler(), row, 5) == usual


def test_where_logits_swallow_the_noise_the_lowest_id_wins() -> None:
    row = np.array([0.0, 1e30, 1e30, 1e30], dtype=np.float32)
    assert {choose(plain(row, seed=seed).sampler(), row, 5) for seed in range(20)} == {1}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 77, 299])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
def test_unusable_logits_are_refused_and_the_next_row_works(bad: float, place: int, fields: dict[str, Any]) -> None:
    row = np.zeros(300, dtype=np.float32)
    sampler = plain(row, **fields).sampler()
    expected = choose(sampler, row, 3)
    spoiled = row.copy()
    spoiled[place] = bad
    for call in (
        lambda: choose(sampler, spoiled, 3),
        lambda: sampler.rank(spoiled, 3, 2),
        lambda: sampler.logprobs(spoiled, 0, 1),
    ):
        with pytest.raises(UnusableLogitsError):
            call()
    assert choose(sampler, row, 3) == expected


def test_a_row_with_every_token_masked_is_refused() -> None:
    row = np.full(10, -np.inf, dtype=np.float32)
    with pytest.raises(UnusableLogitsError, match="every token is masked"):
        choose(plain(row).sampler(), row, 0)
    with pytest.raises(UnusableLogitsError, match="every token is masked"):
        choose(plain(row, temperature=0.0).sampler(), row, 0)


@pytest.mark.parametrize("row", [np.zeros(9, np.float32), np.zeros(10), np.zeros((1, 10), np.float32)])
def test_a_row_of_another_shape_or_type_is_refused(row: Any) -> None:
    sampler = plain(np.zeros(10, np.float32)).sampler()
    with pytest.raises(LocalProtocolError, match="a row must hold 10 float32 logits"):
        sampler.rank(row, 0, 1)


def test_ids_outside_the_vocabulary_never_reach_a_compiled_loop() -> None:
    row = np.zeros(10, np.float32)
    with pytest.raises(LocalProtocolError, match="token id 10 is outside"):
        plain(row, logit_bias=((10, 1.0),)).sampler()
    with pytest.raises(LocalProtocolError, match="token id 12 is outside"):
        RowSampler(SamplingParams(max_tokens=5, min_tokens=1), 10, (12,), ())
    penalised = plain(row, presence_penalty=1.0).sampler()
    expected = penalised.rank(row, 0, 3)
    with pytest.raises(LocalProtocolError, match="token id -1 is outside"):
        penalised.push(-1)
    with pytest.raises(LocalProtocolError, match="token id 99 is outside"):
        penalised.rank(row, 0, 3, (4, 99))
    assert penalised.rank(row, 0, 3) == expected


def test_threads_do_not_share_working_space() -> None:
    rng = np.random.default_rng(3)
    rows = [(rng.standard_normal(4096) * 3).astype(np.float32) for _ in range(8)]
    fields: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.1}
    alone = [[choose(plain(row, **fields).sampler(), row, i) for i in range(40)] for row in rows]

    def run(row: Logits) -> list[int]:
        sampler = plain(row, **fields).sampler()
        return [choose(sampler, row, i) for i in range(40)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, rows)) == alone


def test_the_compiled_arithmetic_gives_the_bits_of_the_reference() -> None:
    words = noise_words(5, 6, np.arange(4000))
    drawn = exponential(words)
    assert [noise_kernels.exponential(word) for word in words] == drawn.tolist()
    assert [row_kernels.exact_exp(-ratio) for ratio in drawn] == exact_exp(-drawn).tolist()
    key, position = (np.uint64(3), np.uint64(1)), (np.uint64(6), np.uint64(0))
    firsts, places = np.empty(40), np.empty(40, np.int64)
    noise_kernels._fill_blocks(position, key, firsts, places)
    scratch, noises = np.empty(BLOCK, np.uint64), np.empty(BLOCK)
    for block in range(40):
        noise_kernels._fill_arrivals(block, position, key, firsts[block], places[block], scratch, noises)
        expected = gumbel(3 + 2**32, 6, np.arange(block * BLOCK, (block + 1) * BLOCK))
        np.testing.assert_array_equal(noises, expected)
    logits = -20.0 * drawn.astype(np.float32)
    shares = masses_of(logits, np.float32(0.0), Truncation.of(SamplingParams(max_tokens=1, temperature=0.7)))
    scale = np.float32(1.0 / 0.7)
    masses = [row_kernels._mass_of(logit, np.float32(0.0), scale) for logit in logits]
    assert masses == in_units(shares).tolist()
    assert row_kernels._mass_of_all(logits, np.float32(0.0), scale, np.float32(-3e38)) == mass_of_all(shares)


@pytest.mark.parametrize("fields", [{"top_k": 20}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.95}, {"top_p": 0.5}, {}])
@pytest.mark.parametrize("shape", ["peaked", "far apart", "flat", "tied"])
def test_rows_as_models_with_many_ids_have_them_keep_what_the_reference_keeps(shape: str, fields: dict) -> None:
    """The likely ids of a peaked row have chunks of their own, those of a flat one are everywhere."""
    vocab = 30_001
    rng = np.random.default_rng(12)
    row = rng.standard_normal(vocab).astype(np.float32)
    if shape == "peaked":
        row[rng.choice(vocab, 600, replace=False)] = 14.0 - 1.6 * np.log(np.arange(1.0, 601.0))
    if shape == "far apart":
        row[:: 3 * BLOCK] += 9.0
    if shape == "tied":
        row = np.round(row)
    case = plain(row, seed=4, temperature=0.7, **fields)
    weights = process(row, case.params, case.history)
    np.testing.assert_array_equal(law(case.sampler(), row) > 0.0, np.isfinite(weights))
    scores = case.perturbed()
    assert choose(case.sampler(), row, case.position) == int(np.argmax(scores))
    ranked = [token_id for token_id in np.argsort(-scores, kind="stable")[:16].tolist() if scores[token_id] > -math.inf]
    assert case.sampler().rank(row, case.position, 16)[0] == ranked

"""Each processor does what vLLM's does, in vLLM's order, and ties go to the lowest id."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.processors import UnusableLogitsError
from tests.support.reference_sampling import RowHistory, fixed_point_mass, mass_needed, process

NO_HISTORY = RowHistory()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, **fields)


def row(*logits: float) -> npt.NDArray[np.float32]:
    return np.array(logits, dtype=np.float32)


def survivors(weights: npt.NDArray[np.float64]) -> list[int]:
    return np.flatnonzero(np.isfinite(weights)).tolist()


def test_without_options_log_weights_are_the_logits() -> None:
    assert process(row(0.5, -1.0, 2.0), params(), NO_HISTORY).tolist() == [0.5, -1.0, 2.0]


def test_temperature_divides_the_logits() -> None:
    np.testing.assert_allclose(process(row(1.0, -3.0), params(temperature=0.5), NO_HISTORY), [2.0, -6.0])


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_rows_keep_scale_and_ignore_filters(temperature: float) -> None:
    greedy = params(temperature=temperature, top_k=1, top_p=0.1, min_p=0.9)
    assert process(row(1.0, 2.0, 3.0), greedy, NO_HISTORY).tolist() == [1.0, 2.0, 3.0]


def test_logit_bias_is_added_and_entries_of_one_id_add_up() -> None:
    biased = params(logit_bias=((1, 2.5), (2, -1.0), (1, 0.5)))
    assert process(row(0.0, 0.0, 0.0), biased, NO_HISTORY).tolist() == [0.0, 3.0, -1.0]


def test_stop_tokens_and_end_of_text_are_masked_until_enough_tokens_are_out() -> None:
    patient = params(min_tokens=2, stop_token_ids=(1,), ignore_eos=True)
    early = RowHistory(prompt_token_ids=(0, 0, 0), output_token_ids=(2,), eos_token_ids=(3,))
    late = RowHistory(prompt_token_ids=(0, 0, 0), output_token_ids=(2, 2), eos_token_ids=(3,))
    assert survivors(process(row(1, 1, 1, 1), patient, early)) == [0, 2]
    assert survivors(process(row(1, 1, 1, 1), patient, late)) == [0, 1, 2, 3]


def test_a_mask_beats_a_bias() -> None:
    both = params(min_tokens=1, logit_bias=((0, 100.0),))
    assert survivors(process(row(1, 1), both, RowHistory(eos_token_ids=(0,)))) == [1]


def test_repetition_penalty_looks_at_prompt_and_output_and_depends_on_the_sign() -> None:
    history = RowHistory(prompt_token_ids=(0,), output_token_ids=(1, 1))
    weights = process(row(2.0, -2.0, 2.0), params(repetition_penalty=2.0), history)
    assert weights.tolist() == [1.0, -4.0, 2.0]


def test_frequency_and_presence_penalties_look_at_the_output_alone() -> None:
    history = RowHistory(prompt_token_ids=(0, 0), output_token_ids=(1, 1, 2))
    weights = process(row(0, 0, 0, 0), params(frequency_penalty=0.5, presence_penalty=0.25), history)
    assert weights.tolist() == [0.0, -1.25, -0.75, 0.0]


def test_repetition_comes_before_frequency_and_penalties_before_temperature() -> None:
    history = RowHistory(output_token_ids=(0,))
    both = params(repetition_penalty=2.0, frequency_penalty=1.0, temperature=0.5)
    assert process(row(4.0), both, history).tolist() == [(4.0 / 2.0 - 1.0) / 0.5]


def test_bias_comes_before_repetition() -> None:
    both = params(repetition_penalty=2.0, logit_bias=((0, 6.0),))
    assert process(row(-2.0), both, RowHistory(output_token_ids=(0,))).tolist() == [2.0]


def test_min_p_keeps_ids_of_at_least_that_share_of_the_best() -> None:
    logits = row(*[math.log(prob) for prob in (0.5, 0.26, 0.24)])
    assert survivors(process(logits, params(min_p=0.5), NO_HISTORY)) == [0, 1]


def test_min_p_of_one_keeps_the_best_alone() -> None:
    assert survivors(process(row(1.0, 3.0, 2.0, 3.0), params(min_p=1.0), NO_HISTORY)) == [1, 3]


def test_top_k_keeps_exactly_k_and_the_lowest_ids_among_equals() -> None:
    assert survivors(process(row(1, 5, 3, 3, 3), params(top_k=3), NO_HISTORY)) == [1, 2, 3]
    assert survivors(process(row(1, 5, 3), params(top_k=99), NO_HISTORY)) == [0, 1, 2]


def test_top_p_keeps_the_smallest_head_that_reaches_the_mass() -> None:
    logits = row(*[math.log(prob) for prob in (0.15, 0.5, 0.05, 0.3)])
    assert survivors(process(logits, params(top_p=0.79), NO_HISTORY)) == [1, 3]
    assert survivors(process(logits, params(top_p=0.81), NO_HISTORY)) == [0, 1, 3]
    assert survivors(process(logits, params(top_p=1e-9), NO_HISTORY)) == [1]


def test_top_p_takes_the_lowest_ids_among_equals() -> None:
    assert survivors(process(row(0, 0, 0, 0), params(top_p=0.5), NO_HISTORY)) == [0, 1]


def test_top_p_works_on_what_top_k_left_renormalised() -> None:
    logits = row(*[math.log(prob) for prob in (0.4, 0.3, 0.2, 0.1)])
    assert survivors(process(logits, params(top_p=0.55), NO_HISTORY)) == [0, 1]
    assert survivors(process(logits, params(top_p=0.55, top_k=2), NO_HISTORY)) == [0]


def test_filters_see_the_temperature() -> None:
    logits = row(*[math.log(prob) for prob in (0.6, 0.4)])
    assert survivors(process(logits, params(min_p=0.6), NO_HISTORY)) == [0, 1]
    assert survivors(process(logits, params(min_p=0.6, temperature=0.5), NO_HISTORY)) == [0]


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    st.floats(0.01, 0.999),
    st.floats(0.1, 3.0),
)
def test_the_nucleus_reaches_its_mass_and_loses_it_without_its_last_id(
    logits: list[float], top_p: float, temperature: float
) -> None:
    """The definition (Holtzman et al. 1904.09751, equation 3), up to the fixed-point grid."""
    weights = process(row(*logits), params(top_p=top_p, temperature=temperature), NO_HISTORY)
    probs = np.exp(row(*logits).astype(np.float64) / temperature)
    probs /= probs.sum()
    kept = np.isfinite(weights)
    assert probs[kept].sum() > top_p - 1e-9
    assert probs[kept].sum() - probs[kept].min() < top_p + 1e-9
    assert probs[kept].min() >= probs[~kept].max(initial=0.0)


@given(st.floats(-700.0, 0.0))
def test_a_fixed_point_mass_is_the_exponential_on_its_grid(log_ratio: float) -> None:
    mass = int(fixed_point_mass(np.array([log_ratio]))[0])
    assert abs(mass - math.exp(log_ratio) * 2.0**42) <= 0.5 + 1e-2


def test_the_mass_needed_is_never_nothing_and_never_more_than_there_is() -> None:
    assert mass_needed(2**42, 1e-300) == 1
    assert mass_needed(2**60 - 1, 1.0 - 2.0**-53) <= 2**60 - 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_refused(bad: float, temperature: float) -> None:
    with pytest.raises(UnusableLogitsError, match=f"the largest is {bad}"):
        process(row(0.0, bad, 1.0), params(temperature=temperature), NO_HISTORY)


def test_a_row_with_every_token_masked_is_refused() -> None:
    with pytest.raises(UnusableLogitsError, match="every token is masked"):
        process(row(-math.inf, 0.0), params(min_tokens=1), RowHistory(eos_token_ids=(1,)))


def test_logits_of_minus_infinity_are_never_kept() -> None:
    assert survivors(process(row(-math.inf, 0.0, 0.0), params(top_k=3, top_p=0.99), NO_HISTORY)) == [1, 2]

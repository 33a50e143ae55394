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
from paceline.core.processors import MASS_SCALE, UnusableLogitsError, share
from tests.support.reference_sampling import RowHistory, in_units, mass_needed, process

NO_HISTORY = RowHistory()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, **fields)


def row(*logits: float) -> npt.NDArray[np.float32]:
    return np.array(logits, dtype=np.float32)


def survivors(weights: npt.NDArray[np.float64]) -> list[int]:
    return np.flatnonzero(np.isfinite(weights)).tolist()


def logs(*probs: float) -> npt.NDArray[np.float32]:
    return row(*map(math.log, probs))


@pytest.mark.parametrize(
    ("logits", "options", "history", "weights"),
    [
        pytest.param((0.5, -1.0, 2.0), {}, {}, [0.5, -1.0, 2.0], id="without options log weights are the logits"),
        pytest.param((1.0, -3.0), {"temperature": 0.5}, {}, [2.0, -6.0], id="temperature divides"),
        pytest.param((1, 2, 3), {"temperature": 0.0, "top_k": 1}, {}, [1, 2, 3], id="greedy rows ignore filters"),
        pytest.param((1, 2, 3), {"temperature": 1e-6, "min_p": 0.9}, {}, [1, 2, 3], id="nearly greedy rows as well"),
        pytest.param(
            (0, 0, 0), {"logit_bias": ((1, 2.5), (2, -1.0), (1, 0.5))}, {}, [0, 3, -1], id="biases of one id add up"
        ),
        pytest.param(
            (2, -2, 2),
            {"repetition_penalty": 2.0},
            {"prompt_token_ids": (0,), "output_token_ids": (1, 1)},
            [1, -4, 2],
            id="repetition looks at prompt and output, and depends on the sign",
        ),
        pytest.param(
            (0, 0, 0, 0),
            {"frequency_penalty": 0.5, "presence_penalty": 0.25},
            {"prompt_token_ids": (0, 0), "output_token_ids": (1, 1, 2)},
            [0, -1.25, -0.75, 0],
            id="frequency and presence look at the output alone",
        ),
        pytest.param(
            (4,),
            {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "temperature": 0.5},
            {"output_token_ids": (0,)},
            [(4.0 / 2.0 - 1.0) / 0.5],
            id="repetition before frequency, penalties before temperature",
        ),
        pytest.param(
            (-2,),
            {"repetition_penalty": 2.0, "logit_bias": ((0, 6.0),)},
            {"output_token_ids": (0,)},
            [2.0],
            id="bias before repetition",
        ),
    ],
)
def test_weights(
    logits: tuple[float, ...], options: dict[str, Any], history: dict[str, Any], weights: list[float]
) -> None:
    assert process(row(*logits), params(**options), RowHistory(**history)).tolist() == weights


@pytest.mark.parametrize(
    ("logits", "options", "kept"),
    [
        pytest.param(logs(0.5, 0.26, 0.24), {"min_p": 0.5}, [0, 1], id="min-p: at least that share of the best"),
        pytest.param(row(1, 3, 2, 3), {"min_p": 1.0}, [1, 3], id="min-p 1: the best alone"),
        pytest.param(row(1, 5, 3, 3, 3), {"top_k": 3}, [1, 2, 3], id="top-k: lowest ids among equals"),
        pytest.param(row(1, 5, 3), {"top_k": 99}, [0, 1, 2], id="top-k beyond the vocabulary"),
        pytest.param(logs(0.15, 0.5, 0.05, 0.3), {"top_p": 0.79}, [1, 3], id="top-p: the smallest head of that mass"),
        pytest.param(logs(0.15, 0.5, 0.05, 0.3), {"top_p": 0.81}, [0, 1, 3], id="top-p: one more beyond it"),
        pytest.param(logs(0.15, 0.5, 0.05, 0.3), {"top_p": 1e-9}, [1], id="top-p: never nothing"),
        pytest.param(row(0, 0, 0, 0), {"top_p": 0.5}, [0, 1], id="top-p: lowest ids among equals"),
        pytest.param(logs(0.4, 0.3, 0.2, 0.1), {"top_p": 0.55}, [0, 1], id="top-p alone"),
        pytest.param(logs(0.4, 0.3, 0.2, 0.1), {"top_p": 0.55, "top_k": 2}, [0], id="top-p of what top-k left"),
        pytest.param(logs(0.6, 0.4), {"min_p": 0.6}, [0, 1], id="min-p alone"),
        pytest.param(logs(0.6, 0.4), {"min_p": 0.6, "temperature": 0.5}, [0], id="filters see the temperature"),
        pytest.param(row(-math.inf, 0, 0), {"top_k": 3, "top_p": 0.99}, [1, 2], id="minus infinity is never kept"),
    ],
)
def test_filters(logits: npt.NDArray[np.float32], options: dict[str, Any], kept: list[int]) -> None:
    assert survivors(process(logits, params(**options), NO_HISTORY)) == kept


def test_stop_tokens_and_end_of_text_are_masked_until_enough_tokens_are_out() -> None:
    patient = params(min_tokens=2, stop_token_ids=(1,), ignore_eos=True)
    early = RowHistory(prompt_token_ids=(0, 0, 0), output_token_ids=(2,), eos_token_ids=(3,))
    late = RowHistory(prompt_token_ids=(0, 0, 0), output_token_ids=(2, 2), eos_token_ids=(3,))
    assert survivors(process(row(1, 1, 1, 1), patient, early)) == [0, 2]
    assert survivors(process(row(1, 1, 1, 1), patient, late)) == [0, 1, 2, 3]
    both = params(min_tokens=1, logit_bias=((0, 100.0),))
    assert survivors(process(row(1, 1), both, RowHistory(eos_token_ids=(0,)))) == [1], "a mask beats a bias"


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    st.floats(0.01, 0.999),
    st.floats(0.1, 3.0),
)
def test_the_nucleus_reaches_its_mass_and_loses_it_without_its_last_id(
    logits: list[float], top_p: float, temperature: float
) -> None:
    """The definition (Holtzman et al. 1904.09751, equation 3), up to the arithmetic of float32."""
    weights = process(row(*logits), params(top_p=top_p, temperature=temperature), NO_HISTORY)
    probs = np.exp(row(*logits).astype(np.float64) / temperature)
    probs /= probs.sum()
    kept = np.isfinite(weights)
    assert probs[kept].sum() > top_p - 1e-5
    assert probs[kept].sum() - probs[kept].min() < top_p + 1e-5
    assert probs[kept].min() >= probs[~kept].max(initial=0.0)


@given(st.floats(-87.0, 0.0, width=32))
def test_a_share_is_the_exponential_in_float32_and_a_mass_lies_on_its_grid(log_ratio: float) -> None:
    found = share(np.array([log_ratio], np.float32))
    assert found.dtype == np.float32
    assert found[0] == pytest.approx(math.exp(log_ratio), rel=3e-7)
    assert abs(int(in_units(found)[0]) - float(found[0]) * MASS_SCALE) <= 0.5


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

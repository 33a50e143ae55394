"""An output is followed along its prediction over what it changes, adds and leaves out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.prediction import LEAST_AGREED, PredictedText

PREDICTED = list(range(100, 120))
TOKENS = st.lists(st.integers(0, 4), max_size=40)


def followed(output: list[int], predicted: list[int] = PREDICTED) -> PredictedText:
    text = PredictedText(predicted)
    text.take(output)
    return text


@pytest.mark.parametrize(
    ("output", "missed"),
    [
        (PREDICTED, 0),
        ([*PREDICTED[:5], 7, *PREDICTED[6:]], 1),
        ([*PREDICTED[:5], 7, 8, 9, *PREDICTED[5:]], 0),
        (PREDICTED[:5] + PREDICTED[9:], 4),
        ([7, 8, *PREDICTED[3:]], 3),
    ],
    ids=["as predicted", "one changed", "three added", "four left out", "another beginning"],
)
def test_behind_a_deviation_the_output_is_found_again(output: list[int], missed: int) -> None:
    text = followed(output)
    # The tokens by which it is found again count as not foretold.
    found_again = 0 if output == PREDICTED else LEAST_AGREED
    assert text.num_rejected == missed + found_again
    assert text.at == len(PREDICTED)


def test_another_output_has_nothing_of_the_prediction() -> None:
    text = followed([1, 2, 3, 4])
    assert (text.at, text.num_accepted, text.num_rejected) == (None, 0, len(PREDICTED))


@given(TOKENS, TOKENS, st.integers(0, 40))
def test_no_token_counts_twice_however_the_output_is_cut(predicted: list[int], output: list[int], cut: int) -> None:
    whole, cut_up = followed(output, predicted), PredictedText(predicted)
    cut_up.take(output[:cut])
    cut_up.take(output[cut:])
    assert (whole.at, whole.num_accepted) == (cut_up.at, cut_up.num_accepted)
    assert 0 <= whole.num_accepted <= min(len(predicted), len(output))
    assert followed(predicted, predicted).num_rejected == 0

"""Confidence is the sharpened share of a guess."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.calibration import GREEDY_SHARPNESS, SAMPLED_SHARPNESS, confidences


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=16), st.booleans())
def test_it_is_the_softmax_at_a_lower_temperature(scores, greedy):
    scores = sorted(scores, reverse=True)
    total = sum(map(math.exp, scores))
    shares = [math.exp(score) / total for score in scores]
    sharpness = GREEDY_SHARPNESS if greedy else SAMPLED_SHARPNESS
    sharp = [math.exp(score / sharpness) for score in scores]
    expected = [value / sum(sharp) for value in sharp]
    assert confidences(np.array(shares), greedy=greedy) == pytest.approx(expected, abs=1e-9)


def test_nothing_to_share_is_no_confidence():
    assert confidences(np.zeros(2), greedy=True).tolist() == [0.0, 0.0]

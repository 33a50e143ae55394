"""Which rounds of a session its span shows."""

from __future__ import annotations

import pytest

from paceline.core.target_events import TracedRound
from paceline.verifier.tracing import SampledRounds


def rounds(count: int) -> list[TracedRound]:
    return [
        TracedRound(number=1, at_s=float(index), gamma=4, num_accepted=2, batch_size=1, price=0.5)
        for index in range(count)
    ]


@pytest.mark.parametrize(("seen", "kept"), [(0, 0), (1, 1), (8, 8), (9, 5), (16, 8), (17, 5), (64, 8), (1000, 8)])
def test_rounds_are_bounded_and_what_is_left_out_is_counted(seen, kept):
    sampled = SampledRounds(8)
    for each in rounds(seen):
        sampled.add(each)
    assert (len(sampled.kept), sampled.num_left_out) == (kept, seen - kept)


def test_the_rounds_kept_are_equally_far_apart_from_the_first_one_on():
    sampled = SampledRounds(8)
    for each in rounds(1000):
        sampled.add(each)
    assert [each.at_s for each in sampled.kept] == [128.0 * index for index in range(8)]

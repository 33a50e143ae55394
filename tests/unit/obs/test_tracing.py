"""Which events of a span are shown where there are too many."""

from __future__ import annotations

import pytest

from paceline.obs.tracing import SampledEvents


def sample(took_s: list[float], *, evenly: int = 8, slowest: int = 0) -> SampledEvents:
    sampled = SampledEvents(evenly, slowest)
    for index, each in enumerate(took_s):
        sampled.add(index, each, {})
    return sampled


@pytest.mark.parametrize(("seen", "kept"), [(0, 0), (1, 1), (8, 8), (9, 5), (16, 8), (17, 5), (64, 8), (1000, 8)])
def test_events_are_bounded_and_what_is_left_out_is_counted(seen: int, kept: int) -> None:
    sampled = sample([0.0] * seen)
    assert (len(sampled.kept), sampled.num_left_out) == (kept, seen - kept)


def test_the_events_kept_are_equally_far_apart_from_the_first_one_on() -> None:
    assert [at_ns for at_ns, _ in sample([0.0] * 1000).kept] == [128 * index for index in range(8)]


def test_the_slowest_are_kept_beside_the_even_sample_in_their_order() -> None:
    took_s = [0.01] * 1000
    took_s[77], took_s[701], took_s[256] = 1.0, 2.0, 3.0
    sampled = sample(took_s, slowest=3)
    assert [at_ns for at_ns, _ in sampled.kept] == [0, 77, 128, 256, 384, 512, 640, 701, 768, 896]
    assert sampled.num_left_out == 990

"""What the demo counts: tokens while as many streams ran as it says."""

from __future__ import annotations

import pytest

from paceline.cluster.demo import Completion, Run, verdict_of


def completion(*pieces: tuple[float, int]) -> Completion:
    return Completion(pieces=list(pieces))


def test_tokens_count_until_a_stream_finds_no_work_left() -> None:
    first, second = completion((11.0, 1), (12.0, 10)), completion((11.0, 2), (14.0, 8), (20.0, 30))
    third = completion((13.0, 1), (15.0, 20))
    # Two at a time: the third begins when the first ends, and nothing takes its place when it does at 15.
    assert Run([first, second, third], started_s=10.0, concurrency=2).tokens_per_s == pytest.approx((10 + 8 + 20) / 5)


@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_one_stream_counts_as_a_whole(concurrency: int) -> None:
    assert Run([completion((1.0, 1), (2.0, 8))], started_s=0.0, concurrency=concurrency).tokens_per_s == 4.0


def test_the_speed_of_a_stream_begins_with_its_first_piece() -> None:
    assert completion((5.0, 1), (7.0, 5)).tokens_per_s == 2.0
    assert completion((5.0, 1)).tokens_per_s == 0.0


def test_texts_that_differ_are_to_be_reported_where_the_engine_promises_tokens() -> None:
    assert all("identical" in verdict_of(same=True, exact=exact) for exact in (True, False))
    assert "report this" in verdict_of(same=False, exact=True)
    assert "may" in verdict_of(same=False, exact=False), "where only the law is promised"

"""What the demo counts: tokens while as many streams ran as it says."""

from __future__ import annotations

import pytest

from paceline.cluster.demo import Completion, DemoConfig, Line, Run, said_of, verdict_of


def completion(*pieces: tuple[float, int]) -> Completion:
    return Completion(pieces=list(pieces))


def test_tokens_count_until_a_stream_finds_no_work_left() -> None:
    first, second = completion((11.0, 1), (12.0, 10)), completion((11.0, 2), (14.0, 8), (20.0, 30))
    third = completion((13.0, 1), (15.0, 20))
    # Two at a time: the third begins when the first ends, and nothing takes its place when it does at 15.
    assert Run([first, second, third], 10.0, Line(2, 0.8)).tokens_per_s == pytest.approx((10 + 8 + 20) / 5)


@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_one_stream_counts_as_a_whole(concurrency: int) -> None:
    assert Run([completion((1.0, 1), (2.0, 8))], 0.0, Line(concurrency, 0.8)).tokens_per_s == 4.0


def test_a_line_of_the_table_says_its_way_its_temperature_its_streams_and_its_ratio() -> None:
    plain, drafted = (Run([completion((1.0, 1), (end_s, 24))], 0.0, Line(1, 0.0)) for end_s in (12.0, 4.0))
    drafted.completions[0].record.update(num_spec_steps=6, num_draft_tokens=24, num_accepted_draft_tokens=18)
    assert drafted.row("speculative", plain)[:8] == (
        *("speculative", "greedy", "1", "6.0"), *("3.00", "0.75", "4.00", "4.00"),
    )  # fmt: skip
    assert plain.row("plain", plain)[3:8] == ("2.0", "1.00", "-", "-", "-")


def test_the_demo_shows_greedy_beside_sampled_and_has_two_prompts_for_each_stream() -> None:
    config = DemoConfig()
    assert [said_of(each) for each in config.temperature] == ["greedy", "0.8"]
    assert [config.num_prompts(each) for each in (1, 8)] == [4, 16]


def test_the_speed_of_a_stream_begins_with_its_first_piece() -> None:
    assert completion((5.0, 1), (7.0, 5)).tokens_per_s == 2.0
    assert completion((5.0, 1)).tokens_per_s == 0.0


def test_texts_that_differ_are_to_be_reported_where_the_engine_promises_tokens() -> None:
    assert all("identical" in verdict_of(same=True, exact=exact) for exact in (True, False))
    assert "report this" in verdict_of(same=False, exact=True)
    assert "may" in verdict_of(same=False, exact=False), "where only the law is promised"

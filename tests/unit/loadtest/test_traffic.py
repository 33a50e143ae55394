"""The pure parts of the replayer: times of tokens, percentiles, load buckets, windows, comparison, what is sent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from loadtest.load import figures_of
from loadtest.prompts import open_prompts, read_questions
from loadtest.streams import Ask, Completion
from loadtest.traffic.config import ADAPTIVE, OFF, ON, LoadConfig
from loadtest.traffic.figures import (
    buckets_of,
    comparison,
    different_texts,
    milliseconds,
    mode_figures,
)
from loadtest.traffic.plan import Source, fitted, opening, requests_of, windows_of
from loadtest.traffic.report import print_tables
from tokenizers import Tokenizer

from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.core.errors import ConfigError
from paceline.planning.arrivals import Arrival


def answer(index: int = 0, *, counts: tuple[tuple[float, int], ...] = ((1.0, 1),), **changes: object) -> Completion:
    num_tokens = sum(count for _, count in counts)
    made = Completion(index=index, ended_s=counts[-1][0] if counts else 0.0, counts=counts, num_tokens=num_tokens)
    return replace(made, **changes)


def request(index: int, due_s: float, max_tokens: int = 10) -> Ask:
    return Ask(index=index, due_s=due_s, prompt="#", max_tokens=max_tokens, seed=index)


def test_tokens_that_come_at_once_share_their_wait() -> None:
    gaps_s = answer(counts=((1.0, 1), (1.5, 2), (1.75, 1))).token_gaps_s
    assert gaps_s == [0.25, 0.25, 0.25]


def test_the_first_piece_waited_for_the_prompt_and_has_no_gaps() -> None:
    assert answer(counts=((1.0, 3),)).token_gaps_s == []
    assert answer(counts=((1.0, 3), (2.0, 1))).token_gaps_s == [1.0]


def test_two_pieces_that_came_together_are_one() -> None:
    assert answer(counts=((1.0, 1), (2.0, 1), (2.0, 3))).token_gaps_s == [0.25] * 4


def test_gaps_add_up_to_the_time_from_the_first_to_the_last_token() -> None:
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(0.1, 50))
    counts = tuple((float(at_s), int(count)) for at_s, count in zip(times, rng.integers(1, 6, 50), strict=True))
    of = answer(counts=counts)
    assert sum(of.token_gaps_s) == pytest.approx(counts[-1][0] - counts[0][0])
    assert len(of.token_gaps_s) == of.num_tokens - counts[0][1]


def test_percentiles_are_in_milliseconds() -> None:
    figures = milliseconds(np.arange(101) / 1000.0)
    assert figures == {"mean": 50.0, "p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert milliseconds(np.array([])) == {}


def test_latency_counts_from_sending_and_lateness_from_when_it_was_due() -> None:
    late = answer(counts=((3.0, 1), (4.0, 1)), due_s=1.0, started_s=1.5, ended_s=4.25)
    assert (late.late_s, late.ttft_s, late.e2e_s) == (0.5, 1.5, 2.75)


def test_figures_of_a_mode_count_errors_by_kind_and_leave_them_out_of_latencies() -> None:
    broken = answer(1, counts=(), error="status 429", message="come later", ended_s=9.0)
    figures = mode_figures([[answer(0, counts=((1.0, 1), (2.0, 3)), num_prompt_tokens=7), broken]])
    assert figures["errors"] == {"status 429": 1}
    assert figures["first_error"] == "come later"
    assert (figures["requests"], figures["output_tokens"], figures["prompt_tokens"]) == (2, 4, 7)
    assert figures["ttft_ms"]["p99"] == 1000.0
    assert figures["output_tokens_per_s"] == round(4 / 9.0, 1)


def test_a_mode_without_answers_has_figures_too() -> None:
    assert mode_figures([[]])["requests"] == 0


def test_slots_are_sorted_into_thirds_by_the_tokens_that_are_asked_for() -> None:
    loads = (5, 60, 20, 90, 1, 30)
    window = [request(slot, 10.0 * slot + 1.0, load) for slot, load in enumerate(loads)]
    buckets = buckets_of([window[:3], [replace(each, due_s=each.due_s - 30.0) for each in window[3:]]], 10.0)
    assert buckets == {4: "low", 0: "low", 2: "mid", 5: "mid", 1: "high", 3: "high"}


def modes(adaptive_s: float) -> dict[str, list[list[Completion]]]:
    """Two requests a mode, a slot each; the adaptive ones take as long as is said."""
    lengths = {OFF: 1.0, ON: 2.0, ADAPTIVE: adaptive_s}
    return {
        mode: [[answer(index, counts=((0.5, 1), (0.5 + length_s, 10)), text="same") for index in range(3)]]
        for mode, length_s in lengths.items()
    }


BUCKETS = {0: "low", 1: "mid", 2: "high"}


def test_adaptive_is_compared_with_the_best_other_mode_in_each_bucket() -> None:
    compared = comparison(modes(0.8), BUCKETS, seed=1)
    assert compared["ok"]
    assert compared["buckets"]["high"]["itl"] == {"best_other": OFF, "ratio": 0.8, "interval": [0.8, 0.8]}
    assert compared["buckets"]["low"]["e2e"]["ratio"] == round(1.3 / 1.5, 4)


def test_adaptive_that_is_slower_in_one_bucket_only_is_not_ok() -> None:
    runs = modes(0.8)
    slow = replace(runs[ADAPTIVE][0][2], counts=((0.5, 1), (1.55, 10)), ended_s=1.55)
    runs[ADAPTIVE][0][2] = slow
    compared = comparison(runs, BUCKETS, seed=1)
    assert not compared["ok"]
    assert compared["buckets"]["low"]["itl"]["ratio"] == 0.8


def test_requests_that_failed_in_one_mode_are_compared_in_none() -> None:
    runs = modes(0.8)
    runs[OFF][0][1] = answer(1, counts=(), error="status 500")
    assert "mid" not in comparison(runs, BUCKETS, seed=1)["buckets"]


def test_one_mode_alone_is_compared_with_nothing() -> None:
    assert "ok" not in comparison({ADAPTIVE: modes(1.0)[ADAPTIVE]}, BUCKETS, seed=1)


def test_texts_that_differ_between_modes_are_counted() -> None:
    runs = modes(1.0)
    assert different_texts(runs) == 0
    runs[ON][0][1] = replace(runs[ON][0][1], text="other")
    assert different_texts(runs) == 1


def numbers(index: int, num_tokens: int) -> str:
    """Prompts that say which they are."""
    return str(index)


def test_requests_of_another_seed_have_other_prompts_and_those_of_the_same_seed_the_same() -> None:
    arrivals = [Arrival(1.0 * index, 10, 10) for index in range(50)]
    first, again, other = (requests_of(arrivals, numbers, config(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert not {each.prompt for each in first} & {each.prompt for each in other}
    assert [each.index for each in other] == list(range(50))


def test_windows_hold_every_request_once_and_begin_at_nought() -> None:
    requests = [request(index, 1.0 * index) for index in range(10)]
    windows = windows_of(requests, 10.0, 4.0)
    assert [[each.index for each in window] for window in windows] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert windows[1][0].due_s == pytest.approx(4.0 - 10.0 / 3.0)


def config(**changes: object) -> LoadConfig:
    return LoadConfig(**{"minutes": 0.5, **changes})


def test_the_opening_of_a_trace_has_the_rate_asked_for_and_what_is_dense_stays_dense() -> None:
    trace = [Arrival(at_s, 5, 5) for at_s in (0.0, 1.0, 1.5, 4.0, 8.0, 9.0)]
    assert [each.at_s for each in opening(trace, rate_per_s=2.0, duration_s=2.0)] == [0.0, 0.25, 0.375, 1.0]
    with pytest.raises(ConfigError, match="the trace has 6"):
        opening(trace, rate_per_s=3.0, duration_s=2.0)


def test_lengths_are_scaled_then_clipped_and_the_report_says_so(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 500 * n, "input_length": 100 * (n + 1), "output_length": 40 * (n + 1)} for n in range(100)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    settings = config(
        trace=trace, rate="2", prompt_scale=0.5, output_scale=0.25, max_prompt_tokens=1000, max_output_tokens=300
    )
    source = Source(settings)
    arrivals = source.arrivals(2.0)
    assert [each.num_prompt_tokens for each in arrivals[:30]] == [min(1000, 50 * (n + 1)) for n in range(30)]
    assert fitted([Arrival(0.0, 1, 1)], settings) == [Arrival(0.0, 1, 1)]
    described = source.described(2.0)
    assert described["requests"] == len(arrivals) == 60
    assert (described["prompts_clipped"], described["outputs_clipped"]) == (40, 30)


def test_a_trace_that_is_too_short_is_refused_with_its_length(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 9}\n' * 30)
    with pytest.raises(ConfigError, match="the trace has 30"):
        Source(config(trace=trace)).arrivals(1.0)


def test_settings_that_do_not_go_together_are_refused() -> None:
    for changes in (
        {"rate": "fast"},
        {"rate": "max"},
        {"rate": "-1"},
        {"rate": "trace"},
        {"url": "http://h:1", "speculation": "all"},
    ):
        with pytest.raises(ConfigError):
            config(**changes)


def test_source_code_is_cut_to_the_length_asked_for_and_every_request_has_its_own() -> None:
    prompts, _ = open_prompts(None, DEMO_TARGET, max_tokens=512, seed=1)
    texts = [prompts(index, 60) for index in range(20)]
    assert len(set(texts)) == 20
    assert texts == [prompts(index, 60) for index in range(20)]
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    lengths = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    assert all(57 <= length <= 62 for length in lengths)


def test_questions_are_read_and_clipped(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text('{"question_id": 1, "turns": ["def one(x): return x", "more"]}\n{"prompt": "def two():"}\n')
    assert read_questions(path) == ["def one(x): return x", "def two():"]
    prompts, _ = open_prompts(path, DEMO_TARGET, max_tokens=2, seed=1)
    assert prompts(0, 500) == "def one"
    assert prompts(2, 500) == prompts(0, 1)


@pytest.mark.parametrize("line", ["", "[]", '{"turns": []}', '{"turns": [3]}', '{"prompt": ""}', "{"])
def test_bad_questions_are_refused_with_their_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_questions(path)


def test_the_same_configuration_sends_the_same_requests() -> None:
    settings = config(rate="2")
    prompts, _ = open_prompts(None, DEMO_TARGET, max_tokens=512, seed=1)
    first, second = (requests_of(Source(settings).arrivals(2.0), prompts, settings) for _ in range(2))
    assert first == second
    assert len({each.seed for each in first}) == len(first)


def test_tables_have_a_row_for_each_mode_and_load(capsys: pytest.CaptureFixture[str]) -> None:
    settings, runs = config(slot_s=1.0), modes(0.8)
    runs[ON][0][2] = replace(runs[ON][0][2], error="status 500")
    window = [request(index, 2.0 * index, 10 + index) for index in range(3)]
    plan = {**Source(settings).described(1.0), "prompts": "numbers"}
    figures = figures_of(settings, plan, runs, [window])
    assert figures["checks"] == {"no_errors": False, "same_texts": True, "adaptive_best_or_within_limit": True}
    print_tables(figures)
    described, by_mode, by_load, compared = capsys.readouterr().out.strip().split("\n\n")
    assert described.startswith(f"{plan['requests']} requests in 0.5 minutes")
    assert [line.split()[:2] for line in by_mode.splitlines()[2:]] == [[mode, "3"] for mode in (OFF, ON, ADAPTIVE)]
    assert "1 status 500" in by_mode
    assert len(by_load.splitlines()) == 2 + 3 * 3
    assert [line.split()[0] for line in compared.splitlines()[2:]] == ["low", "mid"]

"""Traces: both published forms are read, bad files are refused by line, generated ones have the fitted statistics."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import ConfigError
from paceline.planning.arrivals import (
    QUANTILES,
    SHAPES,
    Arrival,
    generated_arrivals,
    opening,
    read_arrivals,
)

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0]}\n'
    '{"timestamp": 3250, "input_length": 12, "output_length": 7, "hash_ids": [0]}\n'
)


def _file(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_azure_form_is_read_from_its_first_request_on(tmp_path: Path) -> None:
    assert read_arrivals(_file(tmp_path, AZURE)) == [
        Arrival(0.0, 374, 44),
        Arrival(pytest.approx(4.314579, abs=1e-6), 396, 109),
    ]


def test_the_mooncake_form_is_read_gzipped_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert read_arrivals(path) == [Arrival(0.0, 6758, 500), Arrival(0.25, 12, 7)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1"),
        ("a,b\n1,2\n", "line 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        (AZURE + "yesterday,3,4\n", "line 4"),
        (AZURE + "2023-11-16 18:15:51.0000000,3\n", "line 4"),
        (AZURE + "2023-11-16 18:15:51.0000000,3,-4\n", "line 4"),
        (MOONCAKE + '{"timestamp": 1}\n', "line 3"),
        (MOONCAKE + "[1]\n", "line 3"),
        (MOONCAKE + '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "line 3"),
        (MOONCAKE + "\n", "line 3"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_arrivals(_file(tmp_path, text))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for name, content in (("cut.gz", gzip.compress(b"x" * 1000)[:20]), ("no.gz", b"text"), ("bytes", b"\xff\xfe\x00")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            read_arrivals(path)
    with pytest.raises(ConfigError, match="missing"):
        read_arrivals(tmp_path / "missing")


def test_the_same_seed_generates_the_same_trace_and_another_seed_another() -> None:
    first = generated_arrivals(rate_per_s=5.0, duration_s=60.0, seed=3)
    assert first == generated_arrivals(rate_per_s=5.0, duration_s=60.0, seed=3)
    assert first != generated_arrivals(rate_per_s=5.0, duration_s=60.0, seed=4)
    assert all(0.0 <= each.at_s < 60.0 for each in first)
    assert [each.at_s for each in first] == sorted(each.at_s for each in first)


def test_what_cannot_be_generated_is_refused() -> None:
    for settings in ({"rate_per_s": 0.0}, {"duration_s": -1.0}, {"shape": "poetry"}):
        with pytest.raises(ConfigError):
            generated_arrivals(**{"rate_per_s": 1.0, "duration_s": 1.0, "seed": 1, **settings})


@pytest.mark.parametrize("name", SHAPES)
def test_generated_lengths_have_the_quantiles_of_the_trace(name: str) -> None:
    arrivals = generated_arrivals(rate_per_s=5.0, duration_s=3500.0, seed=1, shape=name)
    shape = SHAPES[name]
    at = np.array(QUANTILES[2:-3])
    for table, lengths in (
        (shape.prompt_quantiles, [each.num_prompt_tokens for each in arrivals]),
        (shape.output_quantiles, [each.num_output_tokens for each in arrivals]),
    ):
        # By rank, since tables have steps: the share of lengths up to each entry.
        shares = np.array([np.mean(np.array(lengths) <= entry) for entry in table[2:-3]])
        assert np.all(shares > at - 0.02)
        assert (min(lengths), max(lengths)) >= (table[0], table[-2])


def test_generated_gaps_vary_as_the_published_ones() -> None:
    # Squared coefficients of variation; published are 1.20 of conversations, whose rate wanders too, and 173 of code,
    # which few very long gaps make.
    squared = {}
    for name in SHAPES:
        arrivals = generated_arrivals(rate_per_s=5.0, duration_s=10_000.0, seed=2, shape=name)
        gaps = np.diff([each.at_s for each in arrivals])
        squared[name] = gaps.var() / gaps.mean() ** 2
    assert squared["conversation"] == pytest.approx(1.05, abs=0.15)
    assert squared["code"] == pytest.approx(150.0, rel=0.25)


def test_the_rate_asked_for_is_the_mean_rate_of_any_stretch() -> None:
    for duration_s in (60.0, 600.0):
        rates = [
            len(generated_arrivals(rate_per_s=8.0, duration_s=duration_s, seed=seed)) / duration_s for seed in range(8)
        ]
        assert np.mean(rates) == pytest.approx(8.0, rel=0.04)


def test_the_opening_of_a_trace_has_the_rate_asked_for_and_its_lengths() -> None:
    trace = generated_arrivals(rate_per_s=5.0, duration_s=100.0, seed=1)
    faster = opening(trace, rate_per_s=20.0, duration_s=10.0)
    assert (len(faster), faster[0].at_s) == (200, 0.0)
    assert faster[-1].at_s < 10.0
    assert [each.num_output_tokens for each in faster] == [each.num_output_tokens for each in trace[:200]]
    assert opening(trace, rate_per_s=None, duration_s=10.0) == [each for each in trace if each.at_s < 10.0]


@pytest.mark.parametrize("trace", [[Arrival(0.0, 1, 1)], [Arrival(2.0, 1, 1)] * 3])
def test_a_trace_that_is_too_short_for_a_rate_is_refused(trace: list[Arrival]) -> None:
    with pytest.raises(ConfigError, match="1 requests and one after them, the trace has"):
        opening(trace, rate_per_s=1.0, duration_s=1.0)

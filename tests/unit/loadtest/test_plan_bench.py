"""What the planner's benches make of figures: facts planted in them are found again."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
from loadtest.engine_costs import Sample, fit
from loadtest.facts import CALIBRATION_STREAMS, calibrated, requests, simulated

from paceline.planning.guesses import DrawnGuesses, texts_of
from tests.unit.planning.facts import profile

PROMPTS = [[1]] * 8


def test_step_times_are_told_apart_by_rows_and_sessions() -> None:
    samples = [
        Sample(
            rows=sessions * (1 + gamma),
            sessions=sessions,
            seconds=0.01 + 1e-4 * sessions * (1 + gamma) + 5e-4 * sessions,
        )
        for sessions in (1, 4, 8, 16)
        for gamma in (0, 3, 7)
        for _ in range(5)
    ]
    cost, session_s = fit(samples)
    assert session_s == pytest.approx(5e-4, rel=0.1)
    assert [cost.at(rows) for rows in (1, 8, 100)] == pytest.approx([0.0101, 0.0108, 0.02], rel=0.05)


def test_the_overhead_of_drafting_is_found_from_speeds_alone() -> None:
    known = profile(texts_of(DrawnGuesses(seed=3)))
    true = replace(known, drafting_overhead=0.25)
    rates = {
        streams: simulated(true, requests(PROMPTS, streams), 24, streams).tokens_per_s
        for streams in CALIBRATION_STREAMS
    }
    found = calibrated(known, rates, PROMPTS, argparse.Namespace(max_tokens=24))
    assert found.drafting_overhead == pytest.approx(0.25, abs=0.03)

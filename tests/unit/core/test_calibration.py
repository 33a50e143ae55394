"""Calibration finds the true odds, of a source and of a session, from reached guesses alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.core.calibration import MAX_CALIBRATIONS, CalibrationStore
from paceline.core.params import DRAFT_MODEL
from paceline.core.tree import DraftTree
from paceline.forest import UNLEARNED, Forest
from paceline.forest.tree_loops import margin, observe


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


class Source:
    """One source and its calibration, in sessions that have an offset each."""

    def __init__(self, num_sessions: int = 1) -> None:
        self.forest = Forest((DRAFT_MODEL,))
        self.number = self.forest.new_calibration()
        self.rows = [self.session() for _ in range(num_sessions)]

    def session(self) -> int:
        row = self.forest.take_row()
        self.forest.judge(row, 0, self.number)
        return row

    def probability(self, confidence: float, row: int | None = None) -> float:
        return self.forest.probability(self.session() if row is None else row, 0, confidence)

    def observe(self, confidence: float, row: int, *, matched: bool) -> None:
        arrays = self.forest.arrays
        observe(arrays.judges[row, 0], arrays.calibrations, confidence, float(matched))


def test_without_observations_a_drafter_is_taken_at_its_word():
    for confidence in (0.05, 0.4, 0.9):
        assert Source().probability(confidence) == pytest.approx(confidence)


def test_the_true_slope_and_intercept_are_found():
    source, rng = Source(20), np.random.default_rng(1)
    for number in range(6000):
        confidence = float(rng.uniform(0.02, 0.98))
        truth = sigmoid(0.6 * margin(confidence) - 0.8)
        source.observe(confidence, source.rows[number % 20], matched=bool(rng.random() < truth))
    for confidence in (0.1, 0.5, 0.9):
        assert source.probability(confidence) == pytest.approx(sigmoid(0.6 * margin(confidence) - 0.8), abs=0.05)


def test_a_session_that_does_worse_than_its_source_is_told_apart():
    source, rng = Source(2), np.random.default_rng(2)
    good, bad = source.rows
    for _ in range(400):
        for row, rate in ((good, 0.85), (bad, 0.4)):
            source.observe(0.7, row, matched=bool(rng.random() < rate))
    assert source.probability(0.7, good) == pytest.approx(0.85, abs=0.1)
    assert source.probability(0.7, bad) == pytest.approx(0.4, abs=0.1)


def test_the_slope_never_turns_over():
    source = Source()
    for _ in range(500):
        for confidence in (0.95, 0.05):
            source.forest.judge(source.rows[0], 0, source.number)
            source.observe(confidence, source.rows[0], matched=confidence < 0.5)
    assert source.probability(0.9) > source.probability(0.1)


def test_other_calibrations_begin_when_a_tree_is_opened_anew():
    source = Source()
    other = source.forest.new_calibration()
    source.forest.set_calibration(other, (1.0, -3.0, 0.25, 0.5, 0.0))
    tree = DraftTree(source.forest, [1], {DRAFT_MODEL: source.number})
    assert tree.probability(DRAFT_MODEL, 0.5) == pytest.approx(0.5)
    tree.open([1], {DRAFT_MODEL: other})
    assert tree.probability(DRAFT_MODEL, 0.5) == pytest.approx(sigmoid(-3.0))


def test_a_successor_begins_where_a_calibration_of_the_same_kind_ended():
    store: CalibrationStore[str] = CalibrationStore(Forest((DRAFT_MODEL,)), lambda key: key[0])
    store.resume({"a": [0.9, 0.1, 0.2, 0.3, 0.0]})
    assert store.of("a one") == store.of("a one") != store.of("a two")
    store.of("b")
    assert store.learned() == {"a": [0.9, 0.1, 0.2, 0.3, 0.0]}, "of b nothing was seen"
    with pytest.raises(ValueError, match="no calibration"):
        store.resume({"a": [0.9, 0.1, -0.2, 0.3, 0.0]})


def test_drafters_that_come_and_go_leave_no_calibrations_behind():
    """Audit 3, a08: each new address took a row of the forest for good."""
    forest = Forest((DRAFT_MODEL,))
    store: CalibrationStore[str] = CalibrationStore(forest, lambda key: key)
    own = store.of("own")
    forest.set_calibration(own, [0.5, 0.1, 0.2, 0.3, 0.0])
    for number in range(1000):
        other = store.of(f"drafter {number}")
        assert forest.calibration(other) == [*UNLEARNED]
        forest.set_calibration(other, [0.7, 0.1, 0.2, 0.3, 0.0])
        assert store.of("own") == own != other
    assert len(forest.arrays.calibrations) <= MAX_CALIBRATIONS
    assert store.learned()["own"] == [0.5, 0.1, 0.2, 0.3, 0.0]

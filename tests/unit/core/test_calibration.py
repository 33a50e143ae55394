"""Calibration finds the true odds, of a source and of a session, from reached guesses alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.core.calibration import MAX_MARGIN, Calibration, Calibrations, SessionOffset, margin
from paceline.core.messages import GenerateRequest, NodeGuess
from paceline.core.params import DRAFT_MODEL, SamplingParams, SpeculationParams
from paceline.core.session import VerifierSession
from paceline.core.tree import DraftTree


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


def test_without_observations_a_drafter_is_taken_at_its_word():
    for confidence in (0.05, 0.4, 0.9):
        assert Calibration().probability(confidence, SessionOffset()) == pytest.approx(confidence)


def test_margins_are_bounded():
    assert (margin(0.0), margin(1.0), margin(0.5)) == (-MAX_MARGIN, MAX_MARGIN, 0.0)


def test_the_true_slope_and_intercept_are_found():
    calibration, rng = Calibration(), np.random.default_rng(1)
    sessions = [SessionOffset() for _ in range(20)]
    for number in range(6000):
        confidence = float(rng.uniform(0.02, 0.98))
        truth = sigmoid(0.6 * margin(confidence) - 0.8)
        calibration.observe(confidence, sessions[number % 20], matched=bool(rng.random() < truth))
    for confidence in (0.1, 0.5, 0.9):
        found = calibration.probability(confidence, SessionOffset())
        assert found == pytest.approx(sigmoid(0.6 * margin(confidence) - 0.8), abs=0.05)


def test_a_session_that_does_worse_than_its_source_is_told_apart():
    calibration, rng = Calibration(), np.random.default_rng(2)
    good, bad = SessionOffset(), SessionOffset()
    for _ in range(400):
        for offset, rate in ((good, 0.85), (bad, 0.4)):
            calibration.observe(0.7, offset, matched=bool(rng.random() < rate))
    assert calibration.probability(0.7, good) == pytest.approx(0.85, abs=0.1)
    assert calibration.probability(0.7, bad) == pytest.approx(0.4, abs=0.1)


def test_the_slope_never_turns_over():
    calibration = Calibration()
    for _ in range(500):
        calibration.observe(0.95, SessionOffset(), matched=False)
        calibration.observe(0.05, SessionOffset(), matched=True)
    assert calibration.probability(0.9, SessionOffset()) > calibration.probability(0.1, SessionOffset())


def test_only_guesses_below_a_committed_token_have_an_outcome():
    tree = DraftTree(1)
    rows = [(1, 0, 7, 0.9), (2, 0, 8, 0.1), (3, 1, 5, 0.8), (4, 2, 6, 0.7), (5, 3, 4, 0.6)]
    tree.graft(
        [NodeGuess(node_id=n, parent_id=p, token_id=t, confidence=c) for n, p, t, c in rows], base_len=1, committed=[0]
    )
    assert list(tree.outcomes([7, 1, 4])) == [
        (DRAFT_MODEL, 0.9, True),
        (DRAFT_MODEL, 0.1, False),
        (DRAFT_MODEL, 0.8, False),
    ]


def test_a_commit_teaches_the_source_and_the_next_guess_is_worth_less():
    calibration = Calibration()
    request = GenerateRequest(
        session_id="s",
        epoch=0,
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=50),
        speculation=SpeculationParams(),
    )
    session = VerifierSession(request, Calibrations({DRAFT_MODEL: calibration}))
    for number in range(1, 20):
        session.tree.add(session.tree.root, NodeGuess(node_id=number, parent_id=0, token_id=9, confidence=0.9))
        session.commit([3])
    node = session.tree.add(session.tree.root, NodeGuess(node_id=99, parent_id=0, token_id=9, confidence=0.9))
    assert node is not None
    assert node.guesses == {DRAFT_MODEL: 0.9}
    assert session.tree.survival(node) < 0.5

"""The bench `tracing`: which requests it has traced, and how it compares."""

from __future__ import annotations

import argparse
from itertools import pairwise

import pytest
from loadtest.tracing import OFF, Turn, Turns, traced_asks


@pytest.mark.parametrize(("ratio", "traced"), [(0.0, 0), (0.1, 2), (0.25, 5), (1.0, 20)])
def test_a_share_of_the_requests_is_traced_evenly_spread(ratio: float, traced: int) -> None:
    asks = traced_asks(argparse.Namespace(requests=20, max_tokens=8), ratio)
    at = [number for number, ask in enumerate(asks) if ask.headers]
    assert len(at) == traced
    assert len({later - sooner for sooner, later in pairwise(at)}) <= 1
    assert all(asks[number].traceparent.endswith("-01") for number in at)


def turn(tokens_per_s: float, text: str = "a") -> Turn:
    return Turn(tokens_per_s=tokens_per_s, cpu_ms_per_token=1e3 / tokens_per_s, texts=(text,))


def test_a_machine_that_gets_slower_and_fleets_that_differ_do_not_show_as_a_cost() -> None:
    speeds = {0: (100.0, 60.0, 80.0), 1: (90.0, 54.0, 72.0)}
    off = {(OFF, pair): [turn(speed) for speed in its] for pair, its in speeds.items()}
    traced = {("10 %", pair): [turn(0.98 * speed) for speed in its] for pair, its in speeds.items()}
    turns = Turns(off | traced)
    figures = turns.figures("10 %")
    assert figures["ratio"] == pytest.approx(0.98)
    assert figures["quartiles"] == pytest.approx([0.98, 0.98])
    assert figures["cpu_ratio"] == pytest.approx(1 / 0.98, abs=1e-4)
    assert turns.apart() == pytest.approx(0.9)
    assert turns.same_texts
    assert not Turns({**off, (OFF, 1): [turn(1.0, "b")]}).same_texts

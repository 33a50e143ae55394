"""The bench `tracing`: which requests it has traced, and how it compares."""

from __future__ import annotations

import argparse
from itertools import pairwise

import pytest
from loadtest.tracing import OFF, Turn, Turns, asks_of


@pytest.mark.parametrize(("ratio", "traced"), [(0.0, 0), (0.1, 2), (0.25, 5), (1.0, 20)])
def test_a_share_of_the_requests_is_traced_evenly_spread(ratio: float, traced: int) -> None:
    asks = asks_of(argparse.Namespace(requests=20, max_tokens=8), ratio)
    at = [number for number, ask in enumerate(asks) if ask.headers]
    assert len(at) == traced
    assert len({later - sooner for sooner, later in pairwise(at)}) <= 1
    assert all(asks[number].traceparent.endswith("-01") for number in at)


def turn(tokens_per_s: float, text: str = "a") -> Turn:
    return Turn(tokens_per_s=tokens_per_s, cpu_ms_per_token=1e3 / tokens_per_s, texts=(text,))


def test_a_machine_that_gets_slower_and_fleets_that_differ_do_not_show_as_a_cost() -> None:
    turns = Turns.of((OFF, "10 %"))
    for speed in (100.0, 60.0, 80.0):
        for pair, of_this_pair in enumerate((1.0, 0.9)):
            turns.by_way[OFF][pair].append(turn(speed * of_this_pair))
            turns.by_way["10 %"][pair].append(turn(0.98 * speed * of_this_pair))
    figures = turns.figures("10 %")
    assert figures["ratio"] == pytest.approx(0.98)
    assert figures["quartiles"] == pytest.approx([0.98, 0.98])
    assert figures["cpu_ratio"] == pytest.approx(1 / 0.98, abs=1e-4)
    assert turns.apart() == pytest.approx(0.9)
    assert turns.same_texts
    turns.by_way[OFF][0].append(turn(1.0, "b"))
    assert not turns.same_texts

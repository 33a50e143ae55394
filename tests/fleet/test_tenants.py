"""A greedy tenant beside a modest one, briefly: the modest one loses nothing, and is refused nothing."""

from __future__ import annotations

import argparse
import asyncio

import pytest
from loadtest import tenants
from loadtest.greedy import KINDS

pytestmark = pytest.mark.full


def test_a_modest_tenant_comes_to_no_harm_beside_a_greedy_one() -> None:
    """How much slower it gets is for the bench: here other tests share the cores."""
    kinds = [*KINDS, tenants.HANGING_STORE]
    options = argparse.Namespace(kinds=kinds, seconds=6.0, rounds=1, streams=4, max_tokens=24)
    outcome = asyncio.run(tenants.take_all_turns(options))
    assert outcome.verdict.clean, outcome.verdict
    assert not outcome.failed
    assert not outcome.refused
    assert outcome.unharmed, f"{outcome.most_passed} requests of a key passed in a minute"
    assert all(turn.answers_s and turn.errands_s for turns in outcome.turns.values() for turn in turns)
    greedy = {kind: sum(outcome.turns[kind][0].greedy.values()) for kind in KINDS}
    assert all(greedy.values()), f"nothing was asked for: {greedy}"

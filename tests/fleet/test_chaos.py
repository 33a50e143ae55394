"""A short course of kills, cuts and drains over all tiers of real processes: no token lost, doubled or changed."""

from __future__ import annotations

import argparse
import asyncio

import pytest
from loadtest import chaos
from loadtest.faults import KILL

pytestmark = pytest.mark.timeout(400)


def test_nothing_is_lost_doubled_or_changed_while_services_die() -> None:
    options = argparse.Namespace(
        seed=5,
        seconds=17.0,
        every=2.0,
        streams=12,
        max_tokens=96,
        verifiers=2,
        replicas=2,
        faults=[KILL, "cut", "drain", "half-open"],
    )
    outcome = asyncio.run(chaos.run(options))
    assert outcome.damage.none, [stream.error for stream in outcome.streams if stream.error]
    assert {fault.role for fault in outcome.faults if fault.kind == KILL} == {
        "verifier",
        "gateway",
        "drafter",
        "valkey",
    }
    assert outcome.num_resumed

"""A short course of what can go wrong, over all tiers of real processes and both doors: no client comes to harm."""

from __future__ import annotations

import argparse
import asyncio

import pytest
from loadtest import chaos
from loadtest.faults import KILL

pytestmark = pytest.mark.full

# A few of each sort: of a process, of the network, of what is inside a process, of the store, at the doors, of keys.
KINDS = [KILL, "cut", "drain", "garbage", "gap", "half", "full", "crowd", "broken-keys"]


def test_nothing_is_lost_doubled_changed_or_left_without_an_answer_while_things_go_wrong() -> None:
    options = argparse.Namespace(
        seed=5,
        seconds=None,
        every=2.0,
        streams=16,
        max_tokens=64,
        verifiers=2,
        targets=1,
        replicas=2,
        faults=KINDS,
        logs=None,
    )
    outcome = asyncio.run(chaos.disturb(options))
    for history in outcome.histories:
        chaos.accuse(history, outcome.reference[history.index], outcome.faults)
    assert outcome.ok, outcome.verdict
    assert {fault.kind for fault in outcome.faults} == set(KINDS)
    killed = {fault.role for fault in outcome.faults if fault.kind == KILL}
    assert killed >= {"verifier", "drafter", "gateway"}
    assert {history.door for history in outcome.histories} == {"grpc", "http"}
    assert outcome.num_resumed
    assert [gone for each in outcome.withdrawn for gone in each.gone_s], "a gateway has refused the key"

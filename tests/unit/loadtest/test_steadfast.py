"""What benches of failures count as damage, as a pause, and as a course of events."""

from __future__ import annotations

import random
from itertools import islice

from loadtest.failover import SETTLING_TOKENS, _first_token_after_pause, _mean_length
from loadtest.faults import FAULTS, KILL, VALKEY, planned
from loadtest.steadfast import Damage, Stream, damage, mixed_requests

REFERENCE = [[1, 2, 3, 4], [5, 6]]
NAMES = {"verifier": ["v0", "v1"], "gateway": ["g0"], "drafter": ["d0"], VALKEY: ["valkey"]}


def stream(*token_ids: int, index: int = 0, error: str = "") -> Stream:
    return Stream(index=index, token_ids=list(token_ids), error=error)


def test_streams_as_they_should_be_are_no_damage() -> None:
    assert damage([stream(1, 2, 3, 4), stream(5, 6, index=1)], REFERENCE).none


def test_each_kind_of_damage_is_counted_in_tokens() -> None:
    streams = [stream(1, 2, 3), stream(1, 2, 3, 4, 4), stream(1, 9, 3, 4), stream(error="UnavailableError: gone")]
    found = damage(streams, REFERENCE)
    assert found == Damage(num_failed=1, num_lost=1, num_doubled=1, num_changed=1)
    assert not found.none


def test_a_pause_is_the_longest_gap_around_or_right_after_a_time() -> None:
    paused = Stream(index=0, times_s=[0.0, 1.0, 1.1, 4.0, 4.1])
    assert paused.pause_after(1.0) == 2.9
    assert paused.pause_after(0.5) == 1.0
    assert paused.pause_after(5.0) is None


def test_kills_and_other_faults_take_turns_over_all_tiers_and_a_seed_repeats_them() -> None:
    plan = list(islice(planned(list(FAULTS), NAMES, random.Random(3)), 24))
    assert [fault.kind == KILL for fault in plan] == [True, False] * 12
    assert {fault.role for fault in plan if fault.kind == KILL} == set(NAMES)
    assert {"v0", "v1"} <= {fault.name for fault in plan}
    assert plan == list(islice(planned(list(FAULTS), NAMES, random.Random(3)), 24))
    assert {fault.kind for fault in islice(planned([KILL], NAMES, random.Random(3)), 9)} == {KILL}


def test_every_fault_can_happen_to_some_role() -> None:
    for kind, (_, roles) in FAULTS.items():
        assert set(roles) <= set(NAMES), kind


def test_requests_are_greedy_and_sampled_by_turns_and_tell_their_seeds_apart() -> None:
    requests = mixed_requests(4, 8)
    assert [request.sampling.temperature > 0 for request in requests] == [False, True, False, True]
    assert len({request.sampling.seed for request in requests}) == 4


def test_lengths_are_counted_from_a_token_on_and_without_the_cut_off_last_step() -> None:
    steps = Stream(index=0, piece_lens=[4, 4, 4, 1, 9], times_s=[0.0, 0.1, 2.0, 2.1, 2.2])
    assert _first_token_after_pause(steps, 0.05) == 8
    assert _mean_length([steps], [8]) == 2.5
    assert SETTLING_TOKENS == 16

"""What benches of failures count as a pause, and as a course of events."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import islice

from loadtest.faults import FAULTS, KEY_FILE, KILL, POISONER, VALKEY, planned
from loadtest.histories import Event, History, Kind
from loadtest.resuming_http import http_body
from loadtest.steadfast import long_request, mixed_requests

NAMES = {
    "verifier": ["v0", "v1"],
    "gateway": ["g0"],
    "drafter": ["d0"],
    VALKEY: [VALKEY],
    POISONER: [POISONER],
    KEY_FILE: [KEY_FILE],
}


def pieces(*times_s: float) -> History:
    return History(events=[Event(kind=Kind.PIECE, at_s=at_s, token_ids=(1,)) for at_s in times_s])


def test_a_pause_is_the_longest_gap_around_or_right_after_a_time() -> None:
    paused = pieces(0.0, 1.0, 1.1, 4.0, 4.1)
    assert paused.pause_after(1.0) == 2.9
    assert paused.pause_after(0.5) == 1.0
    assert paused.pause_after(5.0) is None


def test_each_round_of_faults_has_every_kind_and_kills_in_between_over_all_tiers() -> None:
    kinds = list(FAULTS)
    num_others = len(kinds) - 1
    num_kills = math.ceil(num_others / 3)
    length = num_others + num_kills
    plan = list(islice(planned(kinds, NAMES, random.Random(3)), 3 * length))
    for start in range(0, len(plan), length):
        found = Counter(fault.kind for fault in plan[start : start + length])
        assert found == Counter(kinds) + Counter({KILL: num_kills - 1})
    assert {fault.role for fault in plan if fault.kind == KILL} == {"verifier", "gateway", "drafter", VALKEY}
    assert {"v0", "v1"} <= {fault.name for fault in plan}


def test_a_seed_repeats_the_course_of_events_and_another_one_changes_it() -> None:
    def course(seed: int) -> list[str]:
        return [fault.kind for fault in islice(planned(list(FAULTS), NAMES, random.Random(seed)), 40)]

    assert course(3) == course(3)
    assert course(3) != course(4)


def test_kinds_that_are_not_asked_for_do_not_happen() -> None:
    assert {fault.kind for fault in islice(planned([KILL], NAMES, random.Random(3)), 9)} == {KILL}
    asked = ["cut", "drain", KILL]
    assert {fault.kind for fault in islice(planned(asked, NAMES, random.Random(3)), 9)} == set(asked)


def test_every_fault_can_happen_to_some_role() -> None:
    for kind, (_, roles) in FAULTS.items():
        assert set(roles) <= set(NAMES), kind


def test_requests_are_greedy_and_sampled_by_turns_and_tell_their_seeds_apart() -> None:
    requests = mixed_requests(4, 8)
    assert [request.sampling.temperature > 0 for request in requests] == [False, True, False, True]
    assert len({request.sampling.seed for request in requests}) == 4


def test_a_long_request_fills_the_context_and_goes_through_the_other_door_with_the_same_tokens() -> None:
    request = long_request(5, 160, 2048)
    assert len(request.prompt_token_ids.ids) + request.sampling.max_tokens == 2048
    body = http_body(request)
    assert body["prompt"] == list(request.prompt_token_ids.ids)
    assert (body["seed"], body["max_tokens"], body["temperature"]) == (5, 160, request.sampling.temperature)
    assert (body["ignore_eos"], body["speculation"]) == (True, {"acceptance": "coupled"})

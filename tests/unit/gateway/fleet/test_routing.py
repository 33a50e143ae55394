"""Who gets the next session: who holds most of the prompt, within a bound on the load."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.pages import BLOCK_SIZE
from paceline.gateway.fleet.routing import AFFINITY, Router, able_verifiers, within_bound
from paceline.store.base import Replica
from tests.support.replicas import replica

A, B, C = replica("a"), replica("b"), replica("c")
GATEWAYS = replica("g1", "gateway"), replica("g2", "gateway")


def text(seed: int, num_blocks: int = 8) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(300) for _ in range(num_blocks * BLOCK_SIZE)]


def place(
    router: Router,
    replicas: Sequence[Replica],
    token_ids: Sequence[int] = (),
    in_flight: Mapping[str, int] | None = None,
) -> str | None:
    able = able_verifiers(replicas, "tiny")
    return router.place(replicas, able, token_ids, in_flight or {}).replica_id if able else None


def test_a_prompt_shorter_than_a_block_goes_to_the_least_loaded_verifier_relative_to_its_size() -> None:
    small, large = (
        replica("small", num_sessions=2, max_sessions=4),
        replica("large", num_sessions=4, max_sessions=16),
    )
    assert place(Router(), [small, large], [1, 2, 3]) == "large"
    assert place(Router(), [*GATEWAYS, small, large], [1, 2, 3]) == "large"


def test_sessions_of_this_gateway_and_of_others_count() -> None:
    assert place(Router(), [A, B], in_flight={"a": 1}) == "b"
    router = Router()
    fleet = [replica("a", num_sessions=3), replica("b", num_sessions=2)]
    assert place(router, fleet, in_flight={"a": 3}) == "b"
    # Of b's sessions two are others': with two of ours since the last reading it has four.
    assert place(router, fleet, in_flight={"a": 3, "b": 2}) == "a"


def test_a_draining_verifier_and_one_of_another_model_and_a_drafter_are_not_chosen() -> None:
    others = replica("a", draining=True), replica("b", model="other"), replica("c", "drafter")
    assert place(Router(), others) is None
    assert place(Router(), [*others, replica("d", num_sessions=8)]) == "d"
    router = Router()
    router.follow(A, text(1))
    assert place(router, [A, B], text(1)) == "a"
    assert place(router, [replica("a", draining=True), B], text(1)) == "b"


def test_the_next_turn_goes_where_prompt_and_answer_are() -> None:
    router, fleet = Router(), [A, B]
    assert place(router, fleet, text(1), in_flight={"a": 1}) == "b"
    router.follow(B, text(1) + text(2))
    assert place(router, fleet, text(1) + text(2) + text(3)) == "b"


def test_more_of_the_prompt_wins_over_less_and_the_load_decides_among_equals() -> None:
    router = Router()
    router.follow(A, text(1))
    router.follow(B, text(1) + text(2))
    assert place(router, [A, B], text(1) + text(2) + text(3)) == "b"
    router = Router()
    router.follow(replica("b", model="other"), text(1))
    assert place(router, [A, B], text(1)) == "a", "the same text for another model counts for nothing"
    router, fleet = Router(), [A, B, C]
    for name in "abc":
        router.follow(replica(name), text(1))
    assert place(router, fleet, text(1) + text(2), in_flight={"a": 1, "b": 1}) == "c"


@pytest.mark.parametrize(("num_sessions", "chosen"), [(4, "b"), (5, "b"), (6, "a")])
def test_a_verifier_that_holds_the_whole_prompt_may_have_twice_its_fair_share(num_sessions: int, chosen: str) -> None:
    router, fleet = Router(), [A, B, C]
    router.follow(B, text(1))
    # Three with 1, 1 and n sessions and the new one: the fair share is (n + 3) / 3, and n < 2 (n + 3) / 3 up to n = 5.
    assert place(router, fleet, text(1), {"a": 1, "b": num_sessions, "c": 1}) == chosen


def test_a_shared_beginning_does_not_draw_all_conversations_to_one_verifier() -> None:
    router, fleet, in_flight = Router(), [A, B, C], Counter[str]()
    for conversation in range(60):
        chosen = place(router, fleet, text(0, 1) + text(conversation + 1, 20), in_flight)
        assert chosen is not None
        in_flight[chosen] += 1
    assert sorted(in_flight.values()) == [20, 20, 20]


def test_gateways_choose_alike_among_equals_and_behind_a_beginning_that_all_conversations_share() -> None:
    fleet = [*GATEWAYS, A, B, C]
    chosen = [place(Router(), fleet, text(seed)) for seed in range(60)]
    assert [place(Router(), list(fleet), text(seed) + text(99)) for seed in range(60)] == chosen
    assert min(Counter(chosen)[name] for name in "abc") >= 10
    routers = Router(), Router()
    for router in routers:
        for name in "abc":
            router.follow(replica(name), text(0))
    first = [place(routers[0], fleet, text(0) + text(seed)) for seed in range(1, 61)]
    second = [place(routers[1], fleet, text(0) + text(seed) + text(99)) for seed in range(1, 61)]
    assert first == second
    assert min(Counter(first)[name] for name in "abc") >= 10


def test_of_verifiers_that_hold_as_much_those_of_the_gateways_zone_go_first() -> None:
    fleet = [replica("a", zone="z1"), replica("b", zone="z2")]
    for zone, near in (("z1", "a"), ("z2", "b")):
        assert place(Router(zone=zone), fleet) == near
        assert {place(Router(zone=zone), [*GATEWAYS, *fleet], text(seed)) for seed in range(20)} == {near}


def test_a_verifier_of_the_zone_gets_no_more_than_its_share_and_none_for_what_another_holds() -> None:
    router, in_flight = Router(zone="z1"), Counter[str]()
    fleet = [replica("a", zone="z1"), replica("b", zone="z2")]
    for seed in range(10):
        in_flight[place(router, fleet, text(seed), in_flight) or ""] += 1
    assert in_flight == {"a": 5, "b": 5}
    router.follow(fleet[1], text(99))
    assert place(router, fleet, text(99), in_flight) == "b"


def test_a_verifier_that_left_moves_its_own_conversations_only() -> None:
    whole, rest = [*GATEWAYS, A, B, C], [*GATEWAYS, A, B]
    before = [place(Router(), whole, text(seed)) for seed in range(60)]
    after = [place(Router(), rest, text(seed)) for seed in range(60)]
    assert all(old in ("c", new) for old, new in zip(before, after, strict=True))


def test_a_verifier_that_left_and_came_back_or_that_failed_is_known_for_nothing() -> None:
    for loses in (lambda router: place(router, [A]), lambda router: router.forget("b")):
        router = Router()
        router.follow(B, text(1))
        assert place(router, [A, B], text(1)) == "b"
        loses(router)
        assert place(router, [A, B], text(1)) == "a"


@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 64), st.floats(0, 1)), min_size=1, max_size=8),
)
def test_the_least_loaded_is_always_within_the_bound_and_nobody_beyond_it_is(
    drawn: list[tuple[int, int, float]],
) -> None:
    fleet = [replica(str(number), max_sessions=size) for number, (_, size, _) in enumerate(drawn)]
    sessions = {str(number): has for number, (has, _, _) in enumerate(drawn)}
    held = {str(number): share for number, (_, _, share) in enumerate(drawn)}
    within = within_bound(fleet, sessions, held)
    assert min(fleet, key=lambda it: sessions[it.replica_id] / max(1, it.max_sessions)) in within
    total, size = 1 + sum(sessions.values()), sum(max(1, it.max_sessions) for it in fleet)
    for it in within:
        fair = total * max(1, it.max_sessions) / size
        assert sessions[it.replica_id] < (1 + AFFINITY * held[it.replica_id]) * fair * (1 + 1e-9)

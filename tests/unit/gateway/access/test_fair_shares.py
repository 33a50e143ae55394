"""Places of a gateway among API keys: none is wasted on nobody, none is taken from a newcomer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.gateway.access.fair_shares import fits

PLACES = st.integers(1, 300)
HELD = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 60))


def take_all(held: dict[str, int], key: str, *, num_keys: int, total: int) -> int:
    """Lets a key take places one by one until it is refused; returns how many it holds then."""
    while fits(1, key=key, held=held, num_keys=num_keys, total=total):
        held[key] = held.get(key, 0) + 1
    return held[key]


@given(max_sessions=PLACES, held=st.integers(0, 300), wanted=st.integers(1, 300))
def test_a_key_without_rivals_may_take_all_places(max_sessions: int, held: int, wanted: int) -> None:
    fit = fits(wanted, key="a", held={"a": held}, num_keys=1, total=max_sessions)
    assert fit == (held + wanted <= max_sessions)


@given(max_sessions=PLACES, num_keys=st.integers(2, 50))
def test_what_fits_at_all_fits_while_nobody_holds_anything(max_sessions: int, num_keys: int) -> None:
    """128 choices at a gateway with 128 places were told to come again, for ever."""
    assert fits(max_sessions, key="a", held={"b": 0}, num_keys=num_keys, total=max_sessions)
    assert not fits(max_sessions + 1, key="a", held={}, num_keys=num_keys, total=max_sessions)


@given(max_sessions=PLACES, held=HELD, wanted=st.integers(1, 60), num_keys=st.integers(1, 50))
def test_no_more_places_are_given_than_there_are(
    max_sessions: int, held: dict[str, int], wanted: int, num_keys: int
) -> None:
    if fits(wanted, key="a", held=held, num_keys=num_keys, total=max_sessions):
        assert sum(held.values()) + wanted <= max_sessions


@given(max_sessions=st.integers(2, 300), num_keys=st.integers(2, 100))
def test_a_greedy_key_leaves_room_for_a_newcomer_and_not_more_than_an_eighth(max_sessions: int, num_keys: int) -> None:
    held: dict[str, int] = {}
    taken = take_all(held, "greedy", num_keys=num_keys, total=max_sessions)
    assert max_sessions - taken == -(-max_sessions // 8)
    assert fits(1, key="newcomer", held=held, num_keys=num_keys, total=max_sessions)


@given(max_sessions=PLACES, held=HELD, num_keys=st.integers(8, 50))
def test_a_key_below_its_share_is_only_ever_refused_for_want_of_a_free_place(
    max_sessions: int, held: dict[str, int], num_keys: int
) -> None:
    active = {key for key, count in held.items() if count} | {"a"}
    if held.get("a", 0) + 1 <= max_sessions // (len(active) + 1):
        free = max_sessions - sum(held.values())
        assert fits(1, key="a", held=held, num_keys=num_keys, total=max_sessions) == (free >= 1)


def test_keys_that_all_want_everything_end_with_equal_parts_even_if_the_greedy_one_asks_first() -> None:
    held: dict[str, int] = {}
    take_all(held, "greedy", num_keys=2, total=8)
    assert held == {"greedy": 7}
    take_all(held, "late", num_keys=2, total=8)
    assert held == {"greedy": 7, "late": 1}
    for _ in range(3):
        held["greedy"] -= 1
        take_all(held, "greedy", num_keys=2, total=8)
        take_all(held, "late", num_keys=2, total=8)
    assert held == {"greedy": 4, "late": 4}


def test_rivals_who_want_little_cost_an_eighth_at_most() -> None:
    held = {"a": 1, "b": 1, "c": 1, "greedy": 0}
    take_all(held, "greedy", num_keys=4, total=32)
    assert sum(held.values()) == 32 - 4
    take_all(rest := {"a": 1, "greedy": 0}, "greedy", num_keys=100, total=32)
    assert sum(rest.values()) == 32 - 4
    assert [fits(n, key="a", held={"b": 1}, num_keys=2, total=8) for n in (4, 6, 7)] == [True, True, False]

"""Sessions leave drafters that are gone, and go where there are fewest."""

from __future__ import annotations

from paceline.core.messages import ModelIdentity
from paceline.store.base import Replica
from paceline.verifier.pairing import DOWN_S, Streams, able_drafters, next_drafter, spare_drafter

VOCABULARY = "v"
TARGET = ModelIdentity(name="target", vocab_hash=VOCABULARY, vocab_size=300, context_len=64)


def drafter(name: str, *, vocab_hash: str = VOCABULARY, draining: bool = False, num_sessions: int = 0) -> Replica:
    identity = ModelIdentity(name="draft", vocab_hash=vocab_hash, vocab_size=300, context_len=64)
    return Replica(
        replica_id=name,
        role="drafter",
        address=name,
        identity=identity,
        draining=draining,
        num_sessions=num_sessions,
    )


def paired(current: str, *drafters: Replica, down_s: dict[str, float] | None = None, **num_sessions: int) -> str:
    streams = Streams(down_s=down_s or {}, num_sessions=num_sessions)
    return next_drafter(current, able_drafters(drafters, TARGET), streams)


def test_a_session_stays_where_it_is_as_long_as_it_is_well_there() -> None:
    assert paired("a", drafter("a", num_sessions=9), drafter("b"), down_s={"a": 0.0, "b": 0.0}) == "a"


def test_a_stream_that_is_being_dialled_is_waited_for_a_little() -> None:
    assert paired("a", drafter("a"), drafter("b"), down_s={"a": DOWN_S / 2}) == "a"


def test_a_session_leaves_a_drafter_whose_stream_is_down() -> None:
    assert paired("a", drafter("a"), drafter("b"), down_s={"a": DOWN_S}) == "b"


def test_a_session_leaves_a_drafter_that_drains_or_has_left_the_registry() -> None:
    assert paired("a", drafter("a", draining=True), drafter("b"), down_s={"a": 0.0}) == "b"
    assert paired("a", drafter("b"), down_s={"a": 0.0}) == "b"


def test_a_session_without_a_drafter_gets_one_as_soon_as_one_is_there() -> None:
    assert paired("") == ""
    assert paired("", drafter("b")) == "b"


def test_with_nobody_better_a_session_keeps_its_drafter_and_may_find_it_again() -> None:
    assert paired("a", down_s={"a": 5.0}) == "a"
    assert paired("a", drafter("a"), drafter("b"), down_s={"a": 5.0, "b": 5.0}) == "a"


def test_of_several_the_one_with_the_least_sessions_is_taken_own_ones_included() -> None:
    assert paired("x", drafter("a", num_sessions=3), drafter("b", num_sessions=2)) == "b"
    assert paired("x", drafter("a", num_sessions=3), drafter("b"), b=4) == "a"


def test_a_drafter_of_another_vocabulary_is_never_taken() -> None:
    assert paired("", drafter("a", vocab_hash="w")) == ""


def spare(*drafters: Replica, **num_sessions: int) -> str:
    return spare_drafter(able_drafters(drafters, TARGET), Streams(down_s={}, num_sessions=num_sessions))


def test_a_stream_is_kept_to_the_least_loaded_drafter_that_no_session_has() -> None:
    assert spare(drafter("a"), drafter("b", num_sessions=2), drafter("c"), a=3) == "c"
    assert spare(drafter("a"), a=3) == ""
    assert spare(drafter("a"), drafter("b"), drafter("c"), a=3, b=1) == ""
    assert spare(drafter("a"), drafter("b"), a=3, gone=1) == "b"

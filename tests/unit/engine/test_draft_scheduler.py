"""The drafter's engine on a device that counts: whose prompts are read, which trees grow, and what verifiers hear."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np
import pytest

from paceline.core.messages import CloseSession, CommittedStates, Drafts, LaggingSession
from paceline.core.pages import BLOCK_SIZE
from paceline.core.params import SamplingParams
from paceline.engine import draft_scheduler
from paceline.engine.draft_plan import MOST_FRESH
from paceline.engine.draft_scheduler import LEAST_READ, QUIET_S, SHARE_OF_OTHERS, DraftPace
from paceline.engine.pending import HostPending
from paceline.forest import NONE
from paceline.forest.drafting import MAX_DEPTH
from tests.support.counting import VOCAB_SIZE, WRONG, Drafter, text


def quiet(drafter: Drafter) -> None:
    """No verifier says anything for so long that sessions may lose their pages to others."""
    drafter.clock.now_s += 2 * QUIET_S


def close(drafter: Drafter, name: str) -> CloseSession:
    return CloseSession(number=drafter.number(name))


# Reading and growing


def test_prompts_are_read_in_chunks_beside_trees_that_grow() -> None:
    drafter = Drafter(max_num_batched_tokens=32)
    drafter.open("growing", room=20)
    drafter.step()
    drafter.open("reading", prompt_len=100)
    chunks = []
    while not drafter.tree("reading"):
        plan = drafter.step()
        assert [each.session.session_id for each in plan.growing] == ["growing"]
        chunks += [each.stop - each.start for each in plan.catching_up]
        assert [each.expands for each in plan.catching_up] == [len(chunks) == 4], "only the last knows what follows"
    assert chunks == [32, 32, 32, 4]
    drafter.run()
    assert drafter.session("reading").pages.num_computed == 100
    assert drafter.guessed("reading") == text(100, 4)


def test_a_long_prompt_keeps_nobody_waiting_who_lacks_a_token_or_two() -> None:
    drafter = Drafter(max_num_batched_tokens=32)
    drafter.open("long", prompt_len=200)
    drafter.open("short")
    plan = drafter.step()
    assert [(each.session.session_id, each.stop) for each in plan.catching_up] == [("short", 5), ("long", 27)]
    drafter.commit("short", WRONG)
    assert [each.session.session_id for each in drafter.step().catching_up] == ["short", "long"]


def test_a_prompt_that_is_known_is_not_read_again_and_others_do_not_see_it() -> None:
    drafter = Drafter()
    drafter.open("first", prompt_len=40, cache_salt="one")
    drafter.run()
    drafter.open("same", prompt_len=40, cache_salt="one")
    drafter.open("other", prompt_len=40, cache_salt="another")
    assert {each.session.session_id: each.start for each in drafter.step().catching_up} == {"same": 32, "other": 0}


def test_the_most_promising_nodes_of_all_sessions_grow_first() -> None:
    drafter = Drafter(max_rows=1, sure=lambda at: np.where(at >= 100, 0.9, 0.7))
    drafter.open("unsure", room=20)
    drafter.open("sure", prompt_len=105, room=20)
    drafter.step()
    grown = [next(iter(drafter.step().growing)).session.session_id for _ in range(6)]
    # 0.9, 0.81 and 0.729 lie above 0.7, and so does 0.656 above 0.49.
    assert grown == ["sure", "sure", "sure", "unsure", "sure", "sure"]


def test_sessions_that_are_alike_share_the_rows_of_a_step_evenly() -> None:
    drafter = Drafter(max_rows=4, max_num_seqs=10)
    names = [f"s{index}" for index in range(10)]
    for name in names:
        drafter.open(name, room=20)
    drafter.step()
    for _ in range(25):
        assert len(drafter.step().growing) == 4
    assert {len(drafter.tree(name)) for name in names} == {11}


def test_no_session_has_more_rows_of_a_step_than_its_share() -> None:
    drafter = Drafter(width=2, max_rows=16, max_rows_per_session=3)
    drafter.open("s", room=100)
    assert [len(drafter.step().growing) for _ in range(4)] == [0, 2, 3, 3]


# Several verifiers


def test_a_verifier_with_many_sessions_leaves_another_its_share_of_rows_however_good_its_own_are() -> None:

    def sure(at: np.ndarray) -> np.ndarray:
        return np.where(at >= 100, 0.9, 0.7)

    drafter = Drafter(max_rows=8, max_num_batched_tokens=2048, num_blocks=128, sure=sure)
    for index in range(10):
        drafter.open(f"better{index}", prompt_len=100, room=20)
    drafter.open("worse", room=20, link=2)
    drafter.step()
    grown = [[each.session.link for each in drafter.step().growing] for _ in range(4)]
    assert [len(each) for each in grown] == [8] * 4, "a share that is not used is others'"
    assert [each.count(2) for each in grown] == [1] * 4


def test_prompts_of_a_burst_take_turns_with_those_of_another_verifier() -> None:
    drafter = Drafter(max_num_batched_tokens=40, max_num_seqs=16, num_blocks=128)
    for index in range(10):
        drafter.open(f"burst{index}", prompt_len=40)
    drafter.open("other", prompt_len=60, link=2)
    read = [each.session.session_id for _ in range(4) for each in drafter.step().catching_up]
    assert read == ["burst0", "other", "burst1", "other", "burst2"]


def test_beside_another_verifiers_rounds_a_prompt_is_read_in_steps_that_take_a_part_of_a_round() -> None:
    drafter = Drafter(max_num_batched_tokens=1000, num_blocks=1000, max_num_seqs=64)
    rounds(drafter, seconds=0.1, level_s=0.001, links=(1, 2))
    while drafter.scheduler.has_work:
        drafter.step(0.001)
    for index in range(40):
        drafter.open(f"prompt{index}", prompt_len=100)
    chunks = []
    # A row takes 0.1 ms.
    for seconds in (0.1, 0.015, 0.015):
        plan = drafter.step(seconds)
        chunks.append(sum(each.stop - each.start for each in plan.catching_up))
    assert chunks[0] == 1000, "nothing is known of prompts yet"
    assert chunks[1:] == [pytest.approx(150, abs=20)] * 2


@pytest.mark.parametrize(("held", "kept"), [(1, 2), (2, 2)])
def test_a_verifier_gets_places_up_to_an_equal_share_from_the_one_with_most(held: int, kept: int) -> None:
    drafter = Drafter(max_num_seqs=4)
    for index in range(4):
        drafter.open(f"busy{index}")
    for index in range(held + 1):
        drafter.open(f"late{index}", link=2)
    counts = [link for link, _ in drafter.scheduler._sessions]
    assert (counts.count(1), counts.count(2)) == (4 - kept, kept)
    assert drafter.session("busy0") is not None, "the newest give way"
    drafter.said.clear()
    drafter.commit("busy3", WRONG, base_len=5)
    drafter.run()
    assert not any(isinstance(each, LaggingSession) for each in drafter.said.get(1, ())), "it is not asked for in vain"


def test_a_verifier_gets_pages_up_to_an_equal_share_from_the_one_with_most() -> None:
    drafter = Drafter(num_blocks=8)
    for index in range(4):
        drafter.open(f"busy{index}", prompt_len=2 * BLOCK_SIZE - 4)
        drafter.run()
    drafter.open("late", prompt_len=2 * BLOCK_SIZE - 4, link=2)
    drafter.run()
    assert drafter.tree("late", link=2)
    assert [bool(drafter.session(f"busy{index}").pages.blocks) for index in range(4)] == [False, True, True, True]


# Levels


def rounds(loop: Drafter, *, seconds: float, level_s: float, links: Sequence[int] = (1,)) -> None:
    """Verifiers commit a token that was not guessed in turn, so often that the drafter knows their pace by now."""
    for link in links:
        loop.open("s", room=64, link=link)
    for _ in range(30):
        for link in links:
            begun_s = loop.clock.now_s
            loop.commit("s", WRONG, room=64, link=link)
            loop.step(level_s)
            loop.clock.now_s = begun_s + seconds / len(links)


def test_a_verifier_that_waits_gets_the_guesses_that_pay_in_one_message() -> None:
    loop = Drafter(max_levels=16)
    rounds(loop, seconds=0.1, level_s=0.001)
    loop.said.clear()
    loop.commit("s", WRONG, room=64)
    assert loop.step(0.001).num_levels == 16
    (message,) = loop.said[1]
    assert message.num_nodes == 16
    assert loop.guessed("s") == text(len(loop.session("s").tokens), 16)


@pytest.mark.parametrize(("share_of_round", "levels"), [(1 / 200, 16), (1 / 20, 7), (1 / 5, 3), (1.0, 1)])
def test_the_more_a_level_takes_of_a_round_the_fewer_a_verifier_waits_for(share_of_round: float, levels: int) -> None:
    loop = Drafter(max_levels=16, sure=lambda _: 0.8)
    rounds(loop, seconds=0.2, level_s=0.2 * share_of_round)
    loop.commit("s", WRONG, room=64)
    assert loop.step(0.0).num_levels == levels


def test_what_is_drafted_ahead_lasts_a_small_part_of_a_round() -> None:
    loop = Drafter(max_levels=16)
    rounds(loop, seconds=0.064, level_s=0.002)
    loop.commit("s", WRONG, room=64)
    asked, *ahead = (loop.step(0.002).num_levels for _ in range(5))
    assert asked > 4
    assert set(ahead) == {2}, "a sixteenth of 64 ms are two levels of 2 ms"


def test_a_price_bounds_the_levels() -> None:
    loop = Drafter(max_levels=16, sure=lambda _: 0.5)
    loop.open("s", room=64, price=0.2)
    loop.scheduler.trees.forest.arrays.trees["share"][loop.session("s").row] = 0.5
    assert loop.step(0.0).num_levels == 2, "a half to the third is not worth it"


def test_where_several_verifiers_are_served_no_call_keeps_the_others_waiting_for_long() -> None:
    loop = Drafter(max_levels=16)
    rounds(loop, seconds=0.032, level_s=0.002, links=(1, 2))
    loop.commit("s", WRONG, room=64)
    assert loop.step(0.002).num_levels <= 4


def test_levels_beyond_the_room_the_context_or_the_slots_are_not_drafted() -> None:
    loop = Drafter(max_levels=16, context_len=12)
    loop.open("s", prompt_len=5, room=64)
    loop.run()
    assert loop.guessed("s") == text(5, 7)
    loop.commit("s", WRONG, room=3)
    loop.run()
    assert loop.guessed("s") == text(6, 3)
    few = Drafter(max_levels=16, num_blocks=4)
    few.open("s", room=64)
    few.run()
    assert few.scratch.num_free == 0
    assert len(few.kv("s")) == few.scratch.num_used


def test_a_session_that_is_served_alone_is_drafted_for_level_by_level() -> None:
    loop = Drafter(max_levels=16)
    loop.open("s", sampling=SamplingParams(max_tokens=50, temperature=0.0, presence_penalty=0.1))
    assert loop.step().num_levels == 1
    loop.run()
    assert loop.guessed("s") == text(5, 4)


def test_by_default_each_session_has_a_row_of_a_step() -> None:
    loop = Drafter(max_rows=0, max_num_seqs=40, num_blocks=400)
    for index in range(40):
        loop.open(f"s{index}", room=20)
    loop.step()
    assert len(loop.step().growing) == 40


# Commits


def test_a_commit_that_hits_keeps_the_subtree_and_its_kv() -> None:
    drafter = Drafter()
    drafter.open("s")
    drafter.run()
    assert drafter.guessed("s") == text(5, 4)
    session = drafter.session("s")
    slots = drafter.kv("s")[:2]
    drafter.commit("s", 5, 6)
    assert drafter.moved == [(slots[0], session.pages.slot(5)), (slots[1], session.pages.slot(6))]
    assert drafter.tree("s") == [7, 8]
    plan = drafter.step()
    assert plan.catching_up == [], "nothing of it is computed again"
    drafter.run()
    assert drafter.guessed("s") == [9, 10]
    assert drafter.scratch.num_used == len(drafter.kv("s"))


def test_a_commit_that_misses_empties_the_tree_and_keeps_what_was_right() -> None:
    drafter = Drafter()
    drafter.open("s")
    drafter.run()
    drafter.commit("s", 5, WRONG)
    assert len(drafter.tree("s")) == drafter.scratch.num_used == 0
    assert len(drafter.moved) == 1
    drafter.said.clear()
    (part,) = drafter.step().catching_up
    assert (part.start, part.stop) == (6, 7)
    drafter.run()
    assert drafter.guessed("s") == text(7, 4)


# Price and room


def test_at_a_price_of_1_prompts_are_read_and_no_tree_grows() -> None:
    drafter = Drafter()
    drafter.open("s", prompt_len=20, price=1.0)
    plan = drafter.step()
    assert (plan.num_rows, plan.catching_up[0].expands) == (20, False)
    assert not drafter.scheduler.has_work
    drafter.commit("s", 20, price=1.0)
    assert drafter.step().num_rows == 1, "at rest it reads on"
    assert drafter.said == {}
    drafter.commit("s", 21, price=0.1)
    drafter.run()
    assert drafter.guessed("s") == text(22, 4)


@pytest.mark.parametrize("max_levels", [1, 16, 100])
def test_no_row_has_a_longer_path_than_devices_attend(max_levels: int) -> None:
    drafter = Drafter(max_levels=max_levels)
    drafter.open("s", room=100)
    longest = 0
    while drafter.scheduler.has_work:
        plan = drafter.step()
        below = [int((plan.kv[:, index] != NONE).sum()) for index in range(plan.kv.shape[1])]
        depths = plan.starts.depths.tolist()
        longest = max(longest, *(at + more for at, more in zip(depths, below, strict=True)), 0)
    assert longest == MAX_DEPTH
    assert len(drafter.tree("s")) == MAX_DEPTH + 1


def test_a_session_is_left_alone_once_its_text_is_beyond_the_context() -> None:
    """Audit 4, b06: a message opened a session of 15 million tokens, and commits made it grow without a bound."""
    drafter = Drafter(context_len=8)
    drafter.open("other", prompt_len=5)
    drafter.open("long", prompt_len=9)
    drafter.commit("long", 9, base_len=9)
    drafter.open("s", prompt_len=5)
    drafter.commit("s", 5, 6, 7)
    assert drafter.scheduler.num_sessions == 2
    drafter.commit("s", 8)
    drafter.commit("s", 9, base_len=9)
    assert drafter.scheduler.num_sessions == 1
    drafter.run()
    assert drafter.lagging() == []
    assert not drafter.broken
    drafter.open("s", prompt_len=6)
    drafter.run()
    assert drafter.guessed("s"), "opened anew, it has its place"


def test_refused_sessions_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_scheduler, "MOST_REFUSED", 2)
    drafter = Drafter(context_len=8)
    for name in ("a", "b", "c"):
        drafter.open(name, prompt_len=9)
    assert len(drafter.scheduler._refused) == 2


# Pages and slots


def test_a_step_that_does_not_fit_the_memory_costs_its_sessions_guesses_until_their_next_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = Drafter(max_levels=4)
    drafter.open("reads", prompt_len=5, room=20)
    with monkeypatch.context() as patched:
        patched.setattr(drafter.device, "draft", Mock(side_effect=MemoryError("no room")))
        assert drafter.step().num_levels == 4
    drafter.open("grows", prompt_len=6, room=20)
    drafter.step()
    with monkeypatch.context() as patched:
        patched.setattr(drafter.device, "draft", Mock(side_effect=MemoryError("no room")))
        assert len(drafter.step().growing) == 1
    assert not drafter.scheduler.has_work
    assert (drafter.scratch.num_used, drafter.pool.num_used) == (0, 0)
    drafter.said.clear()
    drafter.commit("reads", 5, room=4)
    drafter.run()
    assert drafter.guessed("reads") == text(6, 4)


def test_logits_that_cannot_be_fetched_cost_guesses_until_the_next_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Drafter()
    drafter.open("s", sampling=SamplingParams(max_tokens=50, temperature=0.0, presence_penalty=0.1))
    with monkeypatch.context() as patched:
        patched.setattr(HostPending, "logits", Mock(side_effect=MemoryError("no room")))
        drafter.step()
    assert not drafter.scheduler.has_work
    assert (drafter.scratch.num_used, drafter.pool.num_used) == (0, 0)
    drafter.commit("s", 5)
    drafter.run()
    assert drafter.guessed("s") == text(6, 4)


def test_a_session_that_finds_no_pages_takes_those_of_the_quietest() -> None:
    drafter = Drafter(num_blocks=4)
    drafter.open("a", prompt_len=30)
    drafter.clock.now_s += 0.1
    drafter.open("b", prompt_len=30)
    drafter.run()
    quiet(drafter)
    drafter.open("c", prompt_len=30)
    drafter.run()
    a, b, c = (drafter.session(name) for name in "abc")
    assert (a.pages.blocks, drafter.kv("a"), drafter.tree("a")) == ([], [], [])
    assert len(drafter.tree("b")) == len(drafter.tree("c")) == 4
    drafter.commit("a", 30)
    drafter.run()
    assert len(drafter.tree("a")) == 4, "with its next commit it is back"
    assert b.pages.blocks == [], "now the quietest gives way"
    assert c.pages.num_computed == 30


def test_sessions_that_were_heard_of_just_now_keep_their_pages_and_one_more_waits_for_an_end() -> None:
    drafter = Drafter(num_blocks=4)
    for name in "ab":
        drafter.open(name, prompt_len=30)
    drafter.run()
    drafter.open("c", prompt_len=30)
    drafter.run()
    assert [drafter.session(name).pages.num_computed for name in "abc"] == [30, 30, 0]
    assert drafter.scheduler.lag_tokens == 0, "what cannot be computed is no lag"
    drafter.hear(close(drafter, "a"))
    assert drafter.scheduler.has_work
    drafter.run()
    assert drafter.session("c").pages.num_computed == 30


def test_who_is_read_in_a_step_keeps_its_pages_in_it() -> None:
    drafter = Drafter(num_blocks=2)
    for name in "abc":
        drafter.open(name, prompt_len=30)
        drafter.run()
    quiet(drafter)
    drafter.hear(close(drafter, "a"))
    plan = drafter.step()
    assert [each.session.session_id for each in plan.catching_up] == ["b"]
    assert len(drafter.session("b").pages.blocks) == 2


def test_nobody_gives_way_to_a_session_that_will_never_fit() -> None:
    drafter = Drafter(num_blocks=4)
    drafter.open("a", prompt_len=30)
    drafter.run()
    quiet(drafter)
    drafter.open("huge", prompt_len=4 * BLOCK_SIZE + 1)
    drafter.run()
    assert drafter.session("a").pages.num_computed == 30
    assert drafter.session("huge").pages.blocks == []


def test_without_slots_trees_stop_growing_and_go_on_when_a_commit_frees_some() -> None:
    drafter = Drafter(num_blocks=4)
    for name in ("a", "b"):
        drafter.open(name, room=100)
    drafter.run()
    assert drafter.scratch.num_free == 0
    before = len(drafter.tree("b"))
    drafter.commit("a", WRONG, room=0)
    drafter.run()
    assert len(drafter.tree("a")) == 0
    assert len(drafter.tree("b")) == before + 8


# What verifiers say, and in which order


def test_a_session_that_misses_commits_says_so_and_catches_up() -> None:
    drafter = Drafter()
    drafter.open("s", price=1.0)
    drafter.run()
    drafter.commit("s", 8, base_len=8)
    drafter.step()
    assert drafter.lagging() == [("s", 5)]
    drafter.commit("s", 5, 6, 7, 8, base_len=5, price=1.0)
    assert drafter.scheduler.lag_tokens == 4
    drafter.run()
    assert drafter.session("s").tokens == text(0, 9)
    assert drafter.scheduler.lag_tokens == 0


def test_a_commit_of_a_session_that_is_not_known_asks_for_it_unless_there_is_no_place() -> None:
    drafter = Drafter(max_num_seqs=1)
    drafter.commit("s", 9, base_len=9)
    drafter.step()
    assert drafter.lagging() == [("s", 0)]
    drafter.open("s")
    drafter.open("late")
    drafter.commit("late", 5, base_len=5)
    drafter.run()
    assert drafter.lagging() == []
    drafter.hear(close(drafter, "s"))
    drafter.commit("late", 6, base_len=6)
    drafter.step()
    assert drafter.lagging() == [("late", 0)], "there is a place now"


def test_what_is_said_twice_changes_nothing() -> None:
    drafter = Drafter()
    drafter.open("s")
    drafter.run()
    drafter.commit("s", 5)
    session = drafter.session("s")
    drafter.commit("s", 5, base_len=5)
    assert drafter.session("s") is session
    assert session.tokens == text(0, 6)
    assert drafter.broken == {}


def test_a_session_that_is_opened_again_starts_anew() -> None:
    drafter = Drafter()
    drafter.open("s", prompt_len=20)
    drafter.run()
    drafter.said.clear()
    drafter.open("s", prompt_len=9)
    drafter.run()
    assert drafter.guessed("s") == text(9, 4)
    assert drafter.pool.num_used == 1


def test_a_verifier_that_contradicts_itself_loses_its_stream_and_nobody_else_does() -> None:
    drafter = Drafter()
    for link in (1, 2):
        drafter.open("s", link=link)
    drafter.commit("s", 77, 78, base_len=3)
    drafter.run()
    assert list(drafter.broken) == [1]
    assert "contradicts" in str(drafter.broken[1])
    assert list(drafter.scheduler._sessions) == [(2, drafter.number("s", link=2))]
    assert drafter.guessed("s", link=2) == text(5, 4)


def test_a_verifier_that_goes_frees_all_that_its_sessions_held() -> None:
    drafter = Drafter()
    drafter.open("stays", link=2)
    drafter.run()
    pages, slots = drafter.pool.num_used, drafter.scratch.num_used
    for name in ("a", "b"):
        drafter.open(name, prompt_len=20)
    drafter.step()
    drafter.commit("unknown", 3, base_len=3)
    drafter.leave(1)
    assert (drafter.pool.num_used, drafter.scratch.num_used, drafter.scheduler.num_sessions) == (pages, slots, 1)
    drafter.said.clear()
    drafter.commit("stays", 5, link=2)
    drafter.run()
    assert set(drafter.said) == {2}, "to a stream that has ended nothing is said"


@pytest.mark.parametrize("at_first", [True, False])
def test_a_session_of_tokens_that_the_draft_model_lacks_is_left_alone_until_it_ends(at_first: bool) -> None:
    drafter = Drafter()
    if at_first:
        drafter.open("s", token_ids=(1, VOCAB_SIZE), prompt_len=2)
    else:
        drafter.open("s")
        drafter.commit("s", VOCAB_SIZE)
    drafter.commit("s", 9, base_len=9)
    assert drafter.run() == 0
    assert (drafter.scheduler.num_sessions, drafter.pool.num_used) == (0, 0)
    drafter.hear(close(drafter, "s"))
    drafter.commit("s", 9, base_len=9)
    drafter.step()
    assert drafter.lagging() == [("s", 0)]
    drafter.open("s")
    drafter.run()
    assert drafter.guessed("s") == text(5, 4)


def test_a_session_that_the_draft_model_cannot_draft_for_is_left_alone() -> None:
    drafter = Drafter()
    drafter.open("s", sampling=SamplingParams(max_tokens=50, logit_bias=((VOCAB_SIZE, 1.0),)))
    drafter.commit("s", 5, base_len=5)
    assert drafter.run() == 0
    assert drafter.scheduler.num_sessions == 0


# Rest


def test_with_nothing_to_do_there_is_no_step() -> None:
    drafter = Drafter()
    assert not drafter.scheduler.has_work
    drafter.open("s")
    assert drafter.run() == 4, "one for the prompt and its first guess, and one for each guess more"
    assert drafter.step().num_rows == 0
    drafter.said.clear()
    drafter.hear(close(drafter, "s"))
    assert not drafter.scheduler.has_work
    assert (drafter.pool.num_used, drafter.scratch.num_used, drafter.said) == (0, 0, {})


# Draft models that take the target's features

WIDTH = 2


def states(drafter: Drafter, name: str, start: int, count: int) -> CommittedStates:
    values = np.zeros((count, WIDTH), np.uint16).tobytes()
    return CommittedStates(number=drafter.number(name), start=start, width=WIDTH, values=values)


def test_rows_that_need_features_are_read_as_far_as_these_have_come() -> None:
    drafter = Drafter(feature_width=WIDTH)
    drafter.open("s", prompt_len=20)
    assert not drafter.scheduler.has_work
    drafter.hear(states(drafter, "s", 0, 10))
    (part,) = drafter.step().catching_up
    assert (part.start, part.stop, part.expands) == (0, 10, False)
    drafter.hear(states(drafter, "s", 10, 9))
    (part,) = drafter.step().catching_up
    assert (part.start, part.stop, part.expands) == (10, 19, True)
    drafter.run()
    assert isinstance(drafter.said[1][0], Drafts)


def test_a_session_that_lost_its_features_asks_for_them_once_there_is_a_place() -> None:
    drafter = Drafter(feature_width=WIDTH, num_blocks=4)
    for name in "ab":
        drafter.open(name, prompt_len=30)
        drafter.hear(states(drafter, name, 0, 29))
    drafter.run()
    quiet(drafter)
    drafter.open("c", prompt_len=30)
    drafter.hear(states(drafter, "c", 0, 29))
    drafter.run()
    assert drafter.session("a").pages.blocks == []
    drafter.said.clear()
    drafter.commit("a", 30)
    drafter.run()
    assert drafter.lagging() == [], "while there is none the verifier is not asked"
    drafter.hear(close(drafter, "b"))
    drafter.commit("a", 31, base_len=31)
    drafter.step()
    assert drafter.lagging() == [("a", 0)]
    assert list(drafter.scheduler._sessions) == [(1, drafter.number("c"))]


def test_after_a_slow_step_a_drafter_reads_less_of_a_prompt_at_once() -> None:
    drafter = Drafter(max_num_batched_tokens=64)
    drafter.open("s", prompt_len=200)
    read = [drafter.step(seconds).catching_up[0] for seconds in (4.0, 0.5, 0.2)]
    assert [each.stop - each.start for each in read] == [64, 16, 32]


@pytest.mark.parametrize("fixed_s", [1e-4, 2e-3, 4e-3, 8e-3])
def test_beside_other_verifiers_prompts_are_read_on_where_a_level_has_a_fixed_time(fixed_s: float) -> None:
    row_s, pace, now_s = 1e-4, DraftPace(), 0.0
    for _ in range(8):
        now_s += 0.02
        for link in (1, 2):
            pace.committed(link, now_s)
    for _ in range(100):
        pace.took(fixed_s, 1)
    rows = 256.0
    for _ in range(400):
        pace.read(int(rows), fixed_s + rows * row_s)
        rows = min(256.0, pace.most_read([1, 2]))
    step_s = fixed_s + rows * row_s
    # A step takes its share of a round, or twice as long as a level, whichever is more.
    assert step_s == pytest.approx(max(SHARE_OF_OTHERS * 0.02, 2.0 * fixed_s), rel=0.3)


def test_reading_recovers_from_a_slow_step() -> None:
    pace = DraftPace()
    for now_s in (0.02, 0.04):
        for link in (1, 2):
            pace.committed(link, now_s)
    pace.took(1e-3, 1)
    pace.read(256, 10.0)
    rows = pace.most_read([1, 2])
    assert rows == LEAST_READ > MOST_FRESH
    for _ in range(400):
        pace.read(int(rows), 1e-3 + rows * 1e-5)
        rows = min(256.0, pace.most_read([1, 2]))
    assert rows > 100

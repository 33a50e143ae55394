"""The drafter's loop, told without a model: whose prompts are read, which trees grow, and what verifiers are told."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.messages import CloseSession, CommittedStates, Drafts
from paceline.core.pages import BLOCK_SIZE
from paceline.core.params import SamplingParams
from paceline.engine.draft_scheduler import QUIET_S
from paceline.engine.draft_session import Offer
from paceline.forest import ROOT
from tests.support.loops import VOCAB_SIZE, WRONG, DrafterLoop, text


def quiet(loop: DrafterLoop) -> None:
    """No verifier says anything for so long that sessions may lose their pages to others."""
    loop.now_s += 2 * QUIET_S


def close(loop: DrafterLoop, name: str) -> CloseSession:
    return CloseSession(number=loop.number(name))


# Reading and growing


def test_prompts_are_read_in_chunks_beside_trees_that_grow() -> None:
    loop = DrafterLoop(max_num_batched_tokens=32)
    loop.open("growing", room=20)
    loop.step()
    loop.open("reading", prompt_len=100)
    chunks = []
    while not loop.tree("reading"):
        plan = loop.step()
        assert [each.session.session_id for each in plan.growing] == ["growing"]
        chunks += [each.stop - each.start for each in plan.catching_up]
        assert [each.expands for each in plan.catching_up] == [len(chunks) == 4], "only the last knows what follows"
    assert chunks == [32, 32, 32, 4]
    loop.run()
    assert loop.session("reading").pages.num_computed == 100
    assert loop.guessed("reading") == text(100, 4)


def test_a_long_prompt_keeps_nobody_waiting_who_lacks_a_token_or_two() -> None:
    loop = DrafterLoop(max_num_batched_tokens=32)
    loop.open("long", prompt_len=200)
    loop.open("short")
    plan = loop.step()
    assert [(each.session.session_id, each.stop) for each in plan.catching_up] == [("short", 5), ("long", 27)]
    loop.commit("short", WRONG)
    assert [each.session.session_id for each in loop.step().catching_up] == ["short", "long"]


def test_a_prompt_that_is_known_is_not_read_again_and_others_do_not_see_it() -> None:
    loop = DrafterLoop()
    loop.open("first", prompt_len=40, cache_salt="one")
    loop.run()
    loop.open("same", prompt_len=40, cache_salt="one")
    loop.open("other", prompt_len=40, cache_salt="another")
    assert {each.session.session_id: each.start for each in loop.step().catching_up} == {"same": 32, "other": 0}


def test_the_most_promising_nodes_of_all_sessions_grow_first() -> None:
    loop = DrafterLoop(max_rows=1, sure={"sure": 0.9, "unsure": 0.7})
    for name in ("unsure", "sure"):
        loop.open(name, room=20)
    loop.step()
    grown = [next(iter(loop.step().growing)).session.session_id for _ in range(6)]
    # 0.9, 0.81 and 0.729 lie above 0.7, and so does 0.656 above 0.49.
    assert grown == ["sure", "sure", "sure", "unsure", "sure", "sure"]


def test_sessions_that_are_alike_share_the_rows_of_a_step_evenly() -> None:
    loop = DrafterLoop(max_rows=4, max_num_seqs=10)
    names = [f"s{index}" for index in range(10)]
    for name in names:
        loop.open(name, room=20)
    loop.step()
    for _ in range(25):
        assert len(loop.step().growing) == 4
    assert {len(loop.tree(name)) for name in names} == {11}


def test_no_session_has_more_rows_of_a_step_than_its_share() -> None:
    loop = DrafterLoop(width=2, max_rows=16, max_rows_per_session=3)
    loop.open("s", room=100)
    assert [len(loop.step().growing) for _ in range(4)] == [0, 2, 3, 3]


# Commits


def test_a_commit_that_hits_keeps_the_subtree_and_its_kv() -> None:
    loop = DrafterLoop()
    loop.open("s")
    loop.run()
    assert loop.guessed("s") == text(5, 4)
    session = loop.session("s")
    slots = loop.kv("s")[:2]
    loop.commit("s", 5, 6)
    assert loop.moved == [(slots[0], session.pages.slot(5)), (slots[1], session.pages.slot(6))]
    assert loop.tree("s") == [7, 8]
    plan = loop.step()
    assert plan.catching_up == [], "nothing of it is computed again"
    loop.run()
    assert loop.guessed("s") == [9, 10]
    assert loop.scratch.num_used == len(loop.kv("s"))


def test_a_commit_that_misses_empties_the_tree_and_keeps_what_was_right() -> None:
    loop = DrafterLoop()
    loop.open("s")
    loop.run()
    loop.commit("s", 5, WRONG)
    assert len(loop.tree("s")) == loop.scratch.num_used == 0
    assert len(loop.moved) == 1
    loop.said.clear()
    (part,) = loop.step().catching_up
    assert (part.start, part.stop) == (6, 7)
    loop.run()
    assert loop.guessed("s") == text(7, 4)


def test_guesses_that_a_commit_makes_worth_it_are_told_before_the_next_step() -> None:
    loop = DrafterLoop(sure={"s": 0.5})
    loop.open("s", price=0.99, room=20)
    loop.run()
    assert loop.guessed("s") == text(5, 3), "0.5 to the fourth is not worth a tenth of the price"
    loop.commit("s", 5, price=0.99, room=20)
    assert loop.scheduler.has_work
    assert loop.step().num_rows == 0
    assert loop.guessed("s") == [8]
    loop.run()
    assert loop.guessed("s") == []


# Price and room


def test_at_a_price_of_1_prompts_are_read_and_no_tree_grows() -> None:
    loop = DrafterLoop()
    loop.open("s", prompt_len=20, price=1.0)
    plan = loop.step()
    assert (plan.num_rows, plan.catching_up[0].expands) == (20, False)
    assert not loop.scheduler.has_work
    loop.commit("s", 20, price=1.0)
    assert loop.step().num_rows == 1, "at rest it reads on"
    assert loop.said == {}
    loop.commit("s", 21, price=0.1)
    loop.run()
    assert loop.guessed("s") == text(22, 4)


def test_a_tree_grows_as_far_as_the_price_says_and_no_further_than_there_is_room() -> None:
    loop = DrafterLoop(sure={"dear": 0.5, "cheap": 0.5, "small": 0.5})
    loop.open("dear", price=0.99, room=20)
    loop.open("cheap", price=0.1, room=20)
    loop.open("small", price=0.0, room=2)
    loop.run()
    assert {name: len(loop.tree(name)) for name in ("dear", "cheap", "small")} == {
        "dear": 3,
        "cheap": 6,
        "small": 2,
    }


def test_a_price_that_rises_with_a_commit_stops_the_growth() -> None:
    loop = DrafterLoop()
    loop.open("s", room=20)
    for _ in range(3):
        loop.step()
    before = len(loop.tree("s"))
    loop.commit("s", 5, price=1.0, room=20)
    loop.run()
    assert len(loop.tree("s")) == before - 1


def test_no_tree_grows_beyond_the_context() -> None:
    loop = DrafterLoop(context_len=8)
    loop.open("s", prompt_len=5, room=20)
    loop.run()
    assert loop.guessed("s") == text(5, 3)
    loop.commit("s", 5, 6, 7, room=20)
    assert not loop.scheduler.has_work


# Pages and slots


def test_a_session_that_finds_no_pages_takes_those_of_the_quietest() -> None:
    loop = DrafterLoop(num_blocks=4)
    loop.open("a", prompt_len=30)
    loop.now_s += 0.1
    loop.open("b", prompt_len=30)
    loop.run()
    quiet(loop)
    loop.open("c", prompt_len=30)
    loop.run()
    a, b, c = (loop.session(name) for name in "abc")
    assert (a.pages.blocks, loop.kv("a"), loop.tree("a")) == ([], [], [])
    assert len(loop.tree("b")) == len(loop.tree("c")) == 4
    loop.commit("a", 30)
    loop.run()
    assert len(loop.tree("a")) == 4, "with its next commit it is back"
    assert b.pages.blocks == [], "now the quietest gives way"
    assert c.pages.num_computed == 30


def test_sessions_that_were_heard_of_just_now_keep_their_pages_and_one_more_waits_for_an_end() -> None:
    loop = DrafterLoop(num_blocks=4)
    for name in "ab":
        loop.open(name, prompt_len=30)
    loop.run()
    loop.open("c", prompt_len=30)
    loop.run()
    assert [loop.session(name).pages.num_computed for name in "abc"] == [30, 30, 0]
    assert loop.scheduler.lag_tokens == 0, "what cannot be computed is no lag"
    loop.hear(close(loop, "a"))
    assert loop.scheduler.has_work
    loop.run()
    assert loop.session("c").pages.num_computed == 30


def test_who_is_read_in_a_step_keeps_its_pages_in_it() -> None:
    loop = DrafterLoop(num_blocks=2)
    for name in "abc":
        loop.open(name, prompt_len=30)
        loop.run()
    quiet(loop)
    loop.hear(close(loop, "a"))
    plan = loop.step()
    assert [each.session.session_id for each in plan.catching_up] == ["b"]
    assert len(loop.session("b").pages.blocks) == 2


def test_nobody_gives_way_to_a_session_that_will_never_fit() -> None:
    loop = DrafterLoop(num_blocks=4)
    loop.open("a", prompt_len=30)
    loop.run()
    quiet(loop)
    loop.open("huge", prompt_len=4 * BLOCK_SIZE + 1)
    loop.run()
    assert loop.session("a").pages.num_computed == 30
    assert loop.session("huge").pages.blocks == []


def test_without_slots_trees_stop_growing_and_go_on_when_a_commit_frees_some() -> None:
    loop = DrafterLoop(num_scratch_blocks=1)
    for name in ("a", "b"):
        loop.open(name, room=100)
    loop.run()
    assert loop.scratch.num_free == 0
    before = len(loop.tree("b"))
    loop.commit("a", WRONG, room=0)
    loop.run()
    assert len(loop.tree("a")) == 0
    assert len(loop.tree("b")) == before + 8


# What verifiers say, and in which order


def test_a_session_that_misses_commits_says_so_and_catches_up() -> None:
    loop = DrafterLoop()
    loop.open("s", price=1.0)
    loop.run()
    loop.commit("s", 8, base_len=8)
    loop.step()
    assert loop.lagging() == [("s", 5)]
    loop.commit("s", 5, 6, 7, 8, base_len=5, price=1.0)
    assert loop.scheduler.lag_tokens == 4
    loop.run()
    assert loop.session("s").tokens == text(0, 9)
    assert loop.scheduler.lag_tokens == 0


def test_a_commit_of_a_session_that_is_not_known_asks_for_it_unless_there_is_no_place() -> None:
    loop = DrafterLoop(max_num_seqs=1)
    loop.commit("s", 9, base_len=9)
    loop.step()
    assert loop.lagging() == [("s", 0)]
    loop.open("s")
    loop.open("late")
    loop.commit("late", 5, base_len=5)
    loop.run()
    assert loop.lagging() == []
    loop.hear(close(loop, "s"))
    loop.commit("late", 6, base_len=6)
    loop.step()
    assert loop.lagging() == [("late", 0)], "there is a place now"


def test_what_is_said_twice_changes_nothing() -> None:
    loop = DrafterLoop()
    loop.open("s")
    loop.run()
    loop.commit("s", 5)
    session = loop.session("s")
    loop.commit("s", 5, base_len=5)
    assert loop.session("s") is session
    assert session.tokens == text(0, 6)
    assert loop.broken == {}


def test_a_session_that_is_opened_again_starts_anew() -> None:
    loop = DrafterLoop()
    loop.open("s", prompt_len=20)
    loop.run()
    loop.said.clear()
    loop.open("s", prompt_len=9)
    loop.run()
    assert loop.guessed("s") == text(9, 4)
    assert loop.pool.num_used == 1


def test_a_verifier_that_contradicts_itself_loses_its_stream_and_nobody_else_does() -> None:
    loop = DrafterLoop()
    for link in (1, 2):
        loop.open("s", link=link)
    loop.commit("s", 77, 78, base_len=3)
    loop.run()
    assert list(loop.broken) == [1]
    assert "contradicts" in str(loop.broken[1])
    assert list(loop.scheduler._sessions) == [(2, loop.number("s", link=2))]
    assert loop.guessed("s", link=2) == text(5, 4)


def test_a_verifier_that_goes_frees_all_that_its_sessions_held() -> None:
    loop = DrafterLoop()
    loop.open("stays", link=2)
    loop.run()
    pages, slots = loop.pool.num_used, loop.scratch.num_used
    for name in ("a", "b"):
        loop.open(name, prompt_len=20)
    loop.step()
    loop.commit("unknown", 3, base_len=3)
    loop.leave(1)
    assert (loop.pool.num_used, loop.scratch.num_used, loop.scheduler.num_sessions) == (pages, slots, 1)
    loop.said.clear()
    loop.commit("stays", 5, link=2)
    loop.run()
    assert set(loop.said) == {2}, "to a stream that has ended nothing is said"


def test_the_same_name_at_two_verifiers_is_two_sessions() -> None:
    loop = DrafterLoop()
    loop.open("s", prompt_len=5, link=1)
    loop.open("s", prompt_len=9, link=2)
    loop.run()
    assert (loop.guessed("s", link=1), loop.guessed("s", link=2)) == (text(5, 4), text(9, 4))


@pytest.mark.parametrize("at_first", [True, False])
def test_a_session_of_tokens_that_the_draft_model_lacks_is_left_alone_until_it_ends(at_first: bool) -> None:
    loop = DrafterLoop()
    if at_first:
        loop.open("s", token_ids=(1, VOCAB_SIZE), prompt_len=2)
    else:
        loop.open("s")
        loop.commit("s", VOCAB_SIZE)
    loop.commit("s", 9, base_len=9)
    assert loop.run() == 0
    assert (loop.scheduler.num_sessions, loop.pool.num_used) == (0, 0)
    loop.hear(close(loop, "s"))
    loop.commit("s", 9, base_len=9)
    loop.step()
    assert loop.lagging() == [("s", 0)]
    loop.open("s")
    loop.run()
    assert loop.guessed("s") == text(5, 4)


def test_a_session_that_the_draft_model_cannot_draft_for_is_left_alone() -> None:
    loop = DrafterLoop()
    loop.open("s", sampling=SamplingParams(max_tokens=50, logit_bias=((VOCAB_SIZE, 1.0),)))
    loop.commit("s", 5, base_len=5)
    assert loop.run() == 0
    assert loop.scheduler.num_sessions == 0


# Rest


def test_with_nothing_to_do_there_is_no_step() -> None:
    loop = DrafterLoop()
    assert not loop.scheduler.has_work
    loop.open("s")
    assert loop.run() == 4, "one for the prompt and its first guess, and one for each guess more"
    assert loop.step().num_rows == 0
    loop.said.clear()
    loop.hear(close(loop, "s"))
    assert not loop.scheduler.has_work
    assert (loop.pool.num_used, loop.scratch.num_used, loop.said) == (0, 0, {})


# Draft models that take the target's features

WIDTH = 2


def states(loop: DrafterLoop, name: str, start: int, count: int) -> CommittedStates:
    values = np.zeros((count, WIDTH), np.uint16).tobytes()
    return CommittedStates(number=loop.number(name), start=start, width=WIDTH, values=values)


def test_rows_that_need_features_are_read_as_far_as_these_have_come() -> None:
    loop = DrafterLoop(feature_width=WIDTH)
    loop.open("s", prompt_len=20)
    assert not loop.scheduler.has_work
    loop.hear(states(loop, "s", 0, 10))
    (part,) = loop.step().catching_up
    assert (part.start, part.stop, part.expands) == (0, 10, False)
    loop.hear(states(loop, "s", 10, 9))
    (part,) = loop.step().catching_up
    assert (part.start, part.stop, part.expands) == (10, 19, True)
    loop.run()
    assert isinstance(loop.said[1][0], Drafts)


def test_a_session_that_lost_its_features_asks_for_them_once_there_is_a_place() -> None:
    loop = DrafterLoop(feature_width=WIDTH, num_blocks=4)
    for name in "ab":
        loop.open(name, prompt_len=30)
        loop.hear(states(loop, name, 0, 29))
    loop.run()
    quiet(loop)
    loop.open("c", prompt_len=30)
    loop.hear(states(loop, "c", 0, 29))
    loop.run()
    assert loop.session("a").pages.blocks == []
    loop.said.clear()
    loop.commit("a", 30)
    loop.run()
    assert loop.lagging() == [], "while there is none the verifier is not asked"
    loop.hear(close(loop, "b"))
    loop.commit("a", 31, base_len=31)
    loop.step()
    assert loop.lagging() == [("a", 0)]
    assert list(loop.scheduler._sessions) == [(1, loop.number("c"))]


def test_a_step_of_nodes_that_have_their_guesses_already_hangs_nothing() -> None:
    """So it is where only chains are computed anew, whose guesses are drawn once."""
    loop = DrafterLoop(width=1)
    loop.open("s", room=4)
    loop.run()
    before = loop.tree("s")
    assert before
    loop.scheduler.trees.grow([Offer(loop.session("s"), ROOT)])
    assert loop.tree("s") == before

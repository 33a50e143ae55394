"""The verifier's engine on a device that counts: who gets a place, what a step computes, and what drafters are told."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from paceline.core import drafter_tier
from paceline.core.draft_policy import Goodput
from paceline.core.drafting_mode import Rate
from paceline.core.errors import ConfigError, OverloadedError
from paceline.core.messages import (
    CloseSession,
    Commit,
    FinishReason,
    LaggingSession,
    OpenSession,
)
from paceline.core.params import LAYER_SKIP, SamplingParams
from paceline.core.target_events import DrafterNews, TargetLimits, TargetOutput
from paceline.engine import scheduler
from paceline.engine.admission import OLDEST_PART
from paceline.engine.loop import run_sync
from paceline.engine.pending import HostPending
from paceline.engine.target_session import TargetSession
from paceline.forest.linking import MOST_UNANSWERED
from tests.support.counting import DRAFTER, Policy, Verifier, text
from tests.support.guesses import each_commit


def test_sessions_get_places_in_the_order_of_their_arrival() -> None:
    verifier = Verifier(max_num_seqs=2)
    names = [verifier.submit(f"s{index}", max_tokens=3).session_id for index in range(5)]
    firsts: list[str] = []
    while verifier.scheduler.num_sessions:
        plan = verifier.step()
        assert len(plan.parts) <= 2
        firsts += [part.session.session_id for part in plan.reading]
    assert firsts == names
    assert [verifier.tokens(name) for name in names] == [text(5, 3)] * 5
    assert verifier.pool.num_used == 0
    assert verifier.scratch.num_used == 0


def test_a_session_that_finds_too_few_pages_waits_and_nobody_overtakes_it() -> None:
    verifier = Verifier(num_blocks=4)
    verifier.submit("first", prompt_len=20, max_tokens=3)
    long = verifier.submit("long", prompt_len=50, max_tokens=3)
    short = verifier.submit("short", max_tokens=3)
    verifier.step()
    assert [each.session_id for each in verifier.scheduler.running] == ["first"]
    assert verifier.pool.num_used == 2, "one that has no place holds no page"
    verifier.run()
    assert verifier.tokens("long") == text(50, 3)
    assert long.start().at_s < short.start().at_s


def test_each_session_hears_first_that_it_runs_and_last_why_it_ended() -> None:
    verifier = Verifier()
    verifier.submit("s", max_tokens=2)
    verifier.run()
    first, *_, last = verifier.heard["s"]
    assert (first.running, first.token_ids) == (True, ())
    assert last.result is not None
    assert (last.result.finish_reason, last.result.num_generated_tokens) == (FinishReason.LENGTH, 2)


def test_prompts_are_read_in_chunks_beside_those_that_decode() -> None:
    verifier = Verifier(max_rows=32, num_blocks=64)
    decoding = verifier.submit("decoding", max_tokens=50)
    verifier.step()
    reading = verifier.submit("reading", prompt_len=100, max_tokens=1)
    chunks = []
    while not reading.ended:
        plan = verifier.step()
        assert [part.session for part in plan.decoding] == [decoding]
        assert plan.num_rows <= 32
        chunks += [part.stop - part.start for part in plan.reading]
    assert chunks == [31, 31, 31, 7]
    assert verifier.tokens("reading") == [100]


def test_after_a_slow_step_less_of_a_prompt_is_read_at_once() -> None:
    verifier = Verifier(max_rows=64, num_blocks=64)
    reading = verifier.submit("reading", prompt_len=200, max_tokens=1)
    rows = [verifier.step(seconds).num_prefill_rows for seconds in (4.0, 0.5, 0.2, 0.1)]
    assert rows == [64, 16, 32, 64]
    verifier.run()
    assert reading.ended
    assert verifier.tokens("reading") == [200]


def test_of_one_tenant_the_shortest_prompt_is_read_first_and_a_quarter_is_the_oldest_ones() -> None:
    verifier = Verifier(max_rows=32, num_blocks=256)
    oldest = verifier.submit("oldest", prompt_len=64, max_tokens=1)
    num_steps = 0
    while not oldest.ended:
        shorts = [verifier.submit(f"{num_steps}-{index}", prompt_len=12, max_tokens=1) for index in range(2)]
        plan = verifier.step()
        assert sum(part.num_rows for part in plan.reading) == 32
        assert all(each.ended for each in shorts)
        num_steps += 1
    assert num_steps == 64 // (32 // OLDEST_PART)


def test_places_go_to_the_tenant_that_has_fewest_whatever_the_priorities() -> None:
    verifier = Verifier(max_num_seqs=2)
    for index in range(5):
        verifier.submit(f"greedy-{index}", max_tokens=4, tenant="greedy", priority=-1)
    verifier.step()
    verifier.submit("modest", max_tokens=1, tenant="modest")
    while not verifier.heard["modest"]:
        verifier.step()
    assert [len(verifier.tokens(f"greedy-{index}")) for index in range(5)] == [4, 4, 1, 0, 0]


@pytest.mark.parametrize(("num_places", "num_blocks"), [(3, 256), (8, 21)])
def test_prompts_of_a_tenant_with_most_give_their_places_and_pages_to_those_of_another(
    num_places: int, num_blocks: int
) -> None:
    verifier = Verifier(max_num_seqs=num_places, num_blocks=num_blocks, max_rows=32)
    greedy = [verifier.submit(f"greedy-{index}", prompt_len=100, max_tokens=1, tenant="greedy") for index in range(6)]
    verifier.step()
    verifier.submit("modest", prompt_len=16, max_tokens=1, tenant="modest")
    verifier.step()
    assert verifier.tokens("modest") == [16]
    assert verifier.report.counts["vllm:num_preemptions",] == 1
    verifier.run()
    assert [verifier.tokens(each.session_id) for each in greedy] == [[100]] * 6
    assert verifier.pool.num_used == 0


def test_a_step_has_a_row_for_each_session() -> None:
    with pytest.raises(ConfigError, match=r"64 rows \(--max-num-batched-tokens\) is too short for 65 sessions"):
        TargetLimits(max_num_seqs=65, max_num_batched_tokens=64)


def test_a_prompt_gives_way_to_no_tenant_that_has_as_many() -> None:
    verifier = Verifier(max_num_seqs=2, num_blocks=64, max_rows=32)
    verifier.submit("a", prompt_len=100, max_tokens=1, tenant="a")
    verifier.submit("b", prompt_len=100, max_tokens=1, tenant="b")
    verifier.step()
    verifier.submit("c", prompt_len=16, max_tokens=1, tenant="c")
    verifier.step()
    assert [each.session_id for each in verifier.scheduler.running] == ["a", "b"]


def test_pages_are_taken_from_the_tenant_that_has_most_sessions() -> None:
    verifier = Verifier(num_blocks=9, max_num_seqs=3)
    for name, tenant in (("a", "greedy"), ("b", "greedy"), ("c", "modest")):
        verifier.submit(name, prompt_len=30, max_tokens=40, tenant=tenant)
    while not verifier.step().decoding or not verifier.report.counts["vllm:num_preemptions",]:
        pass
    assert [each.session_id for each in verifier.scheduler.running] == ["a", "c"]
    verifier.run()
    assert [verifier.tokens(name) for name in "abc"] == [text(30, 40)] * 3


def test_a_prefix_that_is_known_is_not_computed_again() -> None:
    verifier = Verifier()
    verifier.submit("first", prompt_len=40, max_tokens=1, cache_salt="one")
    verifier.run()
    same = verifier.submit("second", prompt_len=40, max_tokens=1, cache_salt="one")
    other = verifier.submit("third", prompt_len=40, max_tokens=1, cache_salt="another")
    told = list[DrafterNews]()
    output = run_sync(verifier.engine.step(tell=told.append))
    assert {part.session.number: part.start for part in verifier.plan.reading} == {same.number: 32, other.number: 0}
    reports = [each.report for each in (*told, output) if isinstance(each, TargetOutput)]
    counted = [
        sum(each.counts[name,] for each in reports) for name in ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")
    ]
    assert counted == [80, 32], "once, though clients hear of the step twice"


def test_right_guesses_are_committed_with_the_token_after_them() -> None:
    verifier = Verifier()
    verifier.drafter()
    session = verifier.submit("s", max_tokens=30)
    verifier.step()
    verifier.draft(session, right=2, wrong=2)
    plan = verifier.step()
    assert plan.drafters_work
    assert [part.num_guesses for part in plan.decoding] == [4]
    assert verifier.heard["s"][-1].token_ids == (6, 7, 8)
    assert (verifier.report.gammas, verifier.report.accepted) == ([4], [2])
    assert verifier.report.counts["paceline:round_misses",] == 1
    assert verifier.scratch.num_used == 0
    verifier.run()
    assert verifier.tokens("s") == text(5, 30)


def test_drafts_of_sessions_that_have_ended_are_no_work() -> None:
    verifier = Verifier()
    verifier.drafter()
    session = verifier.submit("s", max_tokens=2)
    verifier.run()
    verifier.draft(session, right=1)
    assert not verifier.engine.has_work()


def test_a_guess_that_ends_the_text_takes_the_place_of_the_token_after_the_guesses() -> None:
    """A round commits `1 + accepted` tokens, so that the mean acceptance length is that of what was committed."""
    verifier = Verifier()
    verifier.drafter()
    sampling = SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(8,))
    session = verifier.submit("s", sampling=sampling)
    verifier.step()
    verifier.draft(session, right=4)
    verifier.step()
    last = verifier.heard["s"][-1]
    assert last.token_ids == (6, 7, 8)
    assert last.result is not None
    assert last.result.speculation.mean_acceptance_length == 3
    assert last.result.speculation.acceptance_histogram == (0, 0, 1)
    assert verifier.report.accepted == [2]


def test_a_drafter_is_told_of_a_prompt_before_the_step_that_reads_it_and_of_every_commit() -> None:
    verifier = Verifier()
    verifier.drafter()
    verifier.submit("s", max_tokens=3)
    launch, told = verifier.device.launch, list[object]()

    def launching(*args):
        told.extend(verifier.told)
        return launch(*args)

    verifier.device.launch = launching
    plan = verifier.step()
    (opened,) = told
    assert isinstance(opened, OpenSession)
    assert (opened.token_ids, opened.cache_salt) == (tuple(range(5)), "s")
    assert [part.session.session_id for part in plan.reading] == ["s"]


def test_a_commit_is_told_in_the_middle_of_its_step_and_not_again_at_its_end() -> None:
    verifier = Verifier()
    verifier.drafter()
    verifier.submit("s")
    verifier.step()
    told = list[DrafterNews]()
    output = run_sync(verifier.engine.step(tell=told.append))
    (commit,) = each_commit(told[0].to_drafters[DRAFTER])
    assert isinstance(commit, Commit)
    assert (commit.token_ids, len(told), output.to_drafters) == (output.commit.tokens, 1, {})


def test_what_a_drafter_hears_follows_the_price() -> None:
    verifier = Verifier(policy=Policy(price=1.0))
    verifier.drafter()
    verifier.submit("s", max_tokens=60)
    for _ in range(5):
        assert not verifier.step().drafters_work
    assert verifier.told == [], "at rest, a drafter hears not even of sessions"
    verifier.policy.price = 0.1
    for _ in range(3):
        verifier.step()
    opened, *commits = verifier.told
    assert isinstance(opened, OpenSession)
    assert len(opened.token_ids) == 5 + 6, "of all at once when it is called"
    assert [type(each) for each in commits] == [Commit, Commit]
    verifier.told.clear()
    verifier.policy.price = 1.0
    for _ in range(3):
        verifier.step()
    (rest,) = verifier.told
    assert isinstance(rest, Commit)
    assert rest.price == 1.0, "that it may rest, and no more"


def test_a_drafter_that_dies_costs_drafts_alone_and_another_hears_all() -> None:
    verifier = Verifier()
    verifier.drafter()
    session = verifier.submit("s", max_tokens=40)
    verifier.step()
    verifier.draft(session, right=3)
    verifier.drafter(up=False)
    verifier.step()
    assert verifier.heard["s"][-1].token_ids == (6,), "without any source steps are plain at once"
    verifier.told.clear()
    for _ in range(4):
        assert not verifier.step().drafters_work
    assert verifier.told == []
    verifier.drafter()
    verifier.step()
    (opened,) = verifier.told
    assert isinstance(opened, OpenSession)
    assert opened.token_ids == tuple(range(session.committed_len))
    verifier.run()
    assert verifier.tokens("s") == text(5, 40)
    assert isinstance(verifier.told[-1], CloseSession)


def test_a_drafter_that_lags_is_told_what_it_misses_once_a_step() -> None:
    verifier = Verifier()
    verifier.drafter()
    verifier.submit("s", max_tokens=40)
    verifier.step()
    verifier.step()
    verifier.told.clear()
    lagging = LaggingSession(number=verifier.sessions[0].link.number, have_len=5)
    verifier.say(lagging, lagging, lagging)
    verifier.step()
    catch_up, _ = verifier.told
    assert isinstance(catch_up, Commit)
    assert (catch_up.base_len, catch_up.token_ids) == (5, [5, 6])


def test_a_step_sends_a_drafter_a_bounded_number_of_tokens_again_and_the_others_when_it_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafter_tier, "MOST_RESENT", 8)
    verifier = Verifier()
    verifier.drafter()
    sessions = [verifier.submit(f"s{index}", max_tokens=40) for index in range(4)]
    verifier.step()
    everything = [LaggingSession(number=each.link.number, have_len=0) for each in sessions]
    for asked, told in ((everything, ["s0", "s1"]), (everything[2:], ["s2", "s3"])):
        verifier.told.clear()
        verifier.say(*asked)
        verifier.step()
        assert [each.session_id for each in verifier.told if isinstance(each, OpenSession)] == told


def test_a_client_that_leaves_frees_its_place_and_pages() -> None:
    verifier = Verifier(max_num_seqs=1)
    verifier.drafter()
    leaving = verifier.submit("leaving", max_tokens=500)
    verifier.submit("next", max_tokens=2)
    verifier.step()
    verifier.leave(leaving)
    assert verifier.scheduler.session(leaving.number) is None
    verifier.step()
    assert CloseSession(number=leaving.link.number) in verifier.told
    verifier.run()
    assert verifier.tokens("next") == text(5, 2)
    assert verifier.pool.num_used == 0


def waiting_for_drafts() -> tuple[Verifier, TargetSession]:
    """A session that decodes, and whose drafter has not answered the last commit yet."""
    verifier = Verifier()
    verifier.drafter()
    session = verifier.submit("s", max_tokens=60)
    verifier.step()
    verifier.draft(session, right=1)
    verifier.step()
    assert verifier.engine.patience_s() > 0.0
    return verifier, session


def test_a_step_waits_for_drafts_until_it_has_as_many_as_it_may_verify() -> None:
    verifier, session = waiting_for_drafts()
    verifier.draft(session, right=3)
    assert verifier.engine.patience_s() > 0.0, "there is room for one more"
    verifier.draft(session, right=0, wrong=1)
    assert verifier.engine.patience_s() == 0.0
    (part,) = verifier.step().decoding
    assert part.num_guesses == 4


def test_a_step_does_not_wait_for_drafts_that_are_overdue() -> None:
    verifier, session = waiting_for_drafts()
    verifier.clock.now_s += 1.0
    assert verifier.engine.patience_s() == 0.0
    verifier.step()
    assert verifier.report.counts["paceline:fallbacks", "drafter_silent"] == 1
    assert verifier.engine.patience_s() == 0.0, "until it is heard again nobody waits for it"
    verifier.draft(session, right=1)
    assert verifier.engine.patience_s() > 0.0


def test_a_drafter_that_dies_is_not_waited_for() -> None:
    verifier, _ = waiting_for_drafts()
    verifier.drafter(up=False)
    assert verifier.engine.patience_s() == 0.0


def test_no_session_waits_with_few_tokens_to_go() -> None:
    verifier = Verifier()
    verifier.drafter()
    session = verifier.submit("s", max_tokens=9)
    verifier.step()
    verifier.draft(session, right=1)
    verifier.step()
    assert verifier.engine.patience_s() == 0.0


def test_a_session_that_gets_nothing_to_choose_from_ends_alone_and_its_pages_are_not_trusted() -> None:
    verifier = Verifier()
    verifier.submit("good", prompt_len=40, max_tokens=10, cache_salt="same")
    verifier.step()
    verifier.submit("bad", prompt_len=40, max_tokens=10, cache_salt="same")
    verifier.device.broken_at.add(39)
    verifier.step()
    assert list(verifier.errors) == ["bad"]
    assert verifier.tokens("good") == [40, 41]
    assert [each.session_id for each in verifier.scheduler.running] == ["good"]
    assert not verifier.pool._block_of, "nobody else finds what it was computed from"


class Watched(Policy):
    """Notes roots, guesses, tokens and prompt rows of each step that it learns from."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[tuple[int, ...]] = []

    def observe(
        self, *, roots: int, guesses: int, tokens: int, step_s: float, cycle_s: float, other_rows: int = 0
    ) -> None:
        del step_s, cycle_s
        self.observed.append((roots, guesses, tokens, other_rows))


def test_the_policy_learns_from_steps_that_decode_how_many_rows_were_guesses_or_prompts() -> None:
    policy = Watched()
    verifier = Verifier(policy=policy)
    verifier.drafter()
    first = verifier.submit("first", max_tokens=50)
    verifier.step()
    verifier.step()
    verifier.draft(first, right=2, wrong=2)
    verifier.submit("late", prompt_len=7)
    verifier.step()
    verifier.step()
    assert policy.observed == [(1, 0, 1, 0), (1, 4, 3, 7), (2, 0, 2, 0)]


class Answered(Policy):
    """Notes whether the drafters of a step have answered."""

    def __init__(self) -> None:
        super().__init__()
        self.answered: list[bool] = []

    def allocate(self, picked: Any, *, responded: Any = None, **options: Any) -> Any:
        self.answered += responded.tolist()
        return super().allocate(picked, responded=responded, **options)


def test_a_drafter_that_does_not_answer_counts_as_one_with_nothing_to_say() -> None:
    policy = Answered()
    verifier = Verifier(policy=policy)
    verifier.drafter()
    verifier.submit("s", max_tokens=3 * MOST_UNANSWERED)
    verifier.run()
    assert policy.answered[: MOST_UNANSWERED + 3] == [False] * MOST_UNANSWERED + [True] * 3


@pytest.mark.parametrize("part", ["launch", "follow"])
def test_nothing_is_kept_or_learned_of_a_step_that_did_not_fit_the_memory(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    policy = Watched()
    verifier = Verifier(policy=policy)
    largest, session = (verifier.submit(name) for name in ("largest", "s"))
    verifier.drafter()
    verifier.step()
    verifier.draft(largest, right=4)
    verifier.draft(session, right=2)
    with monkeypatch.context() as patched:
        owner = verifier.device if part == "launch" else HostPending
        patched.setattr(owner, part, Mock(side_effect=MemoryError("no room")))
        before = [*policy.observed], verifier.scheduler._drafts.step_s
        assert verifier.step(seconds=5.0).num_rows == 8
        assert ([*policy.observed], verifier.scheduler._drafts.step_s) == before
    assert isinstance(verifier.errors["largest"], OverloadedError)
    assert "of which this session had 5" in str(verifier.errors["largest"])
    policy.price = 1.0
    assert verifier.step().num_rows == 1, "a step that verifies nothing, and commits what was guessed"
    assert verifier.engine.cache.moved == []
    assert session.pages.num_missing == 1
    verifier.run()
    assert verifier.tokens("s") == text(5, 20)
    assert verifier.scratch.num_used == 0


def test_a_source_that_finds_no_room_in_memory_costs_guesses_alone() -> None:
    source = Mock(grow=Mock(side_effect=MemoryError("no room")))
    source.name = LAYER_SKIP
    verifier = Verifier(sources=[source])
    verifier.submit("s")
    verifier.run()
    assert source.grow.called
    assert verifier.tokens("s") == text(5, 20)


def judging(name: str, **changes: Any) -> dict[str, Any]:
    sampling = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0)
    return {"sampling": sampling, "cache_salt": name, **changes}


def judged(verifier: Verifier, name: str) -> list[int]:
    """Positions of the prompt whose tokens a client was told the likelihood of."""
    heard = [each for each in verifier.heard[name] if each.prompt_logprobs]
    return [each.prompt_offset + index for each in heard for index in range(len(each.prompt_logprobs))]


@pytest.mark.parametrize("max_rows", [32, 128])
def test_a_prompt_that_is_to_be_judged_is_computed_whole_whatever_is_known_of_it(max_rows: int) -> None:
    verifier = Verifier(max_rows=max_rows)
    verifier.submit("before", prompt_len=70, max_tokens=1, cache_salt="same")
    verifier.run()
    verifier.submit("judged", prompt_len=70, **judging("same"))
    verifier.run()
    assert judged(verifier, "judged") == list(range(1, 70)), "each of its tokens once, but for the first"
    assert verifier.tokens("judged") == text(70, 3)


def test_a_session_that_goes_on_elsewhere_has_its_prompt_judged_no_more() -> None:
    verifier = Verifier()
    session = verifier.submit("moved", prompt_len=40, **judging("moved", committed_token_ids=(40,)))
    assert not session.judges_prompt
    verifier.run()
    assert judged(verifier, "moved") == []


def test_after_a_preemption_only_what_was_not_told_is_judged() -> None:
    verifier = Verifier(max_rows=32)
    session = verifier.submit("judged", prompt_len=70, **judging("own"))
    verifier.step()
    verifier.scheduler._preempt(session)
    assert (session.num_judged, session in verifier.scheduler.running) == (32, False)
    verifier.run()
    assert judged(verifier, "judged") == list(range(1, 70))


def test_the_more_important_gets_the_next_place_and_equals_wait_in_the_order_of_their_arrival() -> None:
    verifier = Verifier(max_num_seqs=1)
    for name, priority in (("first", 0), ("late", 5), ("usual", 0), ("soon", -1), ("usual too", 0), ("soon too", -1)):
        verifier.submit(name, max_tokens=2, priority=priority)
        if name == "first":
            verifier.step()
    begun: list[str] = []
    while verifier.scheduler.num_sessions:
        begun += [part.session.session_id for part in verifier.step().reading]
    assert begun == ["soon", "soon too", "usual", "usual too", "late"], "and nobody who has a place loses it"


def test_the_least_important_gives_its_pages_to_the_others_however_old_it_is() -> None:
    verifier = Verifier(num_blocks=9, max_num_seqs=3)
    for name, priority in (("unimportant", 1), ("important", -1), ("usual", 0)):
        verifier.submit(name, prompt_len=30, max_tokens=40, priority=priority)
    lost: list[str] = []
    while verifier.scheduler.num_sessions:
        before = [session.session_id for session in verifier.scheduler.running]
        verifier.step()
        if verifier.report.counts["vllm:num_preemptions",]:
            kept = [session.session_id for session in verifier.scheduler.running]
            lost += [name for name in before if name not in kept]
    assert lost[0] == "unimportant"
    assert "important" not in lost
    assert [verifier.tokens(name) for name in ("unimportant", "important", "usual")] == [text(30, 40)] * 3


def with_source() -> Verifier:
    """A verifier whose policy learns from the first step on."""
    source = Mock()
    source.name = LAYER_SKIP
    return Verifier(policy=Goodput(), sources=[source])


def test_sessions_that_fail_end_no_engine_however_many_there_are() -> None:
    """Audit 4, b01: steps without a token taught a rate of 0, and the controller divided by it."""
    verifier = with_source()
    verifier.device.broken_at.add(5)
    for number in range(20):
        verifier.submit(f"s{number}")
        verifier.run()
    assert len(verifier.errors) == 20
    assert not any(verifier.policy.mode.learned())


def test_a_session_that_fails_teaches_nothing_of_the_others_beside_it() -> None:
    policy = Watched()
    verifier = Verifier(policy=policy)
    verifier.submit("bad")
    verifier.step()
    verifier.submit("good", prompt_len=7)
    verifier.step()
    before = len(policy.observed)
    verifier.device.broken_at.add(6)
    verifier.step()
    assert (list(verifier.errors), len(policy.observed)) == (["bad"], before)
    verifier.step()
    assert len(policy.observed) == before + 1


def test_an_error_in_learning_costs_what_was_learned_and_no_step(caplog: pytest.LogCaptureFixture) -> None:
    verifier = with_source()
    verifier.submit("s", max_tokens=50)
    for _ in range(20):
        verifier.step()
    learned = verifier.policy.mode.learned
    assert any(learned())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Rate, "add", Mock(side_effect=ZeroDivisionError("float division by zero")))
        verifier.step()
    assert "what was learned is forgotten" in caplog.text
    learned = verifier.policy.mode.learned
    assert not any(learned())
    verifier.run()
    assert verifier.tokens("s") == text(5, 50)
    assert any(learned()), "it learns anew"


def test_sessions_with_long_prompts_get_places_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked for among cached pages, and written to a drafter, in the event loop."""
    monkeypatch.setattr(scheduler, "MOST_ADMITTED_TOKENS", 50)
    verifier = Verifier()
    for number in range(6):
        verifier.submit(f"s{number}", prompt_len=30, max_tokens=9)
    numbers = []
    for _ in range(3):
        verifier.step()
        numbers.append(len(verifier.scheduler.running))
    assert numbers == [2, 4, 6]

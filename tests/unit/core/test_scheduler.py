"""The verifier's loop, told without a model: who gets a place, what a step computes, and what drafters are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from paceline.core.allocator import Allocation, FixedGamma
from paceline.core.drafter_tier import DrafterTier
from paceline.core.messages import (
    CloseSession,
    Commit,
    CommittedTokens,
    DraftNodes,
    FinishReason,
    GenerateRequest,
    LaggingSession,
    NodeGuess,
    OpenSession,
    ToDrafter,
)
from paceline.core.pages import BLOCK_SIZE, BlockPool, SlotPool
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.rules import Verdict
from paceline.core.scheduled_session import ScheduledSession
from paceline.core.scheduler import Scheduler
from paceline.core.step_cost import StepMode
from paceline.core.step_plan import StepPlan
from paceline.core.target_events import DraftsArrived, LinkChanged, TargetLimits
from paceline.core.tree import walk

DRAFTER = "drafter:1"
# The target's text: each token says its position.
VOCAB_SIZE = 10_000


class Policy(FixedGamma):
    """Always four nodes; the test sets the price."""

    def __init__(self, price: float = 0.0) -> None:
        super().__init__(gamma=4)
        object.__setattr__(self, "set_price", price)

    @property
    def price(self) -> float:
        return self.set_price  # type: ignore[attr-defined]

    def at(self, price: float) -> None:
        object.__setattr__(self, "set_price", price)

    def allocate(self, demands, *, other_rows=0, joining=0) -> Allocation:
        return replace(super().allocate(demands), price=self.price)


@dataclass
class Loop:
    """A scheduler, the clock, and a target whose next token is the position it stands at."""

    num_blocks: int = 64
    max_num_seqs: int = 8
    max_rows: int = 64
    policy: Policy = field(default_factory=Policy)
    now_s: float = 0.0
    told: list[ToDrafter] = field(default_factory=list)
    heard: dict[str, list[CommittedTokens]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.scratch = SlotPool(first_block=self.num_blocks, num_blocks=1 + self.max_rows // BLOCK_SIZE)
        limits = TargetLimits(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_rows, max_model_len=4096)
        self.scheduler: Scheduler[ScheduledSession] = Scheduler(
            pool=self.pool, scratch=self.scratch, limits=limits, allocator=self.policy, tier=DrafterTier(VOCAB_SIZE)
        )
        self.sessions: list[ScheduledSession] = []

    def submit(self, name: str, prompt_len: int = 5, max_tokens: int = 20, **changes: object) -> ScheduledSession:
        request = GenerateRequest(
            session_id=name,
            epoch=1,
            prompt_token_ids=tuple(range(prompt_len)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            speculation=SpeculationParams(),
            cache_salt=name,
        )
        session = ScheduledSession(
            replace(request, **changes),  # type: ignore[arg-type]
            len(self.sessions),
            self.pool,
            drafter_address=DRAFTER,
            max_model_len=4096,
            submitted_s=self.now_s,
            price=self.policy.price,
        )
        self.sessions.append(session)
        self.heard[name] = []
        self.scheduler.submit(session)
        return session

    def drafter(self, *, up: bool = True) -> None:
        self.scheduler.change_link(LinkChanged(address=DRAFTER, up=up), self.now_s)
        self._pass_on()

    def say(self, *messages: DraftNodes | LaggingSession) -> None:
        self.scheduler.receive(DraftsArrived(address=DRAFTER, messages=messages, arrived_s=self.now_s))

    def draft(self, session: ScheduledSession, *, right: int, wrong: int = 0) -> None:
        """The drafter guesses a chain of so many right tokens, and so many wrong ones after them."""
        base_len = session.committed_len
        tokens = [base_len + index for index in range(right)] + [VOCAB_SIZE - 1] * wrong
        nodes = tuple(NodeGuess(index + 1, index, token, 0.9) for index, token in enumerate(tokens))
        self.say(DraftNodes(session_id=session.session_id, epoch=session.epoch, base_len=base_len, nodes=nodes))

    def step(self, seconds: float = 0.01) -> StepPlan[ScheduledSession]:
        plan = self.scheduler.plan(self.now_s)
        self._hear(self.scheduler.take_outcomes())
        self._pass_on()
        self.now_s += seconds
        batch_size = plan.batch_size
        for part in [part for part in plan.parts if part.commits]:
            tokens = walk(part.session.tree.root, part.nodes, lambda node: node.position + 1)
            for count, token in enumerate(tokens, start=1):
                if part.session.ends_with(token):
                    tokens = tokens[:count]
                    break
            verdict = Verdict(token_ids=tokens)
            self._hear([self.scheduler.commit(part, verdict, batch_size=batch_size, now_s=self.now_s)])
        self.scheduler.moves.clear()
        self.scheduler.end_step(plan, self.now_s)
        self.report = self.scheduler.take_report(plan)
        self._pass_on()
        return plan

    def run(self) -> None:
        for _ in range(1000):
            if not self.scheduler.num_sessions:
                return
            self.step()
        raise AssertionError("sessions did not end")

    def tokens(self, name: str) -> list[int]:
        return [token for each in self.heard[name] for token in each.token_ids]

    def _hear(self, outcomes: Sequence[tuple[int, object]]) -> None:
        for serial, outcome in outcomes:
            assert isinstance(outcome, CommittedTokens)
            self.heard[self.sessions[serial].session_id].append(outcome)

    def _pass_on(self) -> None:
        to_drafters, broken = self.scheduler.tier.take()
        assert not broken
        self.told += to_drafters.get(DRAFTER, [])


def text(prompt_len: int, count: int) -> list[int]:
    return list(range(prompt_len, prompt_len + count))


def test_sessions_get_places_in_the_order_of_their_arrival() -> None:
    loop = Loop(max_num_seqs=2)
    names = [loop.submit(f"s{index}", max_tokens=3).session_id for index in range(5)]
    firsts: list[str] = []
    while loop.scheduler.num_sessions:
        plan = loop.step()
        assert len(plan.parts) <= 2
        firsts += [part.session.session_id for part in plan.reading]
    assert firsts == names
    assert [loop.tokens(name) for name in names] == [text(5, 3)] * 5
    assert loop.pool.num_used == 0
    assert loop.scratch.num_used == 0


def test_each_session_hears_first_that_it_runs_and_last_why_it_ended() -> None:
    loop = Loop()
    loop.submit("s", max_tokens=2)
    loop.run()
    first, *_, last = loop.heard["s"]
    assert (first.running, first.token_ids) == (True, ())
    assert last.result is not None
    assert (last.result.finish_reason, last.result.num_generated_tokens) == (FinishReason.LENGTH, 2)


def test_prompts_are_read_in_chunks_beside_those_that_decode() -> None:
    loop = Loop(max_rows=32, num_blocks=64)
    decoding = loop.submit("decoding", max_tokens=50)
    loop.step()
    reading = loop.submit("reading", prompt_len=100, max_tokens=1)
    chunks = []
    while not reading.ended:
        plan = loop.step()
        assert [part.session for part in plan.decoding] == [decoding]
        assert plan.num_rows <= 32
        chunks += [part.stop - part.start for part in plan.reading]
    assert chunks == [31, 31, 31, 7]
    assert loop.tokens("reading") == [100]


def test_a_prefix_that_is_known_is_not_computed_again() -> None:
    loop = Loop()
    loop.submit("first", prompt_len=40, max_tokens=1, cache_salt="one")
    loop.run()
    same = loop.submit("second", prompt_len=40, max_tokens=1, cache_salt="one")
    other = loop.submit("third", prompt_len=40, max_tokens=1, cache_salt="another")
    plan = loop.step()
    assert {part.session.serial: part.start for part in plan.reading} == {same.serial: 32, other.serial: 0}


def test_the_youngest_gives_its_pages_to_the_others_and_ends_all_the_same() -> None:
    # Room for the prompts of three and for what two of them generate.
    loop = Loop(num_blocks=9, max_num_seqs=3)
    for name in ("a", "b", "c"):
        loop.submit(name, prompt_len=30, max_tokens=40)
    preempted = 0
    while loop.scheduler.num_sessions:
        before = list(loop.scheduler.running)
        plan = loop.step()
        if loop.report.num_preempted:
            preempted += loop.report.num_preempted
            assert [part.session for part in plan.decoding] == before[: len(plan.decoding)], "the youngest goes first"
    assert preempted > 0
    assert [loop.tokens(name) for name in "abc"] == [text(30, 40)] * 3
    assert loop.pool.num_used == 0


def test_right_guesses_are_committed_with_the_token_after_them() -> None:
    loop = Loop()
    loop.drafter()
    session = loop.submit("s", max_tokens=30)
    loop.step()
    loop.draft(session, right=2, wrong=2)
    plan = loop.step()
    assert plan.mode is StepMode.DRAFTING
    assert [len(part.nodes) for part in plan.decoding] == [4]
    assert loop.heard["s"][-1].token_ids == (6, 7, 8)
    assert (loop.report.gammas, loop.report.accepted, loop.report.num_misses) == ([4], [2], 1)
    assert loop.scratch.num_used == 0
    loop.run()
    assert loop.tokens("s") == text(5, 30)


def test_a_drafter_is_told_of_a_prompt_before_the_step_that_reads_it_and_of_every_commit() -> None:
    loop = Loop()
    loop.drafter()
    loop.submit("s", max_tokens=3)
    plan = loop.scheduler.plan(loop.now_s)
    to_drafters, _ = loop.scheduler.tier.take()
    (opened,) = to_drafters[DRAFTER]
    assert isinstance(opened, OpenSession)
    assert opened.token_ids == tuple(range(5))
    assert [part.session.session_id for part in plan.reading] == ["s"]


def test_what_a_drafter_hears_follows_the_price() -> None:
    loop = Loop(policy=Policy(price=1.0))
    loop.drafter()
    loop.submit("s", max_tokens=60)
    for _ in range(5):
        assert loop.step().mode is StepMode.PLAIN
    assert loop.told == [], "at rest, a drafter hears not even of sessions"
    loop.policy.at(0.1)
    for _ in range(3):
        loop.step()
    opened, *commits = loop.told
    assert isinstance(opened, OpenSession)
    assert len(opened.token_ids) == 5 + 6, "of all at once when it is called"
    assert [type(each) for each in commits] == [Commit, Commit]
    loop.told.clear()
    loop.policy.at(1.0)
    for _ in range(3):
        loop.step()
    (rest,) = loop.told
    assert isinstance(rest, Commit)
    assert rest.price == 1.0, "that it may rest, and no more"


def test_a_drafter_that_dies_costs_drafts_alone_and_another_hears_all() -> None:
    loop = Loop()
    loop.drafter()
    session = loop.submit("s", max_tokens=40)
    loop.step()
    loop.draft(session, right=3)
    loop.drafter(up=False)
    loop.step()
    assert loop.heard["s"][-1].token_ids == (6, 7, 8, 9), "what it said before is there"
    loop.told.clear()
    for _ in range(4):
        assert loop.step().mode is StepMode.PLAIN
    assert loop.told == []
    loop.drafter()
    (opened,) = loop.told
    assert isinstance(opened, OpenSession)
    assert opened.token_ids == tuple(range(session.committed_len))
    loop.run()
    assert loop.tokens("s") == text(5, 40)
    assert isinstance(loop.told[-1], CloseSession)


def test_a_drafter_that_lags_is_told_what_it_misses_once_a_step() -> None:
    loop = Loop()
    loop.drafter()
    loop.submit("s", max_tokens=40)
    loop.step()
    loop.step()
    loop.told.clear()
    lagging = LaggingSession(session_id="s", epoch=1, have_len=5)
    loop.say(lagging, lagging, lagging)
    loop.step()
    catch_up, _ = loop.told
    assert isinstance(catch_up, Commit)
    assert (catch_up.base_len, catch_up.token_ids) == (5, (5, 6))


def test_a_client_that_leaves_frees_its_place_and_pages() -> None:
    loop = Loop(max_num_seqs=1)
    leaving = loop.submit("leaving", max_tokens=500)
    loop.submit("next", max_tokens=2)
    loop.step()
    loop.scheduler.drop(leaving)
    assert loop.scheduler.session("leaving", leaving.serial) is None
    loop.run()
    assert loop.tokens("next") == text(5, 2)
    assert loop.pool.num_used == 0


@pytest.mark.parametrize("answered", [True, False])
def test_a_step_waits_for_drafts_that_are_due_and_not_for_long(answered: bool) -> None:
    loop = Loop()
    loop.drafter()
    session = loop.submit("s", max_tokens=60)
    loop.step()
    loop.draft(session, right=1)
    loop.step()
    assert loop.scheduler.patience_s(loop.now_s) > 0.0
    if answered:
        # A full tree has nothing to gain by waiting for more.
        loop.draft(session, right=4)
        loop.policy.at(0.99)
        loop.step()
    else:
        loop.now_s += 1.0
        loop.scheduler.note_silence(loop.now_s)
        assert loop.scheduler.patience_s(loop.now_s) == 0.0, "it is overdue"


def test_no_session_waits_with_few_tokens_to_go() -> None:
    loop = Loop()
    loop.drafter()
    session = loop.submit("s", max_tokens=9)
    loop.step()
    loop.draft(session, right=1)
    loop.step()
    assert loop.scheduler.patience_s(loop.now_s) == 0.0


def test_a_suspect_runs_alone_once_its_gateway_has_heard_of_it() -> None:
    loop = Loop()
    other = loop.submit("other", max_tokens=60)
    loop.step()
    suspect = loop.submit("suspect", max_tokens=3, suspect=True)
    for _ in range(3):
        assert [part.session for part in loop.step().parts] == [other]
    assert [each.running for each in loop.heard["suspect"]] == [True]
    suspect.heard = True
    assert [part.session for part in loop.step().parts] == [suspect]
    assert {part.session.session_id for part in loop.step().parts} == {"other", "suspect"}, "it has a token"


def test_a_session_that_gets_nothing_to_choose_from_ends_alone_and_its_pages_are_not_trusted() -> None:
    loop = Loop()
    loop.submit("good", prompt_len=40, max_tokens=10, cache_salt="same")
    loop.step()
    loop.submit("bad", prompt_len=40, max_tokens=10, cache_salt="same")
    plan = loop.scheduler.plan(loop.now_s)
    loop.scheduler.take_outcomes()
    (bad,) = plan.reading
    loop.scheduler.give_up(bad)
    for part in plan.decoding:
        tokens = (part.session.committed_len,)
        part.session.ends_with(tokens[0])
        loop.scheduler.commit(part, Verdict(token_ids=tokens), batch_size=2, now_s=loop.now_s)
    loop.scheduler.end_step(plan, loop.now_s)
    assert [each.session_id for each in loop.scheduler.running] == ["good"]
    assert loop.pool.num_cached == 0, "nobody else finds what it was computed from"

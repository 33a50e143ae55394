"""When an engine rehearses and when it stops, by a scripted engine; what nobody is to see stays inside."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.messages import GenerateRequest, ModelIdentity
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import (
    Cancel,
    DrafterNews,
    LinkChanged,
    Outcome,
    SetMode,
    StepReport,
    Submit,
    TargetEvent,
    TargetOutput,
    TuningLoaded,
)
from paceline.engine.loop import Compute, inline, run_sync
from paceline.engine.rehearsing import IDLE_S, LEAST_STEPS, MOST_S, MOST_STEPS, MOST_UNCOUNTED, RehearsingEngine

IDENTITY = ModelIdentity(name="m", vocab_hash="", vocab_size=100, context_len=512)
FIRST_NUMBER, DRAFT = 10, "draft"
ASKED = Submit(
    request=GenerateRequest(
        session_id="s",
        epoch=1,
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=8),
        speculation=SpeculationParams(),
    ),
    number=1,
)


class Engine:
    """Takes events as an engine does; its steps report what a test says."""

    def __init__(self) -> None:
        self.sessions: set[int] = set()
        self.drafters: set[str] = set()
        self.drafts: bool | None = None
        self.over = ""
        self.report: Callable[[], StepReport] = StepReport
        self.committed: list[Outcome] = []

    def handle(self, event: TargetEvent) -> None:
        match event:
            case Submit():
                self.sessions.add(event.number)
                self.drafters.add(event.drafter_address)
            case Cancel():
                self.sessions.remove(event.number)
            case SetMode():
                self.drafts, self.over = event.drafts, event.over

    def has_work(self) -> bool:
        return bool(self.sessions)

    def patience_s(self) -> float:
        return 0.0

    async def step(self, compute: Compute = inline, tell: Callable[[DrafterNews], None] | None = None) -> TargetOutput:
        del compute
        report, committed = self.report(), self.committed
        report.num_rows, report.gammas, self.committed = 1, [0] * len(self.sessions), []
        if tell is not None:
            tell(TargetOutput(news=committed, to_drafters={}, broken_links={}, report=StepReport()))
        return TargetOutput(news=[], to_drafters={"drafter": []}, broken_links={}, report=report)


class Play:
    """An engine with four places that is told to rehearse."""

    def __init__(self) -> None:
        self.now_s, self.num_ended = 0.0, 0
        self.engine = Engine()
        self.outside = RehearsingEngine(
            self.engine,
            IDENTITY,
            max_sessions=4,
            numbers=itertools.count(FIRST_NUMBER),
            clock=lambda: self.now_s,
            over=self.ended,
        )
        self.outside.handle(LinkChanged(address="drafter", up=True))
        self.outside.handle(TuningLoaded(learned=None, draft=DRAFT))

    def ended(self) -> None:
        self.num_ended += 1

    def step(self, count: int = 1, **report: object) -> DrafterNews:
        """Waits as long as the engine does, and runs steps."""
        self.engine.report = lambda: StepReport(**{"seconds": 0.01, **report})  # type: ignore[arg-type]
        for _ in range(count):
            assert self.outside.has_work()
            self.now_s += self.outside.patience_s()
            news = run_sync(self.outside.step(tell=lambda told: self.seen(told)))
        return news

    def seen(self, news: DrafterNews) -> None:
        assert self.engine.drafts is None or not isinstance(news, TargetOutput)


@pytest.fixture
def play() -> Play:
    return Play()


def test_on_a_machine_that_is_too_busy_it_ends_with_the_loads_that_it_has_shown(play: Play) -> None:
    while play.engine.drafts is not True:
        play.step(responded=True)
    play.step(LEAST_STEPS + MOST_STEPS, responded=True)
    while play.outside.has_work():
        play.now_s += 30.0
        play.step(responded=True)
        assert play.now_s < 10 * MOST_S
    assert (play.num_ended, play.engine.over) == (1, DRAFT)
    assert not play.engine.sessions


def test_it_begins_once_nobody_has_been_there_for_a_while(play: Play) -> None:
    assert play.outside.patience_s() == IDLE_S
    news = play.step()
    assert play.engine.drafters == {"drafter"}
    assert not isinstance(news, TargetOutput)
    assert news.to_drafters == {"drafter": []}


def test_it_stops_at_any_step_and_goes_on_with_what_is_left(play: Play) -> None:
    play.step(3 * MOST_STEPS - 1)
    assert (len(play.engine.sessions), play.engine.drafts) == (2, False)
    play.outside.handle(ASKED)
    assert play.engine.sessions == {ASKED.number}
    assert (play.engine.drafts, play.engine.over) == (None, "")
    assert isinstance(play.step(), TargetOutput)
    play.outside.handle(Cancel(number=ASKED.number))
    assert play.outside.patience_s() == IDLE_S
    steps = 0
    while play.outside.has_work():
        play.step()
        steps += 1
        if play.outside.has_work():
            assert len(play.engine.sessions) == (2 if steps < 2 * MOST_STEPS else 4)
    assert steps == 4 * MOST_STEPS, "steps of the one that was cut off do not count"
    assert not play.engine.sessions
    assert (play.engine.drafts, play.engine.over) == (None, DRAFT)
    assert play.num_ended == 1


@pytest.mark.parametrize("report", [{"num_prefill_rows": 8}, {"responded": False}], ids=["prompts", "drafters lag"])
def test_steps_that_show_nothing_do_not_count_and_are_borne_for_a_while(play: Play, report: dict[str, object]) -> None:
    play.step(MOST_UNCOUNTED - 1, **report)
    play.step(LEAST_STEPS - 1, seconds=0.1)
    assert play.engine.drafts is False
    play.step(seconds=0.1)
    assert play.engine.drafts is True
    play.step(MOST_UNCOUNTED, **report)
    assert len(play.engine.sessions) == 2


def test_it_waits_for_a_drafter_that_is_lost(play: Play) -> None:
    play.step()
    play.outside.handle(LinkChanged(address="drafter", up=False))
    assert not play.engine.sessions
    assert not play.outside.has_work()
    play.outside.handle(LinkChanged(address="another", up=True))
    play.step()
    assert play.engine.drafters == {"drafter", "another"}


def test_a_drafter_that_is_lost_is_replaced_by_another_that_was_there_before(play: Play) -> None:
    play.outside.handle(LinkChanged(address="another", up=True))
    play.step()
    play.outside.handle(LinkChanged(address="drafter", up=False))
    play.step()
    assert play.engine.drafters == {"drafter", "another"}


def test_a_drafter_that_never_answers_teaches_nothing(play: Play) -> None:
    while not play.num_ended:
        play.step(responded=not play.engine.drafts)
    assert not play.engine.over


def test_an_engine_that_takes_no_such_session_is_left_alone(play: Play) -> None:
    play.step()
    play.engine.committed = [(FIRST_NUMBER, InvalidRequestError("prompt", "is refused"))]
    play.step()
    assert not play.engine.sessions
    assert (play.engine.over, play.num_ended) == ("", 1)
    assert not play.outside.has_work()


def test_what_another_has_learned_takes_its_place(play: Play) -> None:
    play.outside.handle(TuningLoaded(learned=b"{}"))
    assert not play.outside.has_work()

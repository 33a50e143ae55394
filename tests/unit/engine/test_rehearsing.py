"""When a rehearsal begins and ends, by a scripted engine; what nobody is to see stays inside. Time is simulated."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.messages import ModelIdentity, SessionEvent, StepCommit
from paceline.core.target_events import Cancel, SetMode, StepReport, Submit, TargetEvent, TargetOutput
from paceline.engine.rehearsing import IDLE_S, LEAST_STEPS, MOST_S, MOST_STEPS, MOST_UNCOUNTED, RehearsalClient
from paceline.planning.engines import simulate

IDENTITY = ModelIdentity(name="m", vocab_hash="", vocab_size=100, context_len=512)
FIRST_NUMBER, USER, DRAFT = 10, 1, "draft"


class Play:
    """A rehearsal for an engine with four places, which takes events at once."""

    def __init__(self) -> None:
        self.sessions: set[int] = set()
        self.drafters: set[str] = set()
        self.drafts: bool | None = None
        self.over = ""
        self.users = 0
        self.rehearsal = RehearsalClient(
            IDENTITY,
            max_sessions=4,
            numbers=itertools.count(FIRST_NUMBER),
            post=self.handle,
            busy=lambda: self.users > 0,
        )
        self.rehearsal.linked("drafter", up=True)
        self.running = asyncio.create_task(self.rehearsal.run(DRAFT))

    def handle(self, event: TargetEvent) -> None:
        match event:
            case Submit():
                self.sessions.add(event.number)
                self.drafters.add(event.drafter_address)
            case Cancel():
                self.sessions.remove(event.number)
            case SetMode():
                self.drafts, self.over = event.drafts, event.over

    def step(self, count: int = 1, *, commit: StepCommit | None = None, **report: object) -> None:
        """Steps of the rehearsal's sessions."""
        for _ in range(count):
            told = StepReport(num_rows=1, gammas=[0] * len(self.sessions), **{"seconds": 0.01, **report})  # type: ignore[arg-type]
            assert self.rehearsal.takes(
                TargetOutput(commit=commit or StepCommit(), to_drafters={}, broken_links={}, report=told)
            )

    async def begun(self) -> None:
        await asyncio.sleep(2.5 * IDLE_S)
        assert self.sessions


def commit_of(number: int) -> StepCommit:
    """A token of a session."""
    commit = StepCommit()
    commit.add(number, 0, [1])
    return commit


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**options: object) -> None:
        simulate(lambda _: test(**options))

    return run


@virtual
async def test_it_begins_once_nobody_has_been_there_for_a_while() -> None:
    play = Play()
    play.users = 1
    await asyncio.sleep(10 * IDLE_S)
    assert not play.sessions
    play.users = 0
    await play.begun()
    assert (play.drafters, play.drafts) == ({"drafter"}, False)


@virtual
async def test_it_does_not_begin_where_requests_follow_one_another() -> None:
    play = Play()
    for _ in range(20):
        play.rehearsal.interrupt()
        await asyncio.sleep(0.6 * IDLE_S)
    assert not play.sessions


@virtual
async def test_on_a_machine_that_is_too_busy_it_ends_with_the_loads_that_it_has_shown() -> None:
    play = Play()
    await play.begun()
    play.step(MOST_STEPS)
    assert play.drafts is True
    play.step(MOST_STEPS)
    play.step(int(MOST_S / 30.0), seconds=30.0)
    await asyncio.wait_for(play.running, 3 * IDLE_S)
    assert (play.over, play.sessions) == (DRAFT, set())


@virtual
async def test_it_stops_at_any_step_and_goes_on_with_what_is_left() -> None:
    play = Play()
    await play.begun()
    play.step(3 * MOST_STEPS - 1)
    assert (len(play.sessions), play.drafts) == (2, False)
    last = min(play.sessions)
    play.users = 1
    play.rehearsal.interrupt()
    assert (play.sessions, play.drafts, play.over) == (set(), None, "")
    report = StepReport(num_rows=1)
    under_way = TargetOutput(commit=commit_of(last), to_drafters={}, broken_links={}, report=report)
    assert play.rehearsal.takes(under_way)
    seen = TargetOutput(commit=commit_of(USER), to_drafters={}, broken_links={}, report=report)
    assert not play.rehearsal.takes(seen)
    play.users = 0
    await play.begun()
    for load in (2, 2, 4, 4):
        assert len(play.sessions) == load
        play.step(MOST_STEPS)
    await asyncio.wait_for(play.running, 3 * IDLE_S)
    assert (play.sessions, play.drafts, play.over) == (set(), None, DRAFT)


@virtual
async def test_a_text_that_ends_is_followed_by_another() -> None:
    play = Play()
    await play.begun()
    (number,) = play.sessions
    ended = commit_of(number)
    ended.events[number] = SessionEvent(result=object())  # type: ignore[arg-type]
    play.step(commit=ended)
    assert play.sessions == {number, number + 1}


@pytest.mark.parametrize("report", [{"num_prefill_rows": 8}, {"responded": False}], ids=["prompts", "drafters lag"])
@virtual
async def test_steps_that_show_nothing_do_not_count_and_are_borne_for_a_while(report: dict[str, object]) -> None:
    play = Play()
    await play.begun()
    play.step(MOST_UNCOUNTED - 1, **report)
    play.step(LEAST_STEPS - 1, seconds=0.1)
    assert play.drafts is False
    play.step(seconds=0.1)
    assert play.drafts is True
    play.step(MOST_UNCOUNTED, **report)
    assert len(play.sessions) == 2


@virtual
async def test_it_waits_for_a_drafter_that_is_lost() -> None:
    play = Play()
    await play.begun()
    play.rehearsal.linked("drafter", up=False)
    await asyncio.sleep(10 * IDLE_S)
    assert not play.sessions
    play.rehearsal.linked("another", up=True)
    await play.begun()
    assert play.drafters == {"drafter", "another"}


@virtual
async def test_a_drafter_that_never_answers_teaches_nothing() -> None:
    play = Play()
    await play.begun()
    while play.sessions:
        play.step(responded=not play.drafts)
    await asyncio.wait_for(play.running, 3 * IDLE_S)
    assert not play.over


@virtual
async def test_an_engine_that_takes_no_such_session_is_left_alone() -> None:
    play = Play()
    await play.begun()
    play.step(commit=StepCommit(errors={FIRST_NUMBER: InvalidRequestError("prompt", "is refused")}))
    await asyncio.wait_for(play.running, 3 * IDLE_S)
    assert (play.sessions, play.over) == (set(), "")

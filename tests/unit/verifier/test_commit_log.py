"""What of a session's tokens leaves when: the first and the last at once, those between together."""

import asyncio
from collections.abc import Sequence

import pytest

from paceline.core.errors import UnavailableError
from paceline.core.messages import (
    FinishReason,
    GenerateResult,
    PositionLogprobs,
    SessionEvent,
    SpeculationRecord,
    TokenOrigin,
)
from paceline.verifier import commit_log
from paceline.verifier.commit_log import PART_BYTES, RECORD_S, SILENCE_S, GatewayLog, Gathering, SessionLog
from paceline.wire import LogPart, size_of_event
from tests.support.steps import Step, steps_of

FOR_EVER_S = 1e6
RESULT = GenerateResult(
    finish_reason=FinishReason.LENGTH, num_prompt_tokens=1, num_cached_tokens=0, num_generated_tokens=6
)


def step(*token_ids: int, result: GenerateResult | None = None) -> Step:
    """Tokens that count from 1 on, so that each says where it belongs."""
    origins = bytes([TokenOrigin.PLAIN]) * len(token_ids)
    return Step(token_ids, origins, token_ids[0] - 1, result=result)


class Log:
    """One gateway's log, and its sessions by their numbers."""

    def __init__(self, longest_s: float = 0.0, per_session_s: float = FOR_EVER_S) -> None:
        self.gateway = GatewayLog()
        self.sessions: dict[int, SessionLog] = {}
        self._gathering = Gathering(longest_s, self.sessions.values, per_session_s)

    def start(self, number: int = 1, *, whole: bool = False, offset: int = 0) -> SessionLog:
        session = SessionLog(self.gateway, number, whole=whole, offset=offset, now_s=now_s())
        self.sessions[number] = session
        return session

    def commit(self, *steps: Step) -> None:
        """The sessions' tokens and events of one step, in order of their numbers."""
        for session, each in zip(self.sessions.values(), steps, strict=False):
            event = None if each.event == SessionEvent() else each.event
            session.put(each.offset, each.token_ids, each.origins, event, now_s())
        self._gathering.after_step()

    async def parts(self) -> list[LogPart]:
        """What may leave now, message by message."""
        parts = []
        while True:
            taking = asyncio.ensure_future(self.gateway.take())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not taking.done():
                taking.cancel()
                return parts
            part = taking.result()
            assert part is not None
            parts.append(part)

    async def told(self, number: int = 1) -> list[tuple[int, ...]]:
        """The tokens of a session that may leave now, message by message."""
        return [
            each.token_ids for part in await self.parts() for known, each in steps_of(part.commit) if known == number
        ]


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def steps_of_one(log: Log, steps: Sequence[Step], *, whole: bool = False) -> list[list[tuple[int, ...]]]:
    log.start(whole=whole)
    heard = []
    for each in steps:
        log.commit(each)
        heard.append(await log.told())
    return heard


async def test_first_and_last_tokens_leave_at_once_and_those_between_gather() -> None:
    steps = [step(1), step(2, 3), step(4), step(5), step(6, result=RESULT)]
    # The first step empties all logs, the rest waits for ever.
    assert await steps_of_one(Log(FOR_EVER_S), steps) == [[(1,)], [], [], [], [(2, 3, 4, 5, 6)]]


async def test_without_an_interval_each_step_leaves_at_once() -> None:
    steps = [step(1), step(2, 3), step(4), step(5, result=RESULT)]
    assert await steps_of_one(Log(), steps) == [[(1,)], [(2, 3)], [(4,)], [(5,)]]


async def test_what_gathers_leaves_without_a_further_step() -> None:
    log = Log(FOR_EVER_S, per_session_s=0.02)
    log.start()
    for each in (step(1), step(2), step(3)):
        log.commit(each)
    assert await log.told() in ([(1,)], [(1, 2, 3)])
    log.commit(step(4))
    log.commit(step(5))
    part = await log.gateway.take()
    assert part is not None
    assert part.commit.tokens == [4, 5]


async def test_sessions_of_a_step_leave_in_one_message_and_a_new_one_does_not_wait_for_the_others() -> None:
    log = Log(FOR_EVER_S)
    log.start(1)
    log.commit(step(1))
    assert await log.told() == [(1,)]
    log.start(2)
    log.commit(step(2), step(1))
    assert [part.commit.numbers for part in await log.parts()] == [[2]]
    log = Log()
    for number in (1, 2, 3):
        log.start(number)
    log.commit(step(1), step(1), step(1))
    assert [part.commit.numbers for part in await log.parts()] == [[1, 2, 3]]


async def test_an_error_comes_after_what_was_committed() -> None:
    log = Log(FOR_EVER_S)
    session = log.start()
    log.commit(step(1))
    assert await log.told() == [(1,)]
    log.commit(step(2))
    error = UnavailableError("it shuts down")
    session.fail(error)
    (part,) = await log.parts()
    assert (part.commit.tokens, part.commit.errors) == ([2], {1: error})


async def test_a_text_wanted_whole_leaves_rarely_but_its_end_at_once() -> None:
    steps = [step(1), step(2), step(3), step(4, result=RESULT)]
    assert await steps_of_one(Log(), steps, whole=True) == [[(1,)], [], [], [(2, 3, 4)]]


async def test_tokens_that_do_not_join_onto_those_before_are_an_error_and_not_told() -> None:
    for stray in (step(3), step(1)):
        log = Log()
        log.start()
        log.commit(step(1))
        with pytest.raises(UnavailableError, match=f"token 1 of the session was to come, not {stray.offset}"):
            log.commit(stray)
        assert await log.told() == [(1,)]


async def test_a_session_that_goes_on_begins_with_the_token_after_those_it_has() -> None:
    log = Log()
    log.start(offset=4)
    log.commit(step(5, 6))
    assert await log.told() == [(5, 6)]


async def test_a_sign_of_life_is_for_gateways_that_were_told_nothing_and_is_one_for_all_sessions() -> None:
    log = Log(FOR_EVER_S)
    log.start(1)
    log.start(2)
    log.gateway.show_life(now_s() + 0.5 * SILENCE_S)
    assert await log.parts() == []
    for _ in range(3):
        log.gateway.show_life(now_s() + 2 * SILENCE_S)
    assert await log.parts() == [LogPart(taken=[], alive=True)]
    log.gateway.alive = True
    assert await log.parts() == []


async def test_that_a_session_runs_is_told_at_once_and_its_first_tokens_wait_for_nothing_after_it() -> None:
    log = Log(FOR_EVER_S)
    log.start().put(None, (), b"", SessionEvent(running=True), now_s())
    (part,) = await log.parts()
    assert [*steps_of(part.commit)] == [(1, Step(running=True))]
    log.commit(step(1))
    assert await log.told() == [(1,)]


async def test_records_come_with_results_with_sessions_that_are_left_and_now_and_then() -> None:
    log = Log()
    first, _ = log.start(1), log.start(2)
    first.tally.num_steps = 3
    log.commit(step(1), step(1))
    assert [part.commit.events for part in await log.parts()] == [{}]
    log.commit(step(2), step(2))
    part = LogPart()
    first.move_to(part, 1, now_s() + 2 * RECORD_S)
    assert part.commit.events[1].speculation == SpeculationRecord(num_steps=3)
    log.commit(step(3), step(3))
    first.tally.num_steps = 4
    first.leave()
    (part,) = await log.parts()
    left = Step(offset=3, speculation=SpeculationRecord(num_steps=4))
    assert dict(steps_of(part.commit))[1] == left


async def test_a_session_that_is_left_is_answered_also_where_nothing_is_known_of_it() -> None:
    log = Log()
    log.start().leave()
    (part,) = await log.parts()
    assert [*steps_of(part.commit)] == [(1, Step())]


async def test_a_log_that_is_closed_ends_once_all_is_told() -> None:
    log = Log()
    session = log.start()
    log.commit(step(1))
    session.fail(UnavailableError("it shuts down"))
    log.gateway.close()
    assert await log.gateway.take() is not None
    assert await log.gateway.take() is None


@pytest.mark.parametrize("kind", ["taken", "ended", "left"])
async def test_sessions_that_nobody_reads_of_leave_in_several_messages_or_are_too_many(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "MAX_SESSIONS", 9)
    monkeypatch.setattr(commit_log, "PART_ENTRIES", 4)
    log = Log()
    full = []
    for number in range(1, 11):
        if kind == "taken":
            log.gateway.taken(number)
        elif kind == "ended":
            log.gateway.end(number, UnavailableError("none is free"))
        else:
            log.start(number).leave()
        full.append(log.gateway.is_full)
    assert full == [False] * 9 + [True]
    assert [len(part.commit.sessions) + len(part.taken) for part in await log.parts()] == [4, 4, 2]


async def test_joined_steps_keep_order_and_what_belongs_to_each_token() -> None:
    chances = [PositionLogprobs(token_id=token_id, logprob=-float(token_id), top=()) for token_id in (1, 2, 3)]
    log, origins = Log(), bytes([TokenOrigin.PLAIN, TokenOrigin.ACCEPTED, TokenOrigin.BONUS])
    log.start(offset=5).put(None, (), b"", SessionEvent(running=True), now_s())
    log.commit(Step((1,), origins[:1], 5, (chances[0],)))
    log.commit(Step((2, 3), origins[1:], 6, (chances[1], chances[2]), RESULT, lossy=True))
    (part,) = await log.parts()
    whole = Step((1, 2, 3), origins, 5, tuple(chances), RESULT, lossy=True, running=True)
    assert [*steps_of(part.commit)] == [(1, whole)]


async def test_a_gateway_that_does_not_read_is_left_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "LOG_BYTES", 1000)
    log = Log()
    log.start(1)
    log.start(2)
    top = tuple((token_id, -1.0) for token_id in range(20))
    judged = (PositionLogprobs(token_id=1, logprob=-1.0, top=top),)
    steps = [Step((1,), bytes(1), offset, judged) for offset in range(100)]
    with pytest.raises(asyncio.QueueFull):
        for each in steps:
            log.commit(each, each)


async def test_bytes_that_were_sent_or_left_behind_wait_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "LOG_BYTES", 1)
    log = Log(FOR_EVER_S)
    # A log that still counted earlier tokens would take no two steps more.
    for number in range(1, 6):
        session = log.start(number)
        log.sessions = {number: session}
        session.put(0, (1,), b"", SessionEvent(running=True), now_s())
        assert await log.told(number) == [(1,)]
        session.put(1, (2,), b"", None, now_s())
        session.leave()
        assert await log.told(number) == [()]


async def test_a_lossy_step_is_told_with_later_ones_that_are_not() -> None:
    log = Log(FOR_EVER_S)
    log.start()
    log.commit(step(1))
    await log.parts()
    log.commit(step(2)._replace(lossy=True))
    log.commit(step(3, result=RESULT))
    [(_, told)] = [each for part in await log.parts() for each in steps_of(part.commit)]
    assert (told.token_ids, told.lossy, told.result) == ((2, 3), True, RESULT)


async def test_log_probabilities_of_a_long_prompt_leave_however_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "LOG_BYTES", 1000)
    log = Log()
    log.start()
    judged = (PositionLogprobs(token_id=1, logprob=-1.0, top=tuple((each, -1.0) for each in range(20))),)
    log.commit(Step((1,) * 50, logprobs=50 * judged))
    (part,) = await log.parts()
    assert len(part.commit.events[1].logprobs) == 50


async def test_log_probabilities_of_a_long_prompt_leave_in_several_messages() -> None:
    log = Log()
    log.start()
    judged = PositionLogprobs(token_id=1, logprob=-1.0, top=tuple((each, -1.0) for each in range(20)))
    log.commit(Step((1,), prompt_logprobs=(judged,) * 300, prompt_offset=1))
    told = [each for part in await log.parts() for _, each in steps_of(part.commit)]
    assert [(each.prompt_offset, len(each.prompt_logprobs)) for each in told] == [(1, 128), (129, 172)]
    assert [each.token_ids for each in told] == [(), (1,)]
    assert max(size_of_event(each.event) for each in told) <= PART_BYTES


async def test_long_prompts_that_are_judged_hold_nobody_elses_tokens_back() -> None:
    log = Log()
    for number in (1, 2, 3):
        log.start(number)
    judged = PositionLogprobs(token_id=1, logprob=-1.0, top=tuple((each, -1.0) for each in range(20)))
    prompt = Step((1,), prompt_logprobs=(judged,) * 1280, prompt_offset=1)
    log.commit(prompt, prompt, step(1))
    numbers = [part.commit.numbers for part in await log.parts()]
    assert 3 in numbers[1], "the two before it have a part each first"
    assert {number for part in numbers[-2:] for number in part} <= {1, 2}


async def test_what_is_too_much_for_a_message_leaves_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "PART_BYTES", 40)
    log = Log()
    for number in (1, 2, 3):
        log.start(number)
    log.commit(step(1), step(1), step(1))
    for each in (step(2), step(3)):
        log.commit(each, each, each)
    parts = await log.parts()
    assert len(parts) > 2
    told = {
        number: [t for p in parts for n, each in steps_of(p.commit) if n == number for t in each.token_ids]
        for number in (1, 2, 3)
    }
    assert told == {1: [1, 2, 3], 2: [1, 2, 3], 3: [1, 2, 3]}

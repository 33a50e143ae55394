"""What of a session's tokens leaves when: the first and the last at once, those between together."""

import asyncio
from collections.abc import Sequence

import pytest

from paceline.core.errors import OverloadedError, PacelineError, UnavailableError
from paceline.core.messages import CommittedTokens, FinishReason, GenerateResult, PositionLogprobs, TokenFate
from paceline.verifier import outbox as outbox_module
from paceline.verifier.outbox import SILENCE_S, Outbox, Outboxes, joined

FOR_EVER_S = 1e6
RESULT = GenerateResult(
    finish_reason=FinishReason.LENGTH, num_prompt_tokens=1, num_cached_tokens=0, num_generated_tokens=6
)


def step(*token_ids: int, result: GenerateResult | None = None) -> CommittedTokens:
    """Tokens that count from 1 on, so that each says where it belongs."""
    fates = (TokenFate.PLAIN,) * len(token_ids)
    return CommittedTokens(token_ids=token_ids, fates=fates, result=result, offset=token_ids[0] - 1)


async def told(outbox: Outbox) -> list[tuple[int, ...]]:
    """What may leave now, message by message."""
    messages = []
    while True:
        taking = asyncio.ensure_future(outbox.take())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if not taking.done():
            taking.cancel()
            return messages
        messages.append(taking.result().token_ids)
        if taking.result().result is not None:
            return messages


async def steps_of_one(outboxes: Outboxes, steps: Sequence[CommittedTokens]) -> list[list[tuple[int, ...]]]:
    outbox = outboxes.open(1)
    heard = []
    for each in steps:
        outboxes.deliver([(1, each)])
        heard.append(await told(outbox))
    return heard


async def test_first_and_last_tokens_leave_at_once_and_those_between_gather() -> None:
    steps = [step(1), step(2, 3), step(4), step(5), step(6, result=RESULT)]
    gathered = await steps_of_one(Outboxes(FOR_EVER_S, FOR_EVER_S), steps)
    # The first step empties all outboxes, the rest waits for ever.
    assert gathered == [[(1,)], [], [], [], [(2, 3, 4, 5, 6)]]


async def test_without_an_interval_each_step_leaves_at_once() -> None:
    steps = [step(1), step(2, 3), step(4), step(5, result=RESULT)]
    assert await steps_of_one(Outboxes(0.0), steps) == [[(1,)], [(2, 3)], [(4,)], [(5,)]]


async def test_what_gathers_leaves_without_a_further_step() -> None:
    outboxes = Outboxes(FOR_EVER_S, per_session_s=0.02)
    outbox = outboxes.open(1)
    for each in (step(1), step(2), step(3)):
        outboxes.deliver([(1, each)])
    assert (await outbox.take()).token_ids in ((1,), (1, 2, 3))
    outboxes.deliver([(1, step(4))])
    outboxes.deliver([(1, step(5))])
    assert (await outbox.take()).token_ids == (4, 5)


async def test_sessions_are_emptied_together_and_a_new_one_does_not_wait_for_the_others() -> None:
    outboxes = Outboxes(FOR_EVER_S, FOR_EVER_S)
    first = outboxes.open(1)
    outboxes.deliver([(1, step(1))])
    assert await told(first) == [(1,)]
    second = outboxes.open(2)
    outboxes.deliver([(1, step(2)), (2, step(1))])
    assert (await told(first), await told(second)) == ([], [(1,)])


async def test_an_error_comes_after_what_was_committed() -> None:
    outboxes = Outboxes(FOR_EVER_S, FOR_EVER_S)
    outbox = outboxes.open(1)
    outboxes.deliver([(1, step(1))])
    assert await told(outbox) == [(1,)]
    outboxes.deliver([(1, step(2))])
    outboxes.fail_all(UnavailableError("it shuts down"))
    outboxes.deliver([(1, OverloadedError("a later error is not told", retry_after_s=1.0))])
    assert (await outbox.take()).token_ids == (2,)
    for _ in range(2):
        with pytest.raises(PacelineError, match="it shuts down"):
            await outbox.take()


async def test_a_text_wanted_whole_leaves_rarely_but_its_end_at_once() -> None:
    outboxes = Outboxes(0.0)
    outbox = outboxes.open(1, whole=True)
    heard = []
    for each in (step(1), step(2), step(3), step(4, result=RESULT)):
        outboxes.deliver([(1, each)])
        heard.append(await told(outbox))
    assert heard == [[(1,)], [], [], [(2, 3, 4)]]


async def test_a_session_that_has_left_is_passed_over() -> None:
    outboxes = Outboxes(0.0)
    outboxes.open(1)
    outboxes.close(1)
    outboxes.deliver([(1, step(1))])
    assert len(outboxes) == 0


async def test_tokens_that_do_not_join_onto_those_before_end_the_session_and_are_not_told() -> None:
    for stray in (step(3), step(1)):
        outboxes = Outboxes(0.0)
        outbox = outboxes.open(1)
        outboxes.deliver([(1, step(1))])
        outboxes.deliver([(1, stray)])
        outboxes.deliver([(1, step(2))])
        assert (await outbox.take()).token_ids == (1,)
        with pytest.raises(UnavailableError, match=f"token 1 of the session was to come, not {stray.offset}"):
            await outbox.take()


async def test_a_session_that_goes_on_begins_with_the_token_after_those_it_has() -> None:
    outbox = Outboxes(0.0).open(1, offset=4)
    outbox.put(step(5, 6), 0.0)
    assert (await outbox.take()).offset == 4


async def test_a_sign_of_life_is_for_those_that_were_silent_and_carries_no_token() -> None:
    outboxes = Outboxes(FOR_EVER_S, FOR_EVER_S)
    silent = outboxes.open(1, offset=7)
    now_s = asyncio.get_running_loop().time()
    silent.show_life(now_s + 0.5 * SILENCE_S)
    assert await told(silent) == []
    for _ in range(3):
        silent.show_life(now_s + 2 * SILENCE_S)
    sign = await silent.take()
    assert (sign.token_ids, sign.offset, sign.running) == ((), 7, False)
    assert await told(silent) == []
    silent.put(step(8), now_s)
    assert await told(silent) == [(8,)]


async def test_what_has_gathered_for_long_is_sign_of_life_enough() -> None:
    outboxes = Outboxes(FOR_EVER_S, FOR_EVER_S)
    outbox = outboxes.open(1)
    outboxes.deliver([(1, step(1))])
    assert await told(outbox) == [(1,)]
    outboxes.deliver([(1, step(2))])
    outbox.show_life(asyncio.get_running_loop().time() + 2 * SILENCE_S)
    assert await told(outbox) == [(2,)]


async def test_that_a_session_runs_is_told_at_once_and_its_first_tokens_wait_for_nothing_after_it() -> None:
    outboxes = Outboxes(FOR_EVER_S, FOR_EVER_S)
    outbox = outboxes.open(1)
    outboxes.deliver([(1, CommittedTokens(token_ids=(), running=True))])
    assert (await outbox.take()).running
    outboxes.deliver([(1, step(1))])
    assert await told(outbox) == [(1,)]


def test_joined_steps_keep_order_and_what_belongs_to_each_token() -> None:
    chances = [PositionLogprobs(token_id=token_id, logprob=-float(token_id), top=()) for token_id in (1, 2, 3)]
    parts = [
        CommittedTokens(token_ids=(), running=True, offset=5),
        CommittedTokens(token_ids=(1,), fates=(TokenFate.PLAIN,), logprobs=(chances[0],), offset=5),
        CommittedTokens(
            token_ids=(2, 3),
            fates=(TokenFate.ACCEPTED, TokenFate.BONUS),
            logprobs=(chances[1], chances[2]),
            result=RESULT,
            lossy=True,
            offset=6,
        ),
    ]
    assert joined(parts) == CommittedTokens(
        token_ids=(1, 2, 3),
        fates=(TokenFate.PLAIN, TokenFate.ACCEPTED, TokenFate.BONUS),
        logprobs=tuple(chances),
        result=RESULT,
        lossy=True,
        offset=5,
        running=True,
    )


async def test_a_gateway_that_does_not_read_is_left_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "OUTBOX_BYTES", 1000)
    outbox = Outbox()
    top = tuple((token_id, -1.0) for token_id in range(20))
    for offset in range(100):
        judged = (PositionLogprobs(token_id=1, logprob=-1.0, top=top),)
        outbox.put(CommittedTokens(token_ids=(1,), logprobs=judged, offset=offset), FOR_EVER_S)
    # The first one may leave however large it is.
    assert (await outbox.take()).token_ids == (1, 1, 1)
    with pytest.raises(UnavailableError, match="the gateway does not read its tokens"):
        await outbox.take()


async def test_log_probabilities_of_a_long_prompt_leave_however_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "OUTBOX_BYTES", 1000)
    outbox = Outbox()
    judged = (PositionLogprobs(token_id=1, logprob=-1.0, top=tuple((each, -1.0) for each in range(20))),)
    outbox.put(CommittedTokens(token_ids=(1,) * 50, logprobs=50 * judged, offset=0), FOR_EVER_S)
    assert len((await outbox.take()).logprobs or ()) == 50

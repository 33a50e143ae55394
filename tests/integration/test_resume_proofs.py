"""A resume follows from the log and from what the client proves to have, not from what a record or a client says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from paceline.core.errors import InvalidRequestError, PacelineError, ResumeMismatchError, SessionNotFoundError
from paceline.core.messages import token_digest
from paceline.rpc.v1 import common_pb2, gateway_pb2
from paceline.service.status import error_from_rpc
from paceline.store.base import LoggedSession, PutSession, SessionState
from tests.support.scripted_fleet import EOS, MODEL, ScriptedFleet, scripted_fleet

LENGTH = 10


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet(tmp_path, max_sessions=1) as started:
        yield started


def request() -> gateway_pb2.GatewayGenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=LENGTH, seed=0)
    return gateway_pb2.GatewayGenerateRequest(model=MODEL, prompt="x", sampling=sampling)


async def logged_tokens(fleet: ScriptedFleet) -> tuple[str, list[int]]:
    """Runs a session to its end; its id and its tokens, all of them in the log of a record that says it runs on."""
    responses = [response async for response in fleet.stub.Generate(request())]
    session_id, tokens = responses[0].session_id, [token for each in responses for token in each.token_ids]
    for _ in range(10_000):
        logged = await fleet.store.session(session_id)
        if logged is not None and logged.record.state is SessionState.LENGTH:
            return session_id, tokens
        await fleet.http.get("/health")
    raise AssertionError("the session was not recorded")


async def rewrite(fleet: ScriptedFleet, session_id: str, tokens: list[int]) -> None:
    """Puts other tokens into a log, as if its gateway had died before it could write the state."""
    logged = await fleet.store.session(session_id)
    assert logged is not None
    prompt = logged.token_ids[: logged.record.prompt_len]
    record = replace(logged.record, state=SessionState.RUNNING, committed_len=len(tokens))
    await fleet.store.write_sessions([PutSession(record=record, token_ids=(*prompt, *tokens), ttl_s=60)])


def resume(session_id: str, known: list[int]) -> gateway_pb2.ResumeRequest:
    digest = token_digest(known) if known else ""
    return gateway_pb2.ResumeRequest(session_id=session_id, offset=len(known), digest=digest)


async def resumed(fleet: ScriptedFleet, asked: gateway_pb2.ResumeRequest) -> tuple[list[int], str]:
    responses = [response async for response in fleet.stub.Resume(asked)]
    return [token for each in responses for token in each.token_ids], responses[-1].result.finish_reason


async def refusal(fleet: ScriptedFleet, asked: gateway_pb2.ResumeRequest) -> tuple[PacelineError, int]:
    """Why a resume ends, and how many tokens it brought before."""
    num_tokens = 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for response in fleet.stub.Resume(asked):
            num_tokens += len(response.token_ids)
    return error_from_rpc(caught.value), num_tokens


async def test_a_log_with_all_tokens_is_finished_whatever_its_state_says(fleet: ScriptedFleet) -> None:
    session_id, tokens = await logged_tokens(fleet)
    await rewrite(fleet, session_id, tokens)
    assert await resumed(fleet, resume(session_id, tokens[:4])) == (tokens[4:], "length")
    assert len(fleet.verifier.requests) == 1


async def test_a_log_that_ends_with_the_end_of_the_text_goes_on_no_further(fleet: ScriptedFleet) -> None:
    session_id, tokens = await logged_tokens(fleet)
    ended = [*tokens[:5], EOS]
    # What stands behind the end is of nobody.
    await rewrite(fleet, session_id, [*ended, tokens[0]])
    assert await resumed(fleet, resume(session_id, ended[:2])) == (ended[2:], "stop")
    assert len(fleet.verifier.requests) == 1


async def test_a_client_with_other_tokens_than_the_log_is_refused(fleet: ScriptedFleet) -> None:
    session_id, tokens = await logged_tokens(fleet)
    error, num_tokens = await refusal(fleet, resume(session_id, [*tokens[:3], 7]))
    assert isinstance(error, ResumeMismatchError)
    assert num_tokens == 0


async def test_tokens_beyond_the_log_are_computed_again_and_held_against_the_clients(fleet: ScriptedFleet) -> None:
    session_id, tokens = await logged_tokens(fleet)
    await rewrite(fleet, session_id, tokens[:4])
    assert await resumed(fleet, resume(session_id, tokens[:8])) == (tokens[8:], "length")
    await rewrite(fleet, session_id, tokens[:4])
    error, num_tokens = await refusal(fleet, resume(session_id, [*tokens[:7], 7]))
    assert isinstance(error, ResumeMismatchError)
    assert num_tokens == 0


@pytest.mark.parametrize("parameters", ["{}", "[]", '{"sampling": 3}', '{"sampling": {"max_tokens": "x"}}'])
async def test_a_record_that_cannot_be_read_is_as_good_as_none(fleet: ScriptedFleet, parameters: str) -> None:
    session_id, _ = await logged_tokens(fleet)
    logged = await fleet.store.session(session_id)
    assert logged is not None
    record = replace(logged.record, params_json=parameters)
    await fleet.store.write_sessions([PutSession(record=record, token_ids=logged.token_ids, ttl_s=60)])
    error, _ = await refusal(fleet, resume(session_id, []))
    assert isinstance(error, SessionNotFoundError)


@pytest.mark.parametrize("wrong", [{"priority": "x"}, {"cache_salt": 5}, {"cache_salt": "\ud800"}])
async def test_a_record_with_a_field_that_cannot_be_right_is_as_good_as_none(
    fleet: ScriptedFleet, wrong: dict[str, object]
) -> None:
    session_id, _ = await logged_tokens(fleet)
    logged = await fleet.store.session(session_id)
    assert logged is not None
    parameters = json.dumps(json.loads(logged.record.params_json) | wrong)
    record = replace(logged.record, params_json=parameters)
    await fleet.store.write_sessions([PutSession(record=record, token_ids=logged.token_ids, ttl_s=60)])
    error, _ = await refusal(fleet, resume(session_id, []))
    assert isinstance(error, SessionNotFoundError)


async def test_a_session_whose_record_is_being_written_is_found_at_the_second_look(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id, tokens = await logged_tokens(fleet)
    known, looks = fleet.store.session, list[str]()

    async def late(asked: str) -> LoggedSession | None:
        looks.append(asked)
        return await known(asked) if len(looks) > 1 else None

    monkeypatch.setattr(fleet.store, "session", late)
    assert await resumed(fleet, resume(session_id, tokens[:4])) == (tokens[4:], "length")
    assert looks == [session_id] * 2


async def test_an_offset_needs_its_digest(fleet: ScriptedFleet) -> None:
    session_id, _ = await logged_tokens(fleet)
    error, _ = await refusal(fleet, gateway_pb2.ResumeRequest(session_id=session_id, offset=3))
    assert isinstance(error, InvalidRequestError)
    assert error.field == "digest"


async def test_every_message_says_where_its_tokens_stand(fleet: ScriptedFleet) -> None:
    at = 0
    async for response in fleet.stub.Generate(request()):
        if response.token_ids:
            assert response.offset == at
        at += len(response.token_ids)
    assert at == LENGTH

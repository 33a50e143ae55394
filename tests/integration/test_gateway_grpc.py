"""The gRPC door: the same sessions as over HTTP, rich errors, cancellation."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.errors import InvalidRequestError, ModelNotFoundError, PacelineError, UnavailableError
from paceline.gateway.api.endpoints.endpoint import Workers
from paceline.gateway.fleet.generation_config import ModelDefaults
from paceline.rpc.v1 import common_pb2, gateway_pb2
from paceline.service.status import error_from_rpc
from paceline.wire import speculation_record_from_pb
from tests.support.scripted_fleet import (
    CONTEXT_LEN,
    MODEL,
    RECORD,
    SHARES_A_GATEWAY,
    Script,
    ScriptedFleet,
    identity,
    scripted_fleet,
)

pytestmark = SHARES_A_GATEWAY

Request = gateway_pb2.GatewayGenerateRequest


def sampling(max_tokens: int = 10, **fields: float) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"max_tokens": max_tokens, "seed": 0, **fields})  # type: ignore[arg-type]


async def refusal(fleet: ScriptedFleet, request: Request) -> PacelineError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in fleet.stub.Generate(request):
            pass
    return error_from_rpc(caught.value)


async def test_a_completion_streams_text_and_tokens_and_ends_with_its_result(fleet: ScriptedFleet) -> None:
    request = Request(model=MODEL, prompt="the fox", sampling=sampling(seed=2))
    responses = [response async for response in fleet.stub.Generate(request)]
    assert "".join(response.text for response in responses) == fleet.letters(2, 10, "the fox")
    assert sum(len(response.token_ids) for response in responses) == 10
    assert len({response.session_id for response in responses}) == 1
    result = responses[-1].result
    assert (result.finish_reason, result.num_generated_tokens) == ("length", 10)
    assert result.num_prompt_tokens == len(fleet.verifier.requests[0].prompt_token_ids)
    assert speculation_record_from_pb(result.speculation) == RECORD
    assert result.timings.decode_ns == 3
    assert not any(response.HasField("result") for response in responses[:-1])


async def test_without_model_and_sampling_the_defaults_of_the_http_door_hold(fleet: ScriptedFleet) -> None:
    request = Request(prompt_token_ids=gateway_pb2.TokenIds(ids=[5, 6]), stop=["zzz"])
    async for _ in fleet.stub.Generate(request):
        pass
    [generate] = fleet.verifier.requests
    assert generate.prompt_token_ids == (5, 6)
    assert (generate.sampling.max_tokens, generate.sampling.temperature) == (16, 1.0)


async def test_where_a_call_is_silent_the_models_own_defaults_hold(tmp_path: Path) -> None:
    own = ModelDefaults(sampling={"temperature": 0.6, "top_k": 20, "min_p": 0.1}, max_new_tokens=5)
    async with scripted_fleet(tmp_path, own=own) as fleet:
        for asked in (None, sampling(), sampling(temperature=0.0, top_k=0, min_p=0.0)):
            [_ async for _ in fleet.stub.Generate(Request(prompt="x", sampling=asked))]
        silent, partly, neutral = [each.sampling for each in fleet.verifier.requests]
        assert (silent.max_tokens, silent.temperature, silent.top_k, silent.min_p) == (16, 0.6, 20, 0.1)
        assert (partly.max_tokens, partly.temperature, partly.top_k, partly.min_p) == (10, 0.6, 20, 0.1)
        assert (neutral.temperature, neutral.top_k, neutral.min_p) == (0.0, 0, 0.0)


async def test_the_last_tokens_of_a_prompt_are_kept_where_it_is_asked_for(fleet: ScriptedFleet) -> None:
    ids = gateway_pb2.TokenIds(ids=[5, 6, 7, 8])
    request = Request(prompt_token_ids=ids, sampling=sampling(), truncate_prompt_tokens=3)
    [_ async for _ in fleet.stub.Generate(request)]
    assert fleet.verifier.requests[0].prompt_token_ids == (6, 7, 8)
    request.truncate_prompt_tokens = 0
    assert "truncate_prompt_tokens: must be -1, or from 1 to" in str(await refusal(fleet, request))


@pytest.mark.parametrize(
    ("request_", "field", "limit"),
    [
        (Request(sampling=sampling()), "prompt", "is required"),
        (Request(prompt="", sampling=sampling()), "prompt", "must not be empty"),
        (Request(prompt_token_ids=gateway_pb2.TokenIds()), "prompt_token_ids", "at least one token"),
        (
            Request(prompt_token_ids=gateway_pb2.TokenIds(ids=[1, 99999])),
            "prompt_token_ids[1]",
            "outside the vocabulary",
        ),
        (Request(prompt_token_ids=gateway_pb2.TokenIds(ids=[7] * 256)), "prompt_token_ids", "256 tokens"),
        (Request(prompt="x", sampling=sampling(max_tokens=0)), "max_tokens", "at least 1"),
        (
            Request(prompt="x", sampling=sampling(max_tokens=CONTEXT_LEN)),
            "sampling.max_tokens",
            "the context holds 256",
        ),
        (Request(prompt="x", sampling=sampling(temperature=-1)), "temperature", "from 0 to 100"),
        (Request(prompt="x", sampling=sampling(temperature=float("nan"))), "temperature", "got nan"),
        (Request(prompt="x", sampling=sampling(top_p=2)), "top_p", "from 0 to 1"),
        (Request(prompt="x", stop=["x"] * 10_000), "stop", "at most 16"),
        (
            Request(prompt="x", speculation=common_pb2.SpeculationParams(max_draft_tokens=65)),
            "speculation.max_draft_tokens",
            "from 0 to 64",
        ),
    ],
)
async def test_bad_fields_are_named_and_the_next_request_works(
    fleet: ScriptedFleet, request_: Request, field: str, limit: str
) -> None:
    error = await refusal(fleet, request_)
    assert isinstance(error, InvalidRequestError)
    assert error.field == field
    assert limit in error.problem
    assert [r async for r in fleet.stub.Generate(Request(prompt="x"))][-1].HasField("result")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(prompt="x", stop=[""] * 100_000), "stop"),
        (Request(prompt="x", sampling={"bad_words": [{}] * 100_000}), "bad_words"),
    ],
)
async def test_a_list_of_too_many_entries_does_not_wait_to_be_read(
    fleet: ScriptedFleet, request_: Request, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object, **__: object) -> None:
        raise AssertionError("it waits for a thread")

    monkeypatch.setattr(Workers, "run", never)
    error = await refusal(fleet, request_)
    assert isinstance(error, InvalidRequestError)
    assert error.field == field


async def test_the_stop_string_is_part_of_the_text_where_it_is_asked_for(fleet: ScriptedFleet) -> None:
    text = fleet.letters(0, 7)
    request = Request(prompt="x", sampling=sampling(max_tokens=99), stop=[text[4:]], include_stop_str_in_output=True)
    assert "".join([response.text async for response in fleet.stub.Generate(request)]) == text


async def test_an_unknown_model_is_not_found(fresh_fleet: ScriptedFleet) -> None:
    assert isinstance(await refusal(fresh_fleet, Request(model="gpt-9", prompt="x")), ModelNotFoundError)
    assert (
        'paceline:request_errors_total{type="ModelNotFoundError"} 1.0' in (await fresh_fleet.http.get("/metrics")).text
    )


async def test_a_failing_verifier_ends_the_stream_with_a_status(fresh_fleet: ScriptedFleet) -> None:
    fresh_fleet.verifier.script = Script(fail_after=6, error=UnavailableError("engine is dead"))
    error = await refusal(fresh_fleet, Request(prompt="x"))
    assert isinstance(error, UnavailableError)
    assert "engine is dead" in str(error)


async def test_cancelling_the_call_cancels_the_verifiers_call(fleet: ScriptedFleet) -> None:
    fleet.verifier.script = Script(pause_after=3)
    call = fleet.stub.Generate(Request(prompt="x"))
    await fleet.verifier.paused.get()
    call.cancel()
    assert await fleet.verifier.abandoned.get() == fleet.verifier.requests[0].session_id


async def test_at_the_deadline_a_stopping_gateway_ends_calls_with_unavailable(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, grace_s=0.0) as fleet:
        fleet.verifier.script = Script(pause_after=3)
        running = asyncio.create_task(refusal(fleet, Request(prompt="x")))
        await fleet.verifier.paused.get()
        fleet.stop.set()
        error = await running
        assert isinstance(error, UnavailableError)
        assert "shutting down" in str(error)


async def test_models_are_listed(fleet: ScriptedFleet) -> None:
    response = await fleet.stub.ListModels(gateway_pb2.ListModelsRequest())
    [model] = response.models
    assert (model.name, model.context_len, model.vocab_size) == (
        MODEL,
        CONTEXT_LEN,
        identity(fleet.codec).vocab_size,
    )


async def test_without_a_seed_every_request_draws_its_own(fleet: ScriptedFleet) -> None:
    for _ in range(2):
        request = gateway_pb2.GatewayGenerateRequest(
            prompt="x", sampling=common_pb2.SamplingParams(max_tokens=2, temperature=1.0)
        )
        [response async for response in fleet.stub.Generate(request)]
    first, second = fleet.verifier.requests
    assert first.sampling.seed != second.sampling.seed


async def test_log_probabilities_come_with_their_tokens_and_those_of_the_prompt_before_all(
    fleet: ScriptedFleet,
) -> None:
    request = gateway_pb2.GatewayGenerateRequest(
        prompt="the fox", sampling=common_pb2.SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1)
    )
    _, *messages = [response async for response in fleet.stub.Generate(request)]
    assert [each.chosen.token_id for message in messages for each in message.logprobs] == [
        token_id for message in messages for token_id in message.token_ids
    ]
    assert {len(each.top) for message in messages for each in message.logprobs} == {2}
    first, *others = messages
    prompt = fleet.verifier.requests[0].prompt_token_ids
    assert tuple(each.chosen.token_id for each in first.prompt_logprobs) == prompt[1:]
    assert (first.prompt_offset, first.token_ids) == (1, [])
    assert not any(message.prompt_logprobs for message in others)


async def test_log_probabilities_of_a_long_prompt_fit_the_messages_that_clients_take(tmp_path: Path) -> None:
    """grpc.io #1254: at their defaults clients take 4 MiB, and one message held half a million log probabilities."""
    async with scripted_fleet(tmp_path, context_len=32_768) as fleet:
        fleet.verifier.script = Script(step_len=64)
        prompt = [5] * 23_800
        request = gateway_pb2.GatewayGenerateRequest(
            prompt_token_ids=gateway_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(max_tokens=1, prompt_logprobs=20),
        )
        _, *messages = [response async for response in fleet.stub.Generate(request)]
    judged = [message for message in messages if message.prompt_logprobs]
    assert [each.chosen.token_id for message in judged for each in message.prompt_logprobs] == prompt[1:]
    at = 1
    for message in judged:
        assert (message.prompt_offset, message.token_ids) == (at, [])
        assert message.ByteSize() < 2**20
        at += len(message.prompt_logprobs)
    assert messages[len(judged)].token_ids


async def test_a_list_of_health_is_unimplemented_and_no_error_of_ours(
    fleet: ScriptedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    """grpcio's servicer lacks it, and anybody may ask, without a key."""
    async with grpc.aio.insecure_channel(fleet.addresses.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]

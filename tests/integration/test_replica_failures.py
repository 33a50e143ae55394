"""What a gateway makes of verifiers that fail: of one that fails everybody, of requests that end engines, of gaps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from paceline.core.errors import (
    EndsEnginesError,
    EngineDiedError,
    InvalidRequestError,
    MovedError,
    OverloadedError,
    PermissionDeniedError,
    RemoteProtocolError,
)
from paceline.core.processors import NoTokenLeftError
from paceline.gateway.fleet.verifier_health import EJECTED, FAILURE
from paceline.gateway.sessions import failover
from paceline.gateway.sessions.failover import MOST_FAILURES
from paceline.rpc.v1 import gateway_pb2
from paceline.service import status
from paceline.service.status import error_from_rpc
from paceline.store.base import SessionState
from tests.support.fuzzing import until
from tests.support.scripted_fleet import MODEL, Script, ScriptedFleet, identity, scripted_fleet

# Failures in a row after which a verifier gets no sessions.
TO_EJECT = EJECTED // FAILURE
REQUEST: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 10, "seed": 0}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet(tmp_path, num_verifiers=4, failover_s=2.0) as started:
        yield started


async def post(fleet: ScriptedFleet, **fields: Any) -> httpx.Response:
    return await fleet.http.post("/v1/completions", json={**REQUEST, **fields})


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def all_fail_with(fleet: ScriptedFleet, error: Exception, *, after: int = 0) -> None:
    for verifier in fleet.verifiers:
        verifier.script = Script(fail_after=after, error=error)


def num_asked(fleet: ScriptedFleet) -> int:
    return sum(len(verifier.requests) for verifier in fleet.verifiers)


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("a bug"), RemoteProtocolError("strange message"), PermissionDeniedError("for others")],
    ids=["internal", "protocol", "permission"],
)
async def test_a_verifier_that_fails_everybody_at_once_costs_nobody_an_answer_and_soon_is_not_asked(
    fleet: ScriptedFleet, error: Exception
) -> None:
    fleet.verifier.script = Script(fail_after=0, error=error)
    expected = fleet.letters(0, 10)
    for _ in range(20):
        assert text_of(await post(fleet)) == expected
    assert len(fleet.verifier.requests) == TO_EJECT


async def test_a_session_moves_on_when_its_verifier_fails_in_mid_stream(fleet: ScriptedFleet) -> None:
    fleet.verifier.script = Script(fail_after=6, error=ZeroDivisionError("a bug"))
    assert text_of(await post(fleet)) == fleet.letters(0, 10)


@pytest.mark.parametrize("after", [0, 6])
async def test_a_session_moves_on_when_the_details_of_a_status_cannot_be_read(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Audit 3, a17: the client got a 500."""
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2**62))
    monkeypatch.setattr(status, "_detail_of", lambda error: retry)
    fleet.verifier.script = Script(fail_after=after, error=OverloadedError("full", retry_after_s=1.0))
    assert text_of(await post(fleet)) == fleet.letters(0, 10)
    assert num_asked(fleet) == 2


async def test_the_record_of_a_session_that_moved_is_that_of_both_verifiers(fleet: ScriptedFleet) -> None:
    for verifier in fleet.verifiers:
        verifier.script = Script(records=True)
    fleet.verifier.script = Script(records=True, fail_after=6, error=ZeroDivisionError("a bug"))
    record = (await post(fleet)).json()["metrics"]["speculative_decoding"]
    assert num_asked(fleet) == 2
    # Two steps at the first, then two more for the four tokens that were missing.
    assert (record["num_steps"], record["num_draft_tokens"], record["acceptance_histogram"]) == (4, 16, [0, 0, 4])


async def test_a_prompt_judged_in_part_is_judged_anew_by_the_next_and_told_once(fleet: ScriptedFleet) -> None:
    fleet.verifier.script = Script(fail_after=0, error=ZeroDivisionError("a bug"))
    [choice] = (await post(fleet, prompt="the lazy fox", echo=True, logprobs=1, return_token_ids=True)).json()[
        "choices"
    ]
    assert num_asked(fleet) == 2
    likely = choice["logprobs"]["token_logprobs"]
    assert likely == [None, *[-0.25] * (len(choice["prompt_token_ids"]) - 1), *[-0.5] * 10]


async def test_attempts_have_an_end_where_every_verifier_fails(fleet: ScriptedFleet) -> None:
    all_fail_with(fleet, ZeroDivisionError("a bug"))
    answer = await post(fleet)
    assert answer.status_code == 500
    assert num_asked(fleet) == MOST_FAILURES


async def test_attempts_are_not_all_spent_at_once(fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(self: failover.Failover, search: Any, most_s: float) -> None:
        pauses.append(search.pause_s)
        search.pause_s *= 2

    monkeypatch.setattr(failover.Failover, "_pause", pause)
    all_fail_with(fleet, ZeroDivisionError("a bug"))
    assert (await post(fleet)).status_code == 500
    # One round without a pause, then one before each attempt.
    assert len(pauses) == MOST_FAILURES - len(fleet.verifiers)
    assert pauses == sorted(pauses)


async def test_a_session_that_has_begun_may_come_again_when_every_verifier_fails_it(fleet: ScriptedFleet) -> None:
    all_fail_with(fleet, ZeroDivisionError("a bug"), after=6)
    answer = await post(fleet)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert num_asked(fleet) == MOST_FAILURES


@pytest.mark.parametrize("kind", [InvalidRequestError, NoTokenLeftError])
async def test_what_is_wrong_with_the_request_itself_is_asked_once(
    fleet: ScriptedFleet, kind: type[InvalidRequestError]
) -> None:
    all_fail_with(fleet, kind("max_tokens", "is strange"))
    assert (await post(fleet)).status_code == 400
    assert num_asked(fleet) == 1


async def test_a_session_that_its_verifier_has_placed_anew_is_no_failure_of_the_verifier(fleet: ScriptedFleet) -> None:
    fleet.verifier.script = Script(fail_after=0, error=MovedError("what sessions share is used up"))
    for _ in range(2 * TO_EJECT):
        assert text_of(await post(fleet)) == fleet.letters(0, 10)
    assert len(fleet.verifier.requests) == 2 * TO_EJECT


@pytest.mark.parametrize(("after", "num_engines"), [(0, 2), (6, 3)])
async def test_a_request_that_ends_engines_is_refused_and_stays_refused(
    fleet: ScriptedFleet, after: int, num_engines: int
) -> None:
    all_fail_with(fleet, EngineDiedError("the engine died"), after=after)
    if after:
        # Engines die at the same token again: the first of them brought what is before it.
        fleet.verifier.script = Script(fail_after=after, error=EngineDiedError("the engine died"))
    asked = gateway_pb2.GatewayGenerateRequest(model=MODEL, prompt="x")
    asked.sampling.max_tokens = 10
    session_id = ""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for response in fleet.stub.Generate(asked):
            session_id = response.session_id
    assert isinstance(error_from_rpc(caught.value), EndsEnginesError)
    assert num_asked(fleet) == num_engines
    for _ in range(1000):
        logged = await fleet.store.session(session_id)
        if logged is not None and logged.record.state is SessionState.REFUSED:
            break
        await fleet.http.get("/health")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in fleet.stub.Resume(gateway_pb2.ResumeRequest(session_id=session_id)):
            pass
    assert isinstance(error_from_rpc(caught.value), EndsEnginesError)
    assert num_asked(fleet) == num_engines


async def test_new_sessions_whose_engine_died_begin_again_one_after_another(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step with the session that ends engines, all of them would be refused with it."""
    monkeypatch.setattr(failover, "PART_S", 0.0)
    died, go_on = EngineDiedError("the engine died"), asyncio.Event()
    on_failover = failover.Failover._before_next

    async def together(self: failover.Failover, *told: Any) -> None:
        await go_on.wait()
        await on_failover(self, *told)

    monkeypatch.setattr(failover.Failover, "_before_next", together)
    all_fail_with(fleet, died)
    posts = [asyncio.create_task(post(fleet, prompt=prompt)) for prompt in "abc"]
    await until(lambda: num_asked(fleet) == len(posts))
    for verifier in fleet.verifiers:
        verifier.script = Script(pause_after=0)
    go_on.set()
    for num_begun in (4, 5, 6):
        await until(lambda wanted=num_begun: num_asked(fleet) >= wanted)
        for _ in range(20):
            await fleet.http.get("/health")
        assert num_asked(fleet) == num_begun
        for verifier in fleet.verifiers:
            for request in verifier.requests[-1:]:
                verifier.resume(request.session_id)
    assert [(await each).status_code for each in posts] == [200] * 3


async def test_over_http_it_is_refused_with_a_status_that_no_client_repeats_by_itself(fleet: ScriptedFleet) -> None:
    all_fail_with(fleet, EngineDiedError("the engine died"))
    answer = await post(fleet)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "request_ends_engines")
    assert "2 engines in a row died" in answer.json()["error"]["message"]


@pytest.mark.parametrize("gap", [1, -1])
async def test_tokens_out_of_place_are_never_passed_on(fleet: ScriptedFleet, gap: int) -> None:
    fleet.verifier.script = Script(gap=gap)
    for _ in range(6):
        assert text_of(await post(fleet)) == fleet.letters(0, 10)
    assert len(fleet.verifier.requests) == TO_EJECT


async def test_tokens_of_no_vocabulary_are_never_passed_on(fleet: ScriptedFleet) -> None:
    fleet.verifier.script = Script(tokens=(fleet.codec.vocab_size, *fleet.letter_ids(0, 9)))
    for _ in range(6):
        assert text_of(await post(fleet)) == fleet.letters(0, 10)
    assert len(fleet.verifier.requests) == TO_EJECT


async def announce(fleet: ScriptedFleet, index: int, **changes: Any) -> None:
    """Lets a verifier say something else of itself."""
    [known] = [each for each in await fleet.store.replicas() if each.replica_id == f"verifier-{index}"]
    await fleet.announce(replace(known, identity=identity(fleet.codec, **changes)))
    for _ in range(1000):
        if (await fleet.http.get("/v1/models")).json()["data"][0]["max_model_len"] is not None:
            break


async def settled(fleet: ScriptedFleet, context_len: int) -> None:
    """Returns when the gateway has read what verifiers announced."""
    for _ in range(10_000):
        if (await fleet.http.get("/v1/models")).json()["data"][0]["max_model_len"] == context_len:
            return
    raise AssertionError("the gateway did not read the registry")


async def test_a_session_goes_to_a_verifier_that_can_hold_it_whole(fleet: ScriptedFleet) -> None:
    await announce(fleet, 2, context_len=512)
    await settled(fleet, 512)
    for _ in range(3):
        assert text_of(await post(fleet, max_tokens=300)) == fleet.letters(0, 300)
    assert len(fleet.verifiers[2].requests) == 3
    assert (await post(fleet, max_tokens=600)).status_code == 400


async def test_the_rule_is_resolved_before_a_session_is_placed_and_does_not_change_with_the_verifier(
    fleet: ScriptedFleet,
) -> None:
    for index in range(3):
        await announce(fleet, index, acceptance_rules=("coupled",))
    await announce(fleet, 3, acceptance_rules=("rejection", "coupled"), context_len=255)
    fleet.verifier.script = Script(fail_after=6, error=ZeroDivisionError("a bug"))
    await settled(fleet, 256)
    for _ in range(8):
        await post(fleet)
    asked = [each for verifier in fleet.verifiers for each in verifier.requests]
    assert {each.speculation.acceptance for each in asked} == {"coupled"}
    assert not fleet.verifiers[3].requests
    await post(fleet, speculation={"acceptance": "rejection"})
    assert len(fleet.verifiers[3].requests) == 1


async def test_tokens_are_kept_within_one_arithmetic_and_a_text_that_was_mixed_says_so(fleet: ScriptedFleet) -> None:
    for index, arithmetic in enumerate(("cpu", "cuda", "cuda", "cuda")):
        await announce(fleet, index, arithmetic=arithmetic, weights_hash="w", context_len=300)
    await settled(fleet, 300)
    for verifier in fleet.verifiers:
        verifier.script = Script(fail_after=6, error=ZeroDivisionError("a bug"))
    fleet.verifiers[0].script = Script(fail_after=6, error=ZeroDivisionError("a bug"))
    answers = [await post(fleet) for _ in range(2)]
    assert all(answer.status_code >= 500 for answer in answers)
    begun = {
        each.session_id: index
        for index, v in enumerate(fleet.verifiers)
        for each in v.requests
        if not each.committed_token_ids
    }
    for index, verifier in enumerate(fleet.verifiers):
        for each in verifier.requests:
            assert (index == 0) == (begun[each.session_id] == 0)


async def test_prompts_of_different_keys_or_salts_share_no_cached_prefix(fleet: ScriptedFleet) -> None:
    for salt in ("", "a", "a", "b"):
        await post(fleet, **({"cache_salt": salt} if salt else {}))
    salts = [each.cache_salt for verifier in fleet.verifiers for each in verifier.requests]
    assert sorted(map(salts.count, set(salts))) == [1, 1, 2]
    assert "" in salts
    assert not {"a", "b"} & set(salts)

"""The gateway's doors over real sockets: TLS, API keys, rate limits, shares of keys, and what is never logged."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import ssl
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from redis.asyncio import Redis

from paceline.client.generate import GenerateConfig, stream
from paceline.cluster.valkey import find_server
from paceline.core.errors import ConfigError, OverloadedError, PacelineError, UnauthenticatedError, UnavailableError
from paceline.gateway.access import keys
from paceline.gateway.config import GatewayConfig
from paceline.gateway.http.response import LAST_EVENT_ID
from paceline.gateway.service import serve
from paceline.gateway.sessions.output import Ending, TakePiece
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.sessions import Sessions
from paceline.gateway.sessions.take_over import FREE_RESUMPTIONS
from paceline.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from paceline.service.dev_ca import make_certificates
from paceline.service.status import error_from_rpc
from paceline.store.base import SessionState
from tests.contract.test_store import HOST, server_process
from tests.support.memory_store import MemoryStore
from tests.support.scripted_fleet import MODEL, Script, ScriptedFleet, scripted_fleet

ALICE, BOB, SLOW, SMALL = "pl-alice-secret", "pl-bob-secret", "pl-slow-secret", "pl-small-secret"
LIMITS = {ALICE: "", BOB: "", SLOW: ":2", SMALL: "::1"}
Headers = dict[str, str]


def line(key: str) -> str:
    return f"{key.split('-')[1]}:{hashlib.sha256(key.encode()).hexdigest()}{LIMITS[key]}\n"


def bearer(key: str) -> Headers:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("".join(map(line, LIMITS)))
    return path


@pytest.fixture(scope="module")
def counts_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where requests are counted."""
    with server_process(find_server(), tmp_path_factory.mktemp("valkey")) as (port, _):
        yield f"redis://{HOST}:{port}"


@pytest.fixture
async def fleet(tmp_path: Path, keys_file: Path, counts_url: str) -> AsyncIterator[ScriptedFleet]:
    async with Redis.from_url(counts_url) as counts:
        await counts.flushall()
    async with scripted_fleet(tmp_path, api_keys_file=keys_file, redis_url=counts_url, max_sessions=8) as started:
        yield started


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "ca"
    make_certificates(folder)
    return folder


async def complete(fleet: ScriptedFleet, key: str, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": "the fox", "max_tokens": 6, **fields}
    return await fleet.http.post("/v1/completions", json=body, headers=bearer(key))


async def grpc_error(fleet: ScriptedFleet, *metadata: tuple[str, str]) -> PacelineError | None:
    """What a completion over gRPC is refused with; None if it is served."""
    request = gateway_pb2.GatewayGenerateRequest(model=MODEL, prompt="the fox")
    try:
        async for _ in fleet.stub.Generate(request, metadata=metadata, timeout=30):
            pass
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    return None


async def test_a_known_key_is_served_at_both_doors_and_its_name_goes_along(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    run = Sessions.run

    def noted(sessions: Sessions, request: SessionRequest, take: TakePiece) -> Coroutine[Any, Any, Ending]:
        names.append(request.api_key)
        return run(sessions, request, take)

    monkeypatch.setattr(Sessions, "run", noted)
    assert (await complete(fleet, ALICE)).status_code == 200
    assert await grpc_error(fleet, ("authorization", f"Bearer {BOB}")) is None
    assert (await fleet.http.get("/v1/models", headers={"authorization": f"bearer  {ALICE}"})).status_code == 200
    listed = await fleet.stub.ListModels(
        gateway_pb2.ListModelsRequest(), metadata=(("authorization", f"Bearer {BOB}"),), timeout=30
    )
    assert len(listed.models) == 1
    assert names == ["alice", "bob"]


async def test_what_one_key_has_kept_is_unknown_to_all_others(fleet: ScriptedFleet) -> None:
    async def respond(key: str, given: object, **fields: object) -> httpx.Response:
        body = {"model": MODEL, "input": given, "max_output_tokens": 2, **fields}
        return await fleet.http.post("/v1/responses", json=body, headers=bearer(key))

    kept = (await respond(ALICE, "hello")).json()
    go = {"role": "user", "content": "go"}
    referring = [{"type": "item_reference", "id": kept["output"][0]["id"]}, go]
    ignored = [(await respond(key, referring)).headers.get("x-paceline-ignored-fields") for key in (ALICE, BOB)]
    assert ignored == [None, "input[0].item_reference"]
    goes_on = [(await respond(key, [go], previous_response_id=kept["id"])).status_code for key in (ALICE, BOB)]
    assert goes_on == [200, 404]
    path = f"/v1/responses/{kept['id']}"
    read = [(await fleet.http.get(path, headers=bearer(key))).status_code for key in (ALICE, BOB)]
    assert read == [200, 404]
    deleted = [(await fleet.http.delete(path, headers=bearer(key))).status_code for key in (BOB, ALICE)]
    assert deleted == [404, 200]


async def test_without_a_known_key_every_path_is_closed(fleet: ScriptedFleet) -> None:
    wrong: list[Headers] = [
        {},
        bearer("pl-nobody"),
        {"Authorization": "Bearer"},
        {"Authorization": ALICE},
        {"Authorization": f"Basic {ALICE}"},
        bearer("alice"),
    ]
    gets = ("/v1/models", "/v1/models/tiny", "/load", "/version", "/metrics", "/health/", "/nothing")
    posts = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    for method, path in [*(("GET", path) for path in gets), *(("POST", path) for path in posts)]:
        for headers in wrong:
            response = await fleet.http.request(method, path, headers={**headers, "x-request-id": "mine"})
            assert response.status_code == 401, (path, headers)
            assert response.headers["x-request-id"] == "mine"
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert not fleet.verifier.requests


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_caller_of_anthropic_s_api_is_refused_in_its_words(fleet: ScriptedFleet, path: str) -> None:
    response = await fleet.http.post(path, headers={"x-api-key": "pl-nobody", "x-request-id": "mine"})
    assert (response.status_code, response.headers["request-id"]) == (401, "mine")
    told = response.json()
    assert (told["type"], told["error"]["type"], told["request_id"]) == ("error", "authentication_error", "mine")


async def test_without_a_known_key_every_grpc_method_is_closed(fleet: ScriptedFleet) -> None:
    for metadata in ((), (("authorization", "Bearer pl-nobody"),), (("authorization", ALICE),), (("api-key", ALICE),)):
        assert isinstance(await grpc_error(fleet, *metadata), UnauthenticatedError)
    doubled = (("authorization", "Bearer pl-nobody"), ("authorization", f"Bearer {ALICE}"))
    assert isinstance(await grpc_error(fleet, *doubled), UnauthenticatedError)
    with pytest.raises(grpc.aio.AioRpcError) as listing:
        await fleet.stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=30)
    assert listing.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert await status_of_reflection(fleet) is grpc.StatusCode.UNAUTHENTICATED
    assert not fleet.verifier.requests


async def status_of_reflection(fleet: ScriptedFleet) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(fleet.addresses.grpc) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        # Nothing is sent: a refusal that comes while the client sends would be an error of its own.
        return await call.code()


async def test_whoever_may_not_come_in_is_counted_at_both_doors(fleet: ScriptedFleet) -> None:
    assert (await fleet.http.get("/v1/models")).status_code == 401
    assert isinstance(await grpc_error(fleet), UnauthenticatedError)
    page = (await fleet.http.get("/metrics", headers=bearer(ALICE))).text
    assert 'paceline:request_errors_total{type="UnauthenticatedError"} 2.0' in page


async def test_health_needs_no_key_at_either_door(fleet: ScriptedFleet) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert (await fleet.http.request(method, path)).status_code == 200
    async with grpc.aio.insecure_channel(fleet.addresses.grpc) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_key_over_its_rate_is_told_when_to_come_again_at_either_door(fleet: ScriptedFleet) -> None:
    assert (await complete(fleet, SLOW)).status_code == 200
    assert await grpc_error(fleet, ("authorization", f"Bearer {SLOW}")) is None
    response = await complete(fleet, SLOW)
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert "'slow' has had its 2 requests per minute" in response.json()["error"]["message"]
    error = await grpc_error(fleet, ("authorization", f"Bearer {SLOW}"))
    assert isinstance(error, OverloadedError)
    assert 0 < error.retry_after_s <= 60
    assert (await complete(fleet, ALICE)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/nowhere"]
)
@pytest.mark.parametrize("place", ["x", f"cmpl-1-0:3:{'a' * 32}"])
async def test_to_name_a_place_in_a_stream_costs_as_much_as_any_request(
    fleet: ScriptedFleet, path: str, place: str
) -> None:
    """`Last-Event-ID` switched the rate limit off, whatever came of it."""
    headers = {**bearer(SLOW), LAST_EVENT_ID: place}
    body = {"model": MODEL, "prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": True}
    answers = [await fleet.http.post(path, json=body, headers=headers) for _ in range(3)]
    assert [answer.status_code == 429 for answer in answers] == [False, False, True]


async def test_to_resume_what_is_not_there_costs_as_much_as_any_call(fleet: ScriptedFleet) -> None:
    def resumed() -> AsyncIterator[object]:
        request = gateway_pb2.ResumeRequest(session_id="grpc-1")
        return aiter(fleet.stub.Resume(request, metadata=(("authorization", f"Bearer {SLOW}"),), timeout=30))

    codes = []
    for _ in range(3):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(resumed())
        codes.append(refused.value.code())
    assert codes == [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED]


async def test_a_stream_that_goes_on_was_counted_when_it_began_unless_it_does_so_again_and_again(
    fleet: ScriptedFleet,
) -> None:
    """One stream that was resumed over and over was any number of requests, of which one counted."""
    options = {"include_event_ids": True}
    begun = await complete(fleet, SLOW, stream=True, stream_options=options, seed=0)
    place = begun.text.partition("id: ")[2].partition("\n")[0]
    body = {"model": MODEL, "prompt": "the fox", "max_tokens": 6, "stream": True, "stream_options": options}
    resume = gateway_pb2.ResumeRequest(session_id=place.split(":")[0])
    await recorded(fleet, resume.session_id)

    async def resumed() -> int:
        headers = {**bearer(SLOW), LAST_EVENT_ID: place}
        return (await fleet.http.post("/v1/completions", json=body, headers=headers)).status_code

    for _ in range(FREE_RESUMPTIONS // 2):
        assert await resumed() == 200
        assert [r async for r in fleet.stub.Resume(resume, metadata=(("authorization", f"Bearer {SLOW}"),))]
    assert [await resumed() for _ in range(2)] == [200, 429]


async def recorded(fleet: ScriptedFleet, session_id: str) -> None:
    """Waits until the record of a session says that it has ended."""
    async with asyncio.timeout(30):
        while (  # noqa: ASYNC110 - records are written in the background
            logged := await fleet.store.session(session_id)
        ) is None or logged.record.state is SessionState.RUNNING:
            await asyncio.sleep(0.01)


async def test_a_key_gets_no_more_sessions_than_its_line_says(fleet: ScriptedFleet) -> None:
    response = await complete(fleet, SMALL, n=2)
    assert response.status_code == 429
    assert "'small' may run 1 sessions at once and runs 0" in response.json()["error"]["message"]
    assert (await complete(fleet, SMALL)).status_code == 200


async def test_a_session_is_resumed_by_its_own_key_and_to_others_does_not_exist(fleet: ScriptedFleet) -> None:
    request = gateway_pb2.GatewayGenerateRequest(model=MODEL, prompt="the fox")
    responses = [r async for r in fleet.stub.Generate(request, metadata=(("authorization", f"Bearer {ALICE}"),))]
    resume = gateway_pb2.ResumeRequest(session_id=responses[0].session_id)
    await recorded(fleet, resume.session_id)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in fleet.stub.Resume(resume, metadata=(("authorization", f"Bearer {BOB}"),)):
            pass
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    again = [r async for r in fleet.stub.Resume(resume, metadata=(("authorization", f"Bearer {ALICE}"),))]
    assert "".join(r.text for r in again) == "".join(r.text for r in responses)


async def test_a_greedy_key_leaves_a_place_to_others(fleet: ScriptedFleet) -> None:
    fleet.verifier.script = Script(pause_after=3)
    greedy = asyncio.create_task(complete(fleet, ALICE, n=7))
    paused = [await fleet.verifier.paused.get() for _ in range(7)]
    refused = await complete(fleet, ALICE)
    assert refused.status_code == 429
    assert "reserved for other keys" in refused.json()["error"]["message"]
    other = asyncio.create_task(complete(fleet, BOB))
    paused.append(await fleet.verifier.paused.get())
    for session_id in paused:
        fleet.verifier.resume(session_id)
    assert (await greedy).status_code == (await other).status_code == 200


async def test_keys_change_without_a_restart(tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys.KeyRing.keep_fresh, "__defaults__", (0.01,))
    async with scripted_fleet(tmp_path, api_keys_file=keys_file) as fleet:
        assert (await complete(fleet, ALICE)).status_code == 200
        keys_file.write_text(line(BOB))
        os.utime(keys_file, (1, 1))
        async with asyncio.timeout(30):
            while (await complete(fleet, ALICE)).status_code == 200:
                pass
        assert (await complete(fleet, BOB)).status_code == 200


async def test_health_and_a_metric_say_what_is_wrong_with_a_file_of_keys_whose_other_lines_are_in_force(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stolen key stayed in force, and health `ok`, once any other line was wrong."""
    monkeypatch.setattr(keys.KeyRing.keep_fresh, "__defaults__", (0.01,))
    async with scripted_fleet(tmp_path, api_keys_file=keys_file) as fleet:
        assert (await fleet.http.get("/health")).json()["keys"] == "ok"
        keys_file.write_text(f"alice\n{line(BOB)}")
        async with asyncio.timeout(30):
            while (await complete(fleet, ALICE)).status_code == 200:
                pass
        report = await fleet.http.get("/health")
        assert (report.status_code, report.json()["status"]) == (200, "degraded")
        assert "--api-keys-file: line 1: must be" in report.json()["keys"]
        assert "paceline:api_keys_bad_lines 1.0" in (await fleet.http.get("/metrics", headers=bearer(BOB))).text


async def start(**settings: Path) -> None:
    """Starts a gateway that nobody will ask anything."""
    config = GatewayConfig(model=(), port=0, grpc_port=0, **settings)
    stop = asyncio.Event()
    await serve(config, MemoryStore(), {}, stop, lambda _: stop.set())


async def test_keys_and_prompts_are_never_logged(fleet: ScriptedFleet, caplog: pytest.LogCaptureFixture) -> None:
    prompt = "a confidence about foxes"
    with caplog.at_level(logging.DEBUG):
        assert (await complete(fleet, ALICE, prompt=prompt)).status_code == 200
        assert (await complete(fleet, "pl-nobody", prompt=prompt)).status_code == 401
        assert (await complete(fleet, ALICE, prompt=prompt, top_p=7)).status_code == 400
        await complete(fleet, SLOW, prompt=prompt)
        assert await grpc_error(fleet, ("authorization", f"Bearer {SLOW}")) is None
        assert (await complete(fleet, SLOW, prompt=prompt)).status_code == 429
        for error in (UnavailableError("no pages"), RuntimeError("a bug")):
            fleet.verifier.script = Script(fail_after=0, error=error)
            assert (await complete(fleet, ALICE, prompt=prompt)).status_code >= 500
    logged = [f"{record.getMessage()} {vars(record)} {record.exc_text}" for record in caplog.records]
    assert any("request failed" in text for text in logged), "nothing was captured"
    for text in (*logged, caplog.text):
        assert "secret" not in text
        assert "pl-nobody" not in text
        assert "confidence" not in text


@asynccontextmanager
async def tls_fleet(tmp_path: Path, certificates: Path, **settings: object) -> AsyncIterator[ScriptedFleet]:
    own = certificates / "gateway"
    async with scripted_fleet(tmp_path, tls_cert=own / "tls.pem", tls_key=own / "tls.key", **settings) as fleet:
        yield fleet


async def test_the_doors_speak_tls_to_who_trusts_the_authority(
    tmp_path: Path, certificates: Path, keys_file: Path
) -> None:
    trusting = ssl.create_default_context(cafile=certificates / "ca.pem")
    async with tls_fleet(tmp_path, certificates, api_keys_file=keys_file) as fleet:
        url = f"https://{fleet.addresses.http}"
        async with httpx.AsyncClient(base_url=url, verify=trusting, trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200
            body = {"model": MODEL, "prompt": "x", "max_tokens": 6, "seed": 2}
            answer = await client.post("/v1/completions", json=body, headers=bearer(ALICE))
            assert answer.json()["choices"][0]["text"] == fleet.letters(2, 6)
        credentials = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(fleet.addresses.grpc, credentials) as channel:
            stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
            listed = await stub.ListModels(
                gateway_pb2.ListModelsRequest(), metadata=(("authorization", f"Bearer {ALICE}"),), timeout=30
            )
            assert len(listed.models) == 1


async def test_plain_text_and_strange_authorities_get_no_answer_from_tls_doors(
    tmp_path: Path, certificates: Path
) -> None:
    async with tls_fleet(tmp_path, certificates) as fleet:
        with pytest.raises(httpx.HTTPError):
            await fleet.http.get("/health")
        usual = ssl.create_default_context()
        async with httpx.AsyncClient(verify=usual, trust_env=False) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(f"https://{fleet.addresses.http}/health")
        assert isinstance(await grpc_error(fleet), UnavailableError)


async def test_the_client_command_shows_its_key_and_checks_the_certificate(
    tmp_path: Path, certificates: Path, keys_file: Path
) -> None:
    async with tls_fleet(tmp_path, certificates, api_keys_file=keys_file) as fleet:
        url = f"https://{fleet.addresses.http}"
        asking = GenerateConfig(prompt="x", url=url, api_key=ALICE, ca_file=certificates / "ca.pem", max_tokens=4)
        chunks = await asyncio.to_thread(lambda: list(stream(asking)))
        assert chunks[-1]["usage"]["completion_tokens"] == 4
        for refused, error in (
            (GenerateConfig(prompt="x", url=url, ca_file=certificates / "ca.pem"), "an API key is required"),
            (GenerateConfig(prompt="x", url=url, api_key=ALICE), "cannot be reached"),
            (GenerateConfig(prompt="x", url=url, ca_file=tmp_path / "none"), "--ca-file"),
        ):
            with pytest.raises(PacelineError, match=error):
                await asyncio.to_thread(lambda asked: list(stream(asked)), refused)


async def test_half_a_pair_and_two_halves_of_different_pairs_are_refused(certificates: Path) -> None:
    certificate = certificates / "gateway" / "tls.pem"
    with pytest.raises(ConfigError, match="go together"):
        await start(tls_cert=certificate)
    with pytest.raises(ConfigError, match=r"--tls-key: .* is not the key of the certificate"):
        await start(tls_cert=certificate, tls_key=certificates / "drafter" / "tls.key")
    await start(tls_cert=certificate, tls_key=certificates / "gateway" / "tls.key")

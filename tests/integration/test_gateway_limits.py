"""What strangers can and cannot take from a gateway: memory, connections, health, and the event loop; real sockets."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.core.errors import (
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    UnauthenticatedError,
    UnavailableError,
)
from paceline.gateway import doors
from paceline.gateway.api.grpc import door as grpc_door
from paceline.gateway.api.grpc.door import MAX_HEALTH_READS, MAX_MESSAGE_BYTES, GrpcDoor
from paceline.gateway.api.grpc.servicer import SERVICE_NAME
from paceline.gateway.config import GatewayConfig
from paceline.gateway.text.codec import TextCodec
from paceline.rpc.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from paceline.service.fair_shares import Shares
from paceline.service.process import LIVENESS, start_grpc_server
from paceline.service.status import error_from_rpc
from paceline.store.base import Replica
from tests.support.fuzzing import until
from tests.support.scripted_fleet import MODEL, Script, ScriptedFleet, identity, scripted_fleet

ALICE, BOB, SLOW = "pl-alice", "pl-bob", "pl-slow"
GENERATE = "/paceline.rpc.v1.Gateway/Generate"
CHECK = "/grpc.health.v1.Health/Check"
Request = gateway_pb2.GatewayGenerateRequest
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    limits = {ALICE: "", BOB: "", SLOW: ":1"}
    path.write_text("".join(f"{k[3:]}:{hashlib.sha256(k.encode()).hexdigest()}{v}\n" for k, v in limits.items()))
    return path


@asynccontextmanager
async def guarded(tmp_path: Path, keys_file: Path, **settings: Any) -> AsyncIterator[ScriptedFleet]:
    settings = {"max_sessions": 8, **settings}
    async with scripted_fleet(tmp_path, api_keys_file=keys_file, redis_url="memory://", **settings) as started:
        yield started


@pytest.fixture
async def fleet(tmp_path: Path, keys_file: Path) -> AsyncIterator[ScriptedFleet]:
    async with guarded(tmp_path, keys_file) as started:
        yield started


@asynccontextmanager
async def raw_channel(fleet: ScriptedFleet) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(fleet.addresses.grpc, options=options) as channel:
        yield channel


async def status_of(call: Any) -> PacelineError | None:
    """How a call ends; None: well."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    return None


@contextmanager
def never_sent() -> Iterator[Callable[[], AsyncIterator[bytes]]]:
    """Makes the messages of callers who send none."""
    ended = asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        await ended.wait()
        for nothing in ():
            yield nothing

    try:
        yield messages
    finally:
        ended.set()


async def check(channel: grpc.aio.Channel, name: str = "") -> Any:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=30)
    return answer.status


# Finding 1: the key before the message.


async def test_a_call_without_a_key_is_refused_by_its_head_and_its_message_is_never_read(fleet: ScriptedFleet) -> None:
    too_large = bytes(MAX_MESSAGE_BYTES + 1)
    async with raw_channel(fleet) as channel:
        call = channel.unary_stream(GENERATE)
        assert isinstance(await status_of(call(too_large, timeout=30)), UnauthenticatedError)
        # Had it been read, it would have been refused for its size.
        error = await status_of(call(too_large, timeout=30, metadata=bearer(ALICE)))
        assert isinstance(error, InvalidRequestError)
        assert "larger than max" in str(error)


async def test_a_call_without_a_key_is_refused_before_it_has_sent_a_message(fleet: ScriptedFleet) -> None:
    async with raw_channel(fleet) as channel:
        with never_sent() as messages:
            error = await status_of(channel.stream_stream(GENERATE)(messages(), timeout=30))
        assert isinstance(error, UnauthenticatedError)


async def test_a_message_that_does_not_come_is_not_waited_for_for_ever(tmp_path: Path, keys_file: Path) -> None:
    async with guarded(tmp_path, keys_file, body_timeout_s=0.2) as fleet, raw_channel(fleet) as channel:
        with never_sent() as messages:
            error = await status_of(channel.stream_stream(GENERATE)(messages(), timeout=30, metadata=bearer(ALICE)))
        assert isinstance(error, InvalidRequestError)
        assert "request: did not arrive within 0.2 s" in str(error)


async def test_a_call_that_ends_without_a_message_says_so(fleet: ScriptedFleet) -> None:
    async with raw_channel(fleet) as channel:
        error = await status_of(channel.stream_stream(GENERATE)(iter(()), timeout=30, metadata=bearer(ALICE)))
        assert isinstance(error, InvalidRequestError)


async def test_one_key_cannot_take_all_calls_and_health_is_no_call_of_anybody(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "SPARE_CONNECTIONS", 0)
    async with guarded(tmp_path, keys_file, max_sessions=4) as fleet:
        fleet.verifier.script = Script(pause_after=3)
        request = Request(model=MODEL, prompt="x")
        streams = [fleet.stub.Generate(request, metadata=bearer(ALICE)) for _ in range(3)]
        for stream in streams:
            await stream.read()
        async with raw_channel(fleet) as channel:
            with never_sent() as messages:
                waiting: list[grpc.aio.StreamStreamCall] = []
                refused = None
                while refused is None:
                    # One of them may have met the last question at the door, and was refused in its place.
                    waiting = [call for call in waiting if not call.done()]
                    while len(waiting) < 4:
                        waiting.append(channel.stream_stream(GENERATE)(messages(), metadata=bearer(ALICE)))
                    refused = await list_error(fleet, ALICE)
                assert isinstance(refused, OverloadedError)
                assert "of 8 calls are taken" in str(refused)
                assert refused.retry_after_s > 0
                assert await list_error(fleet, BOB) is None
                assert await check(channel) == SERVING
                for call in waiting:
                    call.cancel()
        for stream in streams:
            stream.cancel()


async def list_error(fleet: ScriptedFleet, key: str) -> PacelineError | None:
    try:
        await fleet.stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=bearer(key), timeout=30)
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    return None


async def test_health_answers_though_callers_without_a_key_keep_its_messages_back(fleet: ScriptedFleet) -> None:
    async with raw_channel(fleet) as channel, raw_channel(fleet) as probe:
        with never_sent() as messages:
            calls = [channel.stream_stream(CHECK)(messages()) for _ in range(3 * MAX_HEALTH_READS)]
            ends = [asyncio.create_task(status_of(call)) for call in calls]
            # The eldest of them make room for the youngest.
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert await check(probe) == SERVING
            for call in calls:
                call.cancel()
            await asyncio.gather(*ends, return_exceptions=True)


async def test_who_watches_health_is_told_of_each_change_and_of_services_that_are_not_there(
    fleet: ScriptedFleet,
) -> None:
    """Clients with `healthCheckConfig` in their service config watch, and were told INTERNAL."""

    def watch(name: str) -> Any:
        return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name), timeout=30)

    async with raw_channel(fleet) as channel:
        watches = [watch(name) for name in ("", SERVICE_NAME, LIVENESS)]
        assert [(await each.read()).status for each in watches] == [SERVING] * 3
        unknown = await watch("nobody").read()
        assert unknown.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        await fleet.store.withdraw("verifier-0")
        assert [(await each.read()).status for each in watches[:2]] == [NOT_SERVING] * 2
        for each in watches:
            each.cancel()


async def test_a_client_that_checks_health_before_it_calls_is_served(fleet: ScriptedFleet) -> None:
    config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": SERVICE_NAME}}
    options = [("grpc.service_config", json.dumps(config)), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(fleet.addresses.grpc, options=options) as channel:
        stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
        listed = await stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=bearer(ALICE), timeout=30)
    assert len(listed.models) == 1


async def test_a_server_s_own_methods_are_listed_to_who_has_a_key(fleet: ScriptedFleet) -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    async with raw_channel(fleet) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        [told] = [each async for each in stub.ServerReflectionInfo(iter((asked,)), metadata=bearer(ALICE), timeout=30)]
    assert SERVICE_NAME in {each.name for each in told.list_services_response.service}


async def test_a_call_that_ends_while_its_message_comes_is_no_error_of_anybody(
    fleet: ScriptedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw_channel(fleet) as channel, counting_no_error(fleet, caplog):
        with never_sent() as messages:
            call = channel.stream_stream(GENERATE)(messages(), timeout=30, metadata=bearer(ALICE))
            await call.wait_for_connection()
            call.cancel()
        assert await list_error(fleet, ALICE) is None


# Finding 17: a client that reads nothing, at this door too; health that tells whether the gateway can serve.


class EndlessServicer(gateway_pb2_grpc.GatewayServicer):
    """Streams more than any buffer holds."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def Generate(self, request: Request, context: Any) -> AsyncIterator[gateway_pb2.GatewayGenerateResponse]:
        try:
            while True:
                yield gateway_pb2.GatewayGenerateResponse(text="x" * 65536)
        finally:
            self.closed.set()


async def test_a_client_that_reads_nothing_loses_its_stream_over_grpc_and_its_place_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_door, "SEND_TIMEOUT_S", 0.2)
    calls, reading = Shares(8, "calls"), Shares(8 * MAX_MESSAGE_BYTES, "bytes")
    door = GrpcDoor(doors.admit_anyone, calls=calls, reading=reading, timeout_s=30)
    servicer = EndlessServicer()
    async with await start_grpc_server(
        host="127.0.0.1",
        port=0,
        add_servicers=lambda it: gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, it),
        service_names=[SERVICE_NAME],
        interceptors=(door,),
    ) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
            call = stub.Generate(Request(prompt="x"))
            await until(lambda: calls.num_held == 1 and reading.num_held == 0)
            await asyncio.wait_for(servicer.closed.wait(), 30)
            await until(lambda: calls.num_held == 0)
            # What was on its way comes yet, then the reason.
            error = await status_of(call)
            assert isinstance(error, UnavailableError)
            assert "the client has read nothing for 0.2 s" in str(error)


async def test_health_over_grpc_and_http_follows_the_fleet_and_the_process_lives_on(fleet: ScriptedFleet) -> None:
    async with raw_channel(fleet) as channel:

        async def told() -> tuple[Any, ...]:
            ready = (await fleet.http.get("/readyz")).status_code
            alive = (await fleet.http.get("/livez")).status_code
            return (
                ready,
                alive,
                await check(channel),
                await check(channel, SERVICE_NAME),
                await check(channel, LIVENESS),
            )

        async def becomes(*wanted: Any) -> None:
            async with asyncio.timeout(30):
                while await told() != wanted:  # noqa: ASYNC110 - health tells nobody
                    await asyncio.sleep(0.01)

        await becomes(200, 200, SERVING, SERVING, SERVING)
        strange = Replica(
            replica_id="verifier-0",
            role="verifier",
            address=fleet.servers[0].address,
            identity=identity(fleet.codec, vocab_hash="another"),
            max_sessions=8,
        )
        await fleet.announce(strange)
        await becomes(503, 200, NOT_SERVING, NOT_SERVING, SERVING)
        report = (await fleet.http.get("/health")).json()
        assert report["status"] == "no verifier"
        assert "tokenizer is not the verifier's" in report["models"][MODEL]
        await fleet.announce(
            Replica(
                replica_id="verifier-0",
                role="verifier",
                address=fleet.servers[0].address,
                identity=identity(fleet.codec),
                max_sessions=8,
            )
        )
        await becomes(200, 200, SERVING, SERVING, SERVING)


# Findings 11 and 14: connections and bodies over HTTP.


async def connected(fleet: ScriptedFleet) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = fleet.addresses.http.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


def head(key: str, length: int) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "host: x", f"authorization: Bearer {key}", f"content-length: {length}")
    return "\r\n".join((*lines, "", "")).encode()


@asynccontextmanager
async def counting_no_error(fleet: ScriptedFleet, caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Nothing that happens meanwhile is counted as an error, or logged as one."""

    async def counted() -> list[str]:
        page = (await fleet.http.get("/metrics", headers=dict(bearer(ALICE)))).text
        return [line for line in page.splitlines() if line.startswith("paceline:request_errors_total")]

    before = await counted()
    with caplog.at_level(logging.WARNING):
        yield
    assert not caplog.records
    assert await counted() == before


async def test_a_client_that_leaves_while_it_sends_its_body_is_no_error_of_anybody(
    fleet: ScriptedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    """Each phone in a tunnel was counted, rang an alert, and wrote a stack of 1.5 KB."""
    async with counting_no_error(fleet, caplog):
        for path in (b"completions", b"chat/completions", b"messages", b"responses"):
            reader, writer = await connected(fleet)
            writer.write(head(ALICE, 100).replace(b"completions", path)[:-2] + b"expect: 100-continue\r\n\r\n{")
            assert b"100 Continue" in await reader.readline()
            writer.transport.abort()
            await until(lambda: not any("run_asgi" in repr(task.get_coro()) for task in asyncio.all_tasks()))


@pytest.mark.parametrize("path", [b"completions", b"chat/completions", b"messages", b"responses"])
@pytest.mark.parametrize(
    "named", ["content-encoding: gzip", "content-encoding: identity, br", "transfer-encoding: gzip, chunked"]
)
async def test_a_compressed_body_is_refused_for_that(fleet: ScriptedFleet, path: bytes, named: str) -> None:
    """It was told that it was no JSON, or no UTF-8."""
    body = gzip.compress(b'{"model": "tiny", "prompt": "x"}')
    length = "" if named.startswith("transfer") else f"content-length: {len(body)}\r\n"
    sent = f"POST /v1/%b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ALICE}\r\n{named}\r\n{length}\r\n"
    reader, writer = await connected(fleet)
    writer.write(sent.encode() % path + (body if length else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)))
    answer = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert answer.startswith("HTTP/1.1 415 ")
    assert "accept-encoding: identity" in answer
    assert f"must be sent as it is, without {named}" in (await reader.readuntil(b"}")).decode()
    writer.close()


async def test_a_body_that_says_it_is_not_compressed_is_read(fleet: ScriptedFleet) -> None:
    headers = {**dict(bearer(ALICE)), "content-encoding": "identity"}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    assert (await fleet.http.post("/v1/completions", json=body, headers=headers)).status_code == 200


async def test_idle_connections_without_a_key_do_not_keep_health_from_answering(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "SPARE_CONNECTIONS", 8)
    async with guarded(tmp_path, keys_file, max_sessions=8) as fleet:
        fleet.verifier.script = Script(pause_after=3)
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 6}).encode()
        _, busy = reading = await connected(fleet)
        busy.write(head(ALICE, len(body)) + body)
        session_id = await fleet.verifier.paused.get()
        idle = [await connected(fleet) for _ in range(2 * 8 + 8)]
        assert (await fleet.http.get("/health")).status_code == 200
        # The eldest idle one made room, and no request was broken off.
        assert await asyncio.wait_for(closed(idle[0][0]), 30)
        fleet.verifier.resume(session_id)
        assert b"200 OK" in await reading[0].readline()
        for _, writer in (*idle, reading):
            writer.close()


async def test_an_idle_connection_stays_open_for_as_long_as_the_setting_says(tmp_path: Path) -> None:
    """They closed after 75 s, while balancers keep them for ten minutes: a POST sent at that moment was lost."""
    assert GatewayConfig.__dataclass_fields__["idle_connection_s"].default > 600
    async with scripted_fleet(tmp_path, idle_connection_s=0.1) as fleet:
        reader, writer = await connected(fleet)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"}")
        assert await asyncio.wait_for(closed(reader), 30)
        writer.close()


async def test_an_old_grpc_connection_takes_no_new_calls_and_ends_none(tmp_path: Path) -> None:
    """A client that kept calling stayed at its gateway for ever; those that the HPA added got nothing."""
    async with scripted_fleet(tmp_path, grpc_connection_age_s=0.1) as fleet, raw_channel(fleet) as channel:
        fleet.verifier.script = Script(pause_after=3)
        stub = gateway_pb2_grpc.GatewayStub(channel)
        request = Request(prompt="x", sampling=common_pb2.SamplingParams(max_tokens=6))
        running = asyncio.create_task(status_of(stub.Generate(request)))
        session_id = await fleet.verifier.paused.get()
        async with asyncio.timeout(30):
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        fleet.verifier.script = Script()
        # Over a connection of its own.
        assert await status_of(stub.Generate(request)) is None
        assert not running.done()
        fleet.verifier.resume(session_id)
        assert await running is None


async def test_one_key_with_bodies_that_never_come_leaves_probes_and_other_keys_alone(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """800 of them made every door answer 503, to probes and all keys, for as long as they came."""
    monkeypatch.setattr(doors, "SPARE_CONNECTIONS", 8)
    async with guarded(tmp_path, keys_file, max_sessions=8) as fleet:
        greedy = [await connected(fleet) for _ in range(2 * 8 + 8 + 4)]
        for _, writer in greedy:
            writer.write(head(ALICE, 10))
        # The last of them is refused at once, and says so to its own key only.
        answer = await asyncio.wait_for(greedy[-1][0].readuntil(b"\r\n\r\n"), 30)
        assert b"429" in answer.splitlines()[0]
        async with httpx.AsyncClient(base_url=f"http://{fleet.addresses.http}", trust_env=False, timeout=30) as fresh:
            for path in ("/livez", "/readyz", "/health"):
                assert (await fresh.get(path)).status_code == 200
            page = await fresh.get("/metrics", headers=dict(bearer(ALICE)))
            assert 'paceline:request_errors_total{type="OverloadedError"}' in page.text
            body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
            assert (await fresh.post("/v1/completions", json=body, headers=dict(bearer(BOB)))).status_code == 200
        for _, writer in greedy:
            writer.close()


@pytest.mark.parametrize(
    ("most_files", "connections"), [(20_000, 768), (2 * 768 + 256, 768), (1024, 384), (2 * 32 + 256, 32)]
)
def test_the_doors_fit_below_the_limit_of_open_files_and_say_so(
    caplog: pytest.LogCaptureFixture, most_files: int, connections: int
) -> None:
    """1,360 idle connections without a key stopped health where the limit was 1,024."""
    limits = doors.DoorLimits.of(GatewayConfig(model=()), most_files)
    assert limits.max_connections == limits.calls.total == connections
    assert limits.requests.total == connections * 7 // 8
    assert ["open files" in record.message for record in caplog.records] == [True] * (connections < 768)


def test_too_few_open_files_keep_a_gateway_from_starting() -> None:
    with pytest.raises(ConfigError, match="ulimit -n: 300 open files are too few"):
        doors.DoorLimits.of(GatewayConfig(model=()), 300)


async def closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


async def test_a_body_for_which_there_is_no_room_is_refused_before_it_is_sent(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "MAX_BODIES", 4)
    async with guarded(tmp_path, keys_file) as fleet:
        largest = 4 * 1024 * 1024
        slow = [await connected(fleet) for _ in range(3)]
        for _, writer in slow:
            # Each is asked to go on, so its room is taken; the first three quarters may go to one key.
            writer.write(head(ALICE, largest).replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
        for reader, _ in slow:
            assert b"100 Continue" in await reader.readline()
        reader, writer = await connected(fleet)
        writer.write(head(ALICE, largest))
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b"429" in answer.splitlines()[0]
        assert b"retry-after: 1" in answer.lower()
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
        assert (await fleet.http.post("/v1/completions", json=body, headers=dict(bearer(BOB)))).status_code == 200
        for _, each in (*slow, (reader, writer)):
            each.close()


async def test_a_body_in_chunks_takes_its_room_as_it_comes(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "MAX_BODIES", 1)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * 1024 * 1024

    async with guarded(tmp_path, keys_file) as fleet:
        answer = await fleet.http.post("/v1/completions", content=chunks(), headers=dict(bearer(ALICE)))
        # Half of the room is kept for keys that read nothing yet.
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")


async def test_what_is_left_of_a_refused_body_is_thrown_away_and_the_connection_goes_on(fleet: ScriptedFleet) -> None:
    reader, writer = await connected(fleet)
    for key, size, status in (("pl-nobody", 200_000, b"401"), (ALICE, 6 * 1024 * 1024, b"413"), (BOB, 1, b"400")):
        writer.write(head(key, size) + bytes(size))
        await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        assert status in answer.splitlines()[0]
        length = next(int(line.split(b":")[1]) for line in answer.splitlines() if b"content-length" in line.lower())
        await reader.readexactly(length)
    writer.close()


async def test_a_body_without_an_end_closes_its_connection(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.gateway.http.connection.MAX_DISCARDED_BYTES", 1024 * 1024)
    _, writer = await connected(fleet)
    writer.write(head("pl-nobody", 2**40))
    with pytest.raises(ConnectionError):
        for _ in range(64):
            writer.write(bytes(1024 * 1024))
            await writer.drain()
    writer.close()


# Finding 2: nothing holds the event loop.


@pytest.mark.parametrize("door", ["completions", "chat/completions", "grpc"])
async def test_a_long_prompt_is_tokenized_beside_the_event_loop_at_both_doors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    begun, released = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    encode = TextCodec.encode

    def slow(*arguments: Any, **settings: Any) -> tuple[int, ...]:
        loop.call_soon_threadsafe(begun.set)
        assert released.wait(30), "the event loop was held"
        return encode(*arguments, **settings)

    text = "x" * 100
    async with scripted_fleet(tmp_path) as fleet:
        monkeypatch.setattr(TextCodec, "encode", slow)
        if door == "grpc":
            asking: Any = status_of(
                fleet.stub.Generate(Request(model=MODEL, prompt=text, stop=["x" * 256] * 16), timeout=60)
            )
        else:
            prompt = {"prompt": text} if door == "completions" else {"messages": [{"role": "user", "content": text}]}
            asking = fleet.http.post(f"/v1/{door}", json={"model": MODEL, "user": "x" * 5000, **prompt})
        task = asyncio.create_task(asking)
        await begun.wait()
        assert (await fleet.http.get("/livez")).status_code == 200
        released.set()
        answer = await task
        assert answer is None or answer.status_code == 200

"""Engines that die or hang: who is told what, so that gateways know which request may have done it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.cluster.valkey import free_port
from paceline.core.errors import EngineDiedError, PacelineError, PeerLostError, UnavailableError
from paceline.core.messages import VERIFIER, CommittedTokens, GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.fleet.verifier_client import RunningCall, VerifierClient
from paceline.model_service import EXIT_HUNG, engine_ended
from paceline.rpc.v1 import verifier_pb2_grpc
from paceline.service.process import TAKEN
from paceline.service.status import error_from_rpc
from paceline.service.supervision import Supervisor
from paceline.verifier import outbox as verifier_outbox
from paceline.verifier import verifier_host
from paceline.verifier.verifier_host import TargetHost
from paceline.wire import committed_from_pb, generate_request_to_pb
from tests.integration.conftest import running_verifier, verifier_at
from tests.support.memory_store import MemoryStore
from tests.support.poison import DIES, HANGS, Poison
from tools.delay_proxy import DelayProxy

PROMPT = tuple(range(5, 25))
PLAIN = SpeculationParams(enabled=False)


def ask(session_id: str, *ahead: int, max_tokens: int = 200) -> GenerateRequest:
    return GenerateRequest(
        session_id=session_id,
        epoch=1,
        prompt_token_ids=(*ahead, *PROMPT),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        speculation=PLAIN,
    )


class Stream:
    """One session, as its gateway hears of it."""

    def __init__(self, stub: verifier_pb2_grpc.VerifierAsyncStub, request: GenerateRequest) -> None:
        self._call = stub.Generate(generate_request_to_pb(request), timeout=60)
        self.heard: list[CommittedTokens] = []

    async def next(self) -> CommittedTokens:
        """The next message."""
        message = await self._call.read()
        assert message is not grpc.aio.EOF
        self.heard.append(committed_from_pb(message))
        return self.heard[-1]

    async def until_tokens(self) -> None:
        """Returns once it has tokens."""
        while not (await self.next()).token_ids:
            pass

    async def end(self) -> PacelineError | None:
        """What it ended with, None: its result."""
        try:
            while not self.heard or self.heard[-1].result is None:
                await self.next()
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        return None


@asynccontextmanager
async def watched(host: TargetHost) -> AsyncIterator[None]:
    """Somebody waits for the engine's end, and signs of life go out, as `serve_model` has it."""
    watching = asyncio.create_task(engine_ended(host, VERIFIER))
    try:
        async with Supervisor(CollectorRegistry()).kept(host.background(MemoryStore())):
            yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_only_sessions_of_the_step_that_died_are_told_that_they_may_have_caused_it(tiny_pair) -> None:
    poison = Poison()
    async with running_verifier(tiny_pair[0], max_num_seqs=2, poison=poison) as (stub, host), watched(host):
        beside = Stream(stub, ask("beside"))
        await beside.until_tokens()
        blocker = Stream(stub, ask("hangs for a while", HANGS))
        assert (await blocker.next()).running
        waiting = Stream(stub, ask("waits", DIES))
        while host.num_sessions < 3:  # noqa: ASYNC110 - the host tells nobody
            await asyncio.sleep(0)
        blocker._call.cancel()
        poison.cure.set()
        left = Stream(stub, ask("still in the queue"))
        assert type(await beside.end()) is EngineDiedError
        assert type(await waiting.end()) is EngineDiedError
        assert type(await left.end()) in (UnavailableError, EngineDiedError)


async def test_a_session_that_waits_for_a_place_is_no_part_of_the_step_that_died(tiny_pair) -> None:
    poison = Poison()
    async with running_verifier(tiny_pair[0], max_num_seqs=1, poison=poison) as (stub, host), watched(host):
        guilty = Stream(stub, ask("guilty", HANGS))
        assert (await guilty.next()).running
        innocent = Stream(stub, ask("innocent"))
        while host.num_sessions < 2:  # noqa: ASYNC110 - the host tells nobody
            await asyncio.sleep(0)
        host.engine_died("the verifier's engine hangs")
        assert type(await guilty.end()) is EngineDiedError
        assert type(await innocent.end()) is UnavailableError
        assert not innocent.heard
        late = Stream(stub, ask("late"))
        assert type(await late.end()) is UnavailableError
        poison.cure.set()


async def test_a_session_hears_once_and_first_that_it_runs_and_where_each_token_belongs(tiny_pair) -> None:
    async with running_verifier(tiny_pair[0]) as (stub, _):
        stream = Stream(stub, ask("s", max_tokens=30))
        assert await stream.end() is None
    assert [each.running for each in stream.heard] == [True] + [False] * (len(stream.heard) - 1)
    offset = 0
    for each in stream.heard:
        assert each.offset == offset
        offset += len(each.token_ids)
    assert offset == 30


async def test_a_session_that_waits_shows_life_while_the_engine_gets_on(
    tiny_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_host, "LIFE_S", 0.01)
    monkeypatch.setattr(verifier_outbox, "SILENCE_S", 0.02)
    async with (
        running_verifier(tiny_pair[0], max_num_seqs=1, poison=Poison(step_s=0.01)) as (stub, host),
        watched(host),
    ):
        first = Stream(stub, ask("first", max_tokens=60))
        await first.until_tokens()
        second = Stream(stub, ask("second", max_tokens=2))
        assert await first.end() is None
        assert await second.end() is None
    said = [(len(each.token_ids), each.running) for each in second.heard]
    assert said.index((0, True)) > 3, "signs of life come first"
    assert set(said[: said.index((0, True))]) == {(0, False)}


async def test_a_hung_engine_shows_no_life(tiny_pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_host, "LIFE_S", 0.01)
    monkeypatch.setattr(verifier_outbox, "SILENCE_S", 0.02)
    poison = Poison()
    async with running_verifier(tiny_pair[0], poison=poison) as (stub, host), watched(host):
        stream = Stream(stub, ask("s", HANGS, max_tokens=4))
        assert (await stream.next()).running
        silence = asyncio.create_task(stream.next())
        done, _ = await asyncio.wait({silence}, timeout=0.5)
        assert not done
        poison.cure.set()
        await silence
        assert await stream.end() is None


async def test_tokens_that_cannot_be_handed_on_end_their_sessions_and_nothing_else(
    tiny_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_verifier(tiny_pair[0]) as (stub, host):
        deliver = host._outboxes.deliver

        def failing(committed) -> None:
            if any(each.token_ids for _, each in committed):
                raise KeyError("a bug between engine and outboxes")
            deliver(committed)

        monkeypatch.setattr(host._outboxes, "deliver", failing)
        error = await asyncio.wait_for(Stream(stub, ask("s")).end(), 30)
        assert type(error) is UnavailableError
        assert "could not be handed on" in str(error)
        monkeypatch.undo()
        assert await Stream(stub, ask("s", max_tokens=8)).end() is None


async def test_a_session_that_cannot_be_made_ends_alone(tiny_pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_verifier(tiny_pair[0]) as (stub, host):
        other = Stream(stub, ask("other", max_tokens=100))
        await other.until_tokens()
        make = host._stepper._new_session

        def failing(event):
            if event.request.session_id == "bad":
                raise ValueError("what no check has seen")
            return make(event)

        monkeypatch.setattr(host._stepper, "_new_session", failing)
        error = await asyncio.wait_for(Stream(stub, ask("bad")).end(), 30)
        assert type(error) is PacelineError
        assert await other.end() is None


SERVE = """
import sys
from paceline.verifier import __main__ as verifier, own_engine
from tests.support.poison import Poison

load = own_engine.load_decoder
own_engine.load_decoder = lambda *arguments: Poison().into(load(*arguments))
verifier.main(sys.argv[1:])
"""


@asynccontextmanager
async def verifier_process(folder: Path) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """A verifier that hangs on some prompts, in a process of its own."""
    root = Path(__file__).parents[2]
    port = free_port("127.0.0.1")
    arguments = ("--model", folder, "--port", port, "--metrics-port", 0, "--redis-url", "memory://")
    bounds = ("--engine-stall-s", 1, "--num-kv-blocks", 64, "--max-num-batched-tokens", 32, "--max-num-seqs", 8)
    started = subprocess.Popen(
        [sys.executable, "-c", SERVE, *map(str, (*arguments, *bounds))],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{root / 'services'}:{root}"},
    )
    with started as process:
        try:
            yield process, f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.mark.full
@pytest.mark.parametrize("stopping", [False, True])
async def test_a_process_whose_engine_hangs_says_so_hands_its_sessions_on_and_ends(tiny_pair, stopping: bool) -> None:
    async with verifier_process(tiny_pair[0]) as (process, address), grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
        stub = verifier_pb2_grpc.VerifierStub(channel)
        stream = Stream(stub, ask("s", HANGS, max_tokens=4))
        assert (await stream.next()).running
        if stopping:
            process.send_signal(signal.SIGTERM)
        assert type(await stream.end()) is EngineDiedError
        _, log = await asyncio.to_thread(process.communicate, timeout=30)
        assert process.returncode == EXIT_HUNG
    (last,) = (line for line in log.splitlines() if "the engine hangs" in line)
    assert "level=critical" in last
    assert "thread target" in last
    assert "poison.py" in last


async def test_a_verifier_that_vanished_had_the_session_or_was_never_reached(tiny_pair) -> None:
    poison = Poison()
    request = ask("s", HANGS)
    client = VerifierClient(60)
    async with verifier_at(tiny_pair[0], poison=poison) as (address, _):
        host, port = address.rsplit(":", 1)
        with DelayProxy((host, int(port))) as proxy:
            running = client.running(proxy.address, request, vocab_size=256)
            losing = asyncio.create_task(lost(client, running))
            while not running.ran:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
            proxy.cut()
            assert await losing == (True, False)
            poison.cure.set()
        away = client.running(f"127.0.0.1:{free_port('127.0.0.1')}", request, vocab_size=256)
        assert await lost(client, away) == (False, False)
    await client.close()


async def lost(client: VerifierClient, running: RunningCall) -> tuple[bool, bool]:
    """Whether the engine was heard to run the session, and whether it may have, once the connection was cut."""
    with pytest.raises(PeerLostError):
        async for _ in client.generate(running):
            pass
    return running.ran, running.unheard


async def test_a_verifier_that_vanished_before_it_said_anything_may_have_computed_the_session() -> None:
    async def generate(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(((TAKEN, "1"),))
        taken.set()
        await asyncio.sleep(60)
        yield b""

    taken = asyncio.Event()
    server = grpc.aio.server()
    handlers = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("paceline.rpc.v1.Verifier", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    request, client = ask("s"), VerifierClient(60)
    with DelayProxy(("127.0.0.1", port)) as proxy:
        running = client.running(proxy.address, request, vocab_size=256)
        losing = asyncio.create_task(lost(client, running))
        await taken.wait()
        (call,) = client._calls
        assert TAKEN in dict(await call.initial_metadata())
        proxy.cut()
        assert await losing == (False, True)
    await client.close()
    await server.stop(None)

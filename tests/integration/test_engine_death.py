"""Engines that die or hang: who is told what, so that gateways know which request may have done it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.core.errors import EngineDiedError, PacelineError, PeerLostError, UnavailableError
from paceline.core.messages import VERIFIER, GenerateRequest, SessionEvent
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.fleet.verifier_client import RunningCall, VerifierClient
from paceline.model_service import EXIT_HUNG, engine_ended
from paceline.rpc.v1 import verifier_pb2, verifier_pb2_grpc
from paceline.service.supervision import TaskSupervisor
from paceline.verifier import commit_log, verifier_host
from paceline.verifier.verifier_host import TargetHost
from paceline.wire.columns import MAX_NUMBER
from tests.integration.conftest import running_verifier, verifier_at
from tests.support.clock import Clock
from tests.support.fuzzing import until
from tests.support.log_stream import ScriptedLog, VerifierCalls, verifier_calls
from tests.support.memory_store import MemoryStore
from tests.support.poison import DIES, HANGS, Poison
from tests.support.steps import Step
from tools.delay_proxy import DelayProxy
from tools.ports import free_port

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

    def __init__(self, calls: VerifierCalls, request: GenerateRequest) -> None:
        self.call = calls.running(request)
        self._steps = calls.generate_of(self.call)
        self.heard: list[Step] = []
        self._hearing = asyncio.create_task(self._hear())

    async def _hear(self) -> PacelineError | None:
        async with aclosing(self._steps):
            try:
                async for step in self._steps:
                    self.heard.append(step)
            except PacelineError as error:
                return error
        return None

    async def runs(self) -> None:
        """Returns once the engine computes it."""
        await until(lambda: self.call.ran)

    async def until_tokens(self) -> None:
        """Returns once it has tokens."""
        await until(lambda: bool(self.heard))

    async def end(self) -> PacelineError | None:
        """What it ended with, None: its result."""
        return await asyncio.wait_for(self._hearing, 60)

    async def leave(self) -> None:
        """Its client has gone."""
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)


@asynccontextmanager
async def watched(host: TargetHost) -> AsyncIterator[None]:
    """Somebody waits for the engine's end, and signs of life go out, as `serve_model` has it."""
    watching = asyncio.create_task(engine_ended(host, VERIFIER))
    try:
        async with TaskSupervisor(CollectorRegistry()).kept(host.background(MemoryStore())):
            yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_only_sessions_of_the_step_that_died_are_told_that_they_may_have_caused_it(tiny_pair) -> None:
    poison = Poison()
    async with running_verifier(tiny_pair[0], max_num_seqs=2, poison=poison) as (calls, host), watched(host):
        beside = Stream(calls, ask("beside"))
        await beside.until_tokens()
        blocker = Stream(calls, ask("hangs for a while", HANGS))
        await blocker.runs()
        waiting = Stream(calls, ask("waits", DIES))
        while host.num_sessions < 3:  # noqa: ASYNC110 - the host tells nobody
            await asyncio.sleep(0)
        await blocker.leave()
        poison.cure.set()
        left = Stream(calls, ask("still in the queue"))
        assert type(await beside.end()) is EngineDiedError
        assert type(await waiting.end()) is EngineDiedError
        assert type(await left.end()) in (UnavailableError, EngineDiedError)


async def test_a_session_that_waits_for_a_place_is_no_part_of_the_step_that_died(tiny_pair) -> None:
    poison = Poison()
    async with running_verifier(tiny_pair[0], max_num_seqs=1, poison=poison) as (calls, host), watched(host):
        guilty = Stream(calls, ask("guilty", HANGS))
        await guilty.runs()
        innocent = Stream(calls, ask("innocent"))
        while host.num_sessions < 2:  # noqa: ASYNC110 - the host tells nobody
            await asyncio.sleep(0)
        host.engine_died("the verifier's engine hangs")
        assert type(await guilty.end()) is EngineDiedError
        assert type(await innocent.end()) is UnavailableError
        assert not innocent.heard
        late = Stream(calls, ask("late"))
        # gRPC may lose why.
        assert isinstance(await late.end(), UnavailableError)
        poison.cure.set()


async def test_a_session_that_waits_shows_life_while_the_engine_gets_on(
    tiny_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_host, "LIFE_S", 0.01)
    monkeypatch.setattr(commit_log, "SILENCE_S", 0.02)
    async with (
        running_verifier(tiny_pair[0], max_num_seqs=1, poison=Poison(step_s=0.01)) as (calls, host),
        watched(host),
    ):
        first = Stream(calls, ask("first", max_tokens=60))
        await first.until_tokens()
        async with verifier_calls(calls.address, host.identity.vocab_size) as others:
            second = Stream(others, ask("second", max_tokens=2))
            signs = set()
            while not second.call.ran:
                await asyncio.sleep(0.001)
                signs.add(second.call.heard_s)
            assert len(signs) > 3, "signs of life come first"
            assert await second.end() is None
        assert await first.end() is None


async def test_in_a_long_step_a_verifier_shows_life_and_for_how_long_until_the_engine_counts_as_hung(
    tiny_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_host, "LIFE_S", 0.01)
    monkeypatch.setattr(commit_log, "SILENCE_S", 0.02)
    poison, bound_s = Poison(), 1e9
    monkeypatch.setattr(verifier_host.TargetHost, "stall_s", property(lambda _: bound_s))
    async with running_verifier(tiny_pair[0], poison=poison) as (calls, host), watched(host):
        stream = Stream(calls, ask("s", HANGS, max_tokens=4))
        await stream.runs()
        signs: dict[float, float] = {}
        while len(signs) < 4:
            await asyncio.sleep(0.001)
            assert stream.call._stream is not None
            if step_s := stream.call._stream.step_s:
                signs[stream.call.heard_s] = step_s
        assert sorted(signs.values()) == [*signs.values()], "the step goes on"
        bound_s = 0.0
        # Signs on their way arrive.
        await asyncio.sleep(0.2)
        heard_s = stream.call.heard_s
        await asyncio.sleep(0.5)
        assert stream.call.heard_s == heard_s
        poison.cure.set()
        assert await stream.end() is None


async def test_tokens_that_cannot_be_handed_on_end_their_sessions_and_nothing_else(
    tiny_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_verifier(tiny_pair[0]) as (calls, _):
        put = commit_log.SessionLog.put

        def failing(log, offset, token_ids, *rest) -> None:
            if token_ids:
                raise KeyError("a bug between engine and logs")
            put(log, offset, token_ids, *rest)

        monkeypatch.setattr(commit_log.SessionLog, "put", failing)
        error = await asyncio.wait_for(Stream(calls, ask("s")).end(), 30)
        assert type(error) is UnavailableError
        assert "could not be handed on" in str(error)
        monkeypatch.undo()
        assert await Stream(calls, ask("s", max_tokens=8)).end() is None


async def test_a_session_that_cannot_be_made_ends_alone(tiny_pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_verifier(tiny_pair[0]) as (calls, host):
        other = Stream(calls, ask("other", max_tokens=100))
        await other.until_tokens()
        make = host._stepper._new_session

        def failing(event):
            if event.request.session_id == "bad":
                raise ValueError("what no check has seen")
            return make(event)

        monkeypatch.setattr(host._stepper, "_new_session", failing)
        error = await asyncio.wait_for(Stream(calls, ask("bad")).end(), 30)
        assert type(error) is PacelineError
        assert await other.end() is None


@pytest.mark.parametrize("fault", ["an outcome that cannot be encoded", "a start that fails once it is counted"])
async def test_an_error_of_ours_ends_its_session_alone_and_frees_it(
    tiny_pair, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    async with running_verifier(tiny_pair[0]) as (calls, host):
        other = Stream(calls, ask("other", max_tokens=100))
        await other.until_tokens()
        put, begin = commit_log.SessionLog.put, host._begin

        def putting(log, offset, token_ids, *rest) -> None:
            named = [each for each in host._sessions.values() if each.request.session_id == "bad"]
            bad = any(each.log is log for each in named)
            put(log, offset, [-1] * len(token_ids) if bad else token_ids, *rest)

        def beginning(mine, *grammar) -> None:
            if mine.request.session_id == "bad":
                raise ValueError("what no check has seen")
            begin(mine, *grammar)

        if fault.startswith("an outcome"):
            monkeypatch.setattr(commit_log.SessionLog, "put", putting)
        else:
            monkeypatch.setattr(host, "_begin", beginning)
        error = await Stream(calls, ask("bad")).end()
        assert "internal error" in str(error)
        assert [each.request.session_id for each in host._sessions.values()] in (["other"], [])
        assert await other.end() is None
        assert host.num_sessions == 0


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
    async with verifier_process(tiny_pair[0]) as (process, address), verifier_calls(address) as calls:
        async with grpc.aio.insecure_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), 60)
        stream = Stream(calls, ask("s", HANGS, max_tokens=4))
        await stream.runs()
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
            running = client.running(proxy.address, request, 256, lambda *_: False)
            losing = asyncio.create_task(lost(client, running))
            while not running.ran:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
            proxy.cut()
            assert await losing == (True, False)
            poison.cure.set()
        away = client.running(f"127.0.0.1:{free_port('127.0.0.1')}", request, 256, lambda *_: False)
        assert await lost(client, away) == (False, False)
    await client.close()


async def lost(client: VerifierClient, running: RunningCall) -> tuple[bool, bool]:
    """Whether the engine was heard to run the session, and whether it may have, once the connection was cut."""
    with pytest.raises(PeerLostError):
        await client.run(running)
    return running.ran, running.unheard


class Silent(verifier_pb2_grpc.VerifierServicer):
    """Accepts sessions, and says nothing of them; shows life once it may."""

    def __init__(self) -> None:
        self.lives = asyncio.Event()

    async def Verify(self, request_iterator, context) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        async for message in ScriptedLog(self._run).messages(request_iterator):
            yield message
            if message.taken:
                await self.lives.wait()
                yield verifier_pb2.VerifyResponse(alive=True)

    async def _run(self, _: GenerateRequest) -> AsyncIterator[Step]:
        await asyncio.Event().wait()
        yield Step()


@pytest.mark.parametrize(("life_after_s", "unheard"), [(None, True), (0.5, True), (1.5, False)])
async def test_a_verifier_that_vanished_before_it_said_anything_may_have_computed_the_session_unless_it_let_it_wait(
    life_after_s: float | None, unheard: bool
) -> None:
    server, silent, clock = grpc.aio.server(), Silent(), Clock()
    verifier_pb2_grpc.add_VerifierServicer_to_server(silent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    request, client = ask("s"), VerifierClient(60, clock=clock)
    with DelayProxy(("127.0.0.1", port)) as proxy:
        running = client.running(proxy.address, request, 256, lambda *_: False)
        losing = asyncio.create_task(lost(client, running))
        await until(lambda: running.taken_s is not None)
        if life_after_s is not None:
            clock.now_s = life_after_s
            silent.lives.set()
            await until(lambda: running.heard_s == life_after_s)
        proxy.cut()
        assert await losing == (False, unheard)
    await client.close()
    await server.stop(None)


async def test_an_error_in_taking_what_a_verifier_tells_ends_that_session_and_no_other_of_its_stream(tiny_pair) -> None:
    def fail(*_: object) -> bool:
        raise ValueError("cannot be taken")

    heard: list[SessionEvent] = []

    def hear(_: tuple[int, ...], __: bytes, event: SessionEvent) -> bool:
        heard.append(event)
        return False

    client = VerifierClient(60)
    async with verifier_at(tiny_pair[0]) as (address, _):
        other = asyncio.create_task(client.run(client.running(address, ask("other"), 4096, hear)))
        with pytest.raises(ValueError, match="cannot be taken"):
            await client.run(client.running(address, ask("s"), 4096, fail))
        await other
    assert heard[-1].result is not None
    await client.close()


async def test_a_stream_without_a_number_left_ends_and_the_next_session_dials_anew(tiny_pair) -> None:
    async with running_verifier(tiny_pair[0]) as (calls, _):
        stream = Stream(calls, ask("s"))
        await stream.until_tokens()
        dialled = calls._client._stream(calls.address)
        dialled._last_number = MAX_NUMBER
        with pytest.raises(UnavailableError, match="no number left"):
            await calls.tokens(ask("beyond", max_tokens=2))
        assert type(await stream.end()) is UnavailableError
        await until(lambda: dialled.over)
        assert len(await calls.tokens(ask("next", max_tokens=2))) == 2


async def test_a_stream_that_breaks_loses_all_its_sessions_and_the_next_one_dials_again(tiny_pair) -> None:
    async with verifier_at(tiny_pair[0]) as (address, verifier):
        host, port = address.rsplit(":", 1)
        with DelayProxy((host, int(port))) as proxy:
            async with verifier_calls(proxy.address, verifier.identity.vocab_size) as calls:
                streams = [Stream(calls, ask(name)) for name in ("a", "b", "c")]
                for stream in streams:
                    await stream.until_tokens()
                await streams[0].leave()
                await until(lambda: verifier.num_sessions == 2)
                assert streams[1].call.ended_by is None
                proxy.cut()
                assert [type(await each.end()) for each in streams[1:]] == [PeerLostError, PeerLostError]
                await until(lambda: verifier.num_sessions == 0)
                assert await Stream(calls, ask("d", max_tokens=8)).end() is None


async def test_a_gateway_that_does_not_read_is_cut_off_and_others_are_served(
    tiny_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "LOG_BYTES", 2000)
    async with running_verifier(tiny_pair[0]) as (calls, host):
        gateway = commit_log.GatewayLog()
        host._gateways.add(gateway)
        host._start(gateway, 1, ask("unread"))
        other = Stream(calls, ask("other"))
        await until(lambda: gateway.closed)
        with pytest.raises(UnavailableError, match="the gateway does not read its log"):
            await gateway.take()
        assert not gateway.sessions
        host._gateways.remove(gateway)
        assert await other.end() is None

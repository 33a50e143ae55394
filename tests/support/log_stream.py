"""Both ends of the stream between gateway and verifier: a verifier that runs a script, and calls of a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.messages import GATEWAY, GenerateRequest, SessionEvent
from paceline.gateway.fleet.verifier_client import RunningCall, VerifierClient
from paceline.rpc.v1 import verifier_pb2
from paceline.service.credentials import folder_of, load_tls
from paceline.wire import LogPart, log_to_pb, starts_from_pb
from paceline.wire.common import PROTOCOL
from tests.support.steps import Step, said

Run = Callable[[GenerateRequest], AsyncIterator[Step]]
SILENCE_S = 30.0


class ScriptedLog:
    """The verifier's end of one stream; a task runs each session."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._messages: asyncio.Queue[verifier_pb2.VerifyResponse | None] = asyncio.Queue(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._last: dict[int, Step] = {}

    async def messages(
        self, requests: AsyncIterator[verifier_pb2.VerifyRequest]
    ) -> AsyncGenerator[verifier_pb2.VerifyResponse, None]:
        """What the verifier says."""
        reader = asyncio.create_task(self._read(requests))
        try:
            yield verifier_pb2.VerifyResponse(protocol=PROTOCOL)
            while (message := await self._messages.get()) is not None:
                yield message
        finally:
            tasks = [reader, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[verifier_pb2.VerifyRequest]) -> None:
        async for request in requests:
            for number, generate in starts_from_pb(request):
                assert isinstance(generate, GenerateRequest), "gateways send what can be read"
                self._tasks[number] = asyncio.create_task(self._session(number, generate))
            for number in request.leaves:
                await self._leave(number)
        await self._messages.put(None)

    async def _leave(self, number: int) -> None:
        task = self._tasks[number]
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            last = self._last.get(number)
            await self._say(number, Step(speculation=last and last.speculation))

    async def _session(self, number: int, generate: GenerateRequest) -> None:
        await self._messages.put(log_to_pb(LogPart(taken=[number])))
        try:
            async for committed in self._run(generate):
                self._last[number] = committed
                await self._say(number, committed)
        except PacelineError as error:
            await self._say(number, error)
        except Exception as error:  # noqa: BLE001 - as a verifier's host does
            await self._say(number, PacelineError(f"internal error ({type(error).__name__})"))

    async def _say(self, number: int, outcome: Step | PacelineError) -> None:
        await self._messages.put(log_to_pb(said([(number, outcome)], alive=True)))


class VerifierCalls:
    """Sessions on one verifier, called as a gateway calls it; without what is said between tokens."""

    def __init__(self, client: VerifierClient, address: str, vocab_size: int) -> None:
        self._client = client
        self.address = address
        self._vocab_size = vocab_size

    def running(self, request: GenerateRequest) -> RunningCall:
        return self._client.running(self.address, request, self._vocab_size, lambda *_: False)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Step, None]:
        return self.generate_of(self.running(request))

    async def generate_of(self, running: RunningCall) -> AsyncGenerator[Step, None]:
        told: asyncio.Queue[Step | None] = asyncio.Queue()

        def take(token_ids: tuple[int, ...], origins: bytes, event: SessionEvent) -> bool:
            told.put_nowait(Step(token_ids, origins, 0, *event))
            return False

        running.take = take
        task = asyncio.create_task(self._client.run(running))
        task.add_done_callback(lambda _: told.put_nowait(None))
        try:
            while (step := await told.get()) is not None:
                yield step
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def steps(self, request: GenerateRequest) -> list[Step]:
        """All messages of a session."""
        return await self.steps_of(self.running(request))

    async def steps_of(self, running: RunningCall) -> list[Step]:
        async with asyncio.timeout(60):
            return [each async for each in self.generate_of(running)]

    async def tokens(self, request: GenerateRequest) -> list[int]:
        return await self.tokens_of(self.running(request))

    async def tokens_of(self, running: RunningCall) -> list[int]:
        return [token_id for each in await self.steps_of(running) for token_id in each.token_ids]


@asynccontextmanager
async def verifier_calls(
    address: str, vocab_size: int = 2**31, tls_dir: Path | None = None, silence_s: float = SILENCE_S
) -> AsyncIterator[VerifierCalls]:
    """Calls of the verifier at an address, over one stream."""
    client = VerifierClient(silence_s, load_tls(folder_of(tls_dir, GATEWAY), GATEWAY))
    try:
        yield VerifierCalls(client, address, vocab_size)
    finally:
        await client.close()

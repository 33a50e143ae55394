"""A real gateway before real gRPC servers whose verifiers follow a script instead of running a model."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from paceline.core.messages import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ModelIdentity,
    PositionLogprobs,
    SpeculationRecord,
    Timings,
    TokenOrigin,
)
from paceline.gateway.config import GatewayConfig
from paceline.gateway.doors import Addresses
from paceline.gateway.fleet.generation_config import NO_DEFAULTS, ModelDefaults
from paceline.gateway.service import serve
from paceline.gateway.text.codec import TextCodec
from paceline.rpc.v1 import gateway_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from paceline.service.process import GrpcServer, start_grpc_server
from paceline.store.base import Replica
from tests.support import tiny_tokenizer
from tests.support.log_stream import ScriptedLog
from tests.support.memory_store import MemoryStore
from tests.support.steps import Step

MODEL = "tiny"
CONTEXT_LEN = 256
EOS = 1
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
WAIT_S = 30.0
# Of files whose tests share a gateway, which belongs to one event loop.
SHARES_A_GATEWAY = pytest.mark.asyncio(loop_scope="module")
RECORD = SpeculationRecord(
    num_steps=4,
    num_spec_steps=3,
    num_draft_tokens=9,
    num_accepted_draft_tokens=6,
    acceptance_histogram=(0, 1, 1, 1),
    mean_batch_size=1.5,
    num_hits=2,
    num_misses=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a verifier does with every session.

    Attributes:
        tokens: Commits these; None: letters that depend on all that was committed before, as `following` draws them.
        step_len: Tokens a step.
        stop_after: Commits the end token after that many tokens.
        pause_after: Waits after that many tokens for `ScriptedVerifier.resume`.
        fail_after: Raises `error` after that many tokens.
        error: What is raised then.
        lossy: Says that a lossy acceptance rule had a part in it.
        own_origin: Says that the last token of each step came about so, and that those before it are accepted drafts;
            None: says nothing.
        gap: Says that so many tokens more were committed before each step than were.
        records: Tells with each step what speculation has done: four draft tokens a step, of which two matched.
    """

    tokens: tuple[int, ...] | None = None
    step_len: int = 3
    stop_after: int | None = None
    pause_after: int | None = None
    fail_after: int | None = None
    error: BaseException | None = None
    lossy: bool = False
    own_origin: TokenOrigin | None = None
    gap: int = 0
    records: bool = False

    def record(self, num_steps: int) -> SpeculationRecord | None:
        """Returns what it tells after so many steps."""
        if not self.records:
            return None
        return SpeculationRecord(
            num_steps=num_steps,
            num_spec_steps=num_steps,
            num_draft_tokens=4 * num_steps,
            num_accepted_draft_tokens=2 * num_steps,
            acceptance_histogram=(0, 0, num_steps),
            mean_batch_size=1.0,
        )

    def origins(self, num_tokens: int) -> bytes:
        """Returns what a step says of its tokens."""
        return b"" if self.own_origin is None else bytes([*[TokenOrigin.ACCEPTED] * (num_tokens - 1), self.own_origin])


def following(
    seed: int, prompt_token_ids: Sequence[int], committed_token_ids: Sequence[int], letter_ids: Sequence[int]
) -> Iterator[int]:
    """Yields the tokens that follow, for ever: each is drawn by a hash of the seed, the prompt and all before it.

    So whoever goes on with a token less, more or another one than was committed gets another text.
    """
    known = [len(prompt_token_ids), *prompt_token_ids, *committed_token_ids]
    digest = hashlib.sha256(struct.pack(f"<Q{len(known)}I", seed, *known))
    while True:
        token_id = letter_ids[int.from_bytes(digest.digest()[:8], "little") % len(letter_ids)]
        yield token_id
        digest.update(struct.pack("<I", token_id))


def _letter_ids(codec: TextCodec) -> list[int]:
    return [codec.encode(letter, field="letter", special_tokens=False, context_len=1)[0] for letter in ALPHABET]


class ScriptedVerifier(verifier_pb2_grpc.VerifierServicer):
    """Commits tokens that a test can foretell, as long as what it is told was committed is right."""

    def __init__(self, codec: TextCodec) -> None:
        self._letter_ids = _letter_ids(codec)
        self.begin_again()

    def begin_again(self) -> None:
        """Forgets its script and what it was asked for."""
        self.script = Script()
        self.requests: list[GenerateRequest] = []
        self.abandoned: asyncio.Queue[str] = asyncio.Queue()
        self.paused: asyncio.Queue[str] = asyncio.Queue()
        self._resumed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def resume(self, session_id: str) -> None:
        """Lets a paused session run on to its end."""
        self._resumed[session_id].set()

    def step(self, session_id: str) -> None:
        """Lets a paused session take one step; then it waits again."""
        self._resumed[session_id].set()
        self._resumed[session_id].clear()

    async def Verify(
        self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        async with aclosing(ScriptedLog(self._session).messages(request_iterator)) as messages:
            async for message in messages:
                yield message

    async def _session(self, generate: GenerateRequest) -> AsyncIterator[Step]:
        self.requests.append(generate)
        # Of the test that asked, which may have ended when the session does.
        abandoned = self.abandoned
        finished = False
        try:
            async for committed in self._run(generate):
                finished = committed.result is not None
                yield committed
        finally:
            if not finished:
                abandoned.put_nowait(generate.session_id)

    async def _run(self, generate: GenerateRequest) -> AsyncIterator[Step]:
        script = self.script
        at = len(generate.committed_token_ids)
        letters = following(
            generate.sampling.seed, generate.prompt_token_ids, generate.committed_token_ids, self._letter_ids
        )
        for judged in _judged(generate, script.step_len):
            yield judged
        for num_steps in count(1):
            if script.fail_after is not None and at >= script.fail_after and script.error is not None:
                raise script.error
            if script.pause_after is not None and at >= script.pause_after:
                self.paused.put_nowait(generate.session_id)
                await self._resumed[generate.session_id].wait()
            tokens = self._step(generate, at, letters)
            at += len(tokens)
            reason = self._finish_reason(generate, tokens, at)
            yield Step(
                token_ids=tuple(tokens),
                origins=script.origins(len(tokens)),
                logprobs=_logprobs(generate, tokens),
                result=None if reason is None else _result(generate, reason, at, script.record(num_steps)),
                lossy=script.lossy,
                offset=at - len(tokens) + script.gap,
                speculation=script.record(num_steps),
            )
            if reason is not None:
                return

    def _step(self, generate: GenerateRequest, at: int, letters: Iterator[int]) -> list[int]:
        script = self.script
        end = min(at + script.step_len, generate.sampling.max_tokens)
        if script.stop_after is not None:
            end = min(end, script.stop_after + 1)
        tokens = list(islice(letters, max(0, end - at)) if script.tokens is None else script.tokens[at:end])
        if script.stop_after is not None and end == script.stop_after + 1:
            tokens[-1] = EOS
        return tokens

    def _finish_reason(self, generate: GenerateRequest, tokens: list[int], at: int) -> FinishReason | None:
        if EOS in tokens or set(generate.sampling.stop_token_ids) & set(tokens):
            return FinishReason.STOP
        ended = self.script.tokens is not None and at >= len(self.script.tokens)
        return FinishReason.LENGTH if ended or at >= generate.sampling.max_tokens else None


def _logprobs(generate: GenerateRequest, tokens: list[int]) -> tuple[PositionLogprobs, ...]:
    num_top = generate.sampling.logprobs
    if num_top is None:
        return ()
    return tuple(
        PositionLogprobs(token_id=token, logprob=-0.5, top=tuple((token + k, -0.5 - k) for k in range(num_top)))
        for token in tokens
    )


def _judged(generate: GenerateRequest, step_len: int) -> Iterator[Step]:
    """Log probabilities of the prompt, so many in a message."""
    num_top = generate.sampling.prompt_logprobs or 0
    for start in range(1, 1 + generate.num_to_judge, step_len):
        logprobs = tuple(
            PositionLogprobs(token_id=token, logprob=-0.25, top=tuple((token + k, -0.25 - k) for k in range(num_top)))
            for token in generate.prompt_token_ids[start : start + step_len]
        )
        yield Step(token_ids=(), prompt_logprobs=logprobs, prompt_offset=start)


def _result(
    generate: GenerateRequest, reason: FinishReason, at: int, record: SpeculationRecord | None
) -> GenerateResult:
    return GenerateResult(
        finish_reason=reason,
        num_prompt_tokens=len(generate.prompt_token_ids),
        num_cached_tokens=2,
        num_generated_tokens=at - len(generate.committed_token_ids),
        speculation=record or RECORD,
        timings=Timings(queue_ns=1, prefill_ns=2, decode_ns=3),
    )


@dataclass(slots=True, kw_only=True)
class ScriptedFleet:
    """A started gateway with its verifiers and clients of all kinds."""

    codec: TextCodec
    store: MemoryStore
    verifiers: list[ScriptedVerifier]
    servers: list[GrpcServer]
    stop: asyncio.Event
    addresses: Addresses
    gateway: asyncio.Task[None]
    openai: AsyncOpenAI
    http: httpx.AsyncClient
    stub: gateway_pb2_grpc.GatewayAsyncStub

    @property
    def verifier(self) -> ScriptedVerifier:
        """The first verifier."""
        return self.verifiers[0]

    def begin_again(self) -> None:
        """Makes it ready for the next test of a file that shares it."""
        for verifier in self.verifiers:
            verifier.begin_again()

    def letters(self, seed: int, num_tokens: int, prompt: str | Sequence[int] = "x") -> str:
        """Returns the text that a verifier without a script of tokens commits after a prompt."""
        return self.codec.decode(self.letter_ids(seed, num_tokens, prompt))

    def letter_ids(self, seed: int, num_tokens: int, prompt: str | Sequence[int] = "x") -> list[int]:
        """Returns the tokens that a verifier without a script of tokens commits after a prompt."""
        if isinstance(prompt, str):
            prompt = self.codec.encode(prompt, field="prompt", special_tokens=True, context_len=CONTEXT_LEN)
        return list(islice(following(seed, prompt, (), _letter_ids(self.codec)), num_tokens))

    async def announce(self, *replicas: Replica) -> None:
        """Puts replicas into the registry for the time of a test."""
        for replica in replicas:
            await self.store.announce(replica, 3600)


def identity(codec: TextCodec, **changes: Any) -> ModelIdentity:
    """Returns the identity of the scripted model."""
    values: dict[str, Any] = {
        "name": MODEL,
        "vocab_hash": codec.vocab_hash or "tiny-vocabulary",
        "vocab_size": codec.vocab_size,
        "context_len": CONTEXT_LEN,
        "eos_token_ids": (EOS,),
    }
    return ModelIdentity(**{**values, **changes})


@asynccontextmanager
async def scripted_fleet(
    folder: Path,
    *,
    num_verifiers: int = 1,
    own: ModelDefaults = NO_DEFAULTS,
    template: str = tiny_tokenizer.CHAT_TEMPLATE,
    context_len: int = CONTEXT_LEN,
    **settings: Any,
) -> AsyncIterator[ScriptedFleet]:
    """Starts verifiers and a gateway on free ports; `settings` are fields of `GatewayConfig`."""
    codec = TextCodec.from_folder(tiny_tokenizer.save_folder(folder / MODEL, chat_template=template))
    store = MemoryStore()
    verifiers, servers = await _start_verifiers(codec, store, num_verifiers, context_len)
    stop = asyncio.Event()
    gateway, addresses = await start_gateway(codec, store, stop, settings, own)
    try:
        async with (
            # Reading certificates takes longer than most tests.
            httpx.AsyncClient(
                base_url=f"http://{addresses.http}", timeout=WAIT_S, trust_env=False, verify=False
            ) as http,
            AsyncOpenAI(
                base_url=f"http://{addresses.http}/v1",
                api_key="none",
                max_retries=0,
                http_client=DefaultAsyncHttpxClient(verify=False, trust_env=False),
            ) as openai,
            grpc.aio.insecure_channel(addresses.grpc) as channel,
        ):
            yield ScriptedFleet(
                codec=codec,
                store=store,
                verifiers=verifiers,
                servers=servers,
                stop=stop,
                addresses=addresses,
                gateway=gateway,
                openai=openai,
                http=http,
                stub=gateway_pb2_grpc.GatewayStub(channel),
            )
    finally:
        stop.set()
        await gateway
        for server in servers:
            await server.stop(0)


@asynccontextmanager
async def joining_gateway(fleet: ScriptedFleet, **settings: Any) -> AsyncIterator[str]:
    """A second gateway before the same verifiers and store; yields its gRPC address."""
    async with joining_doors(fleet, **settings) as addresses:
        yield addresses.grpc


@asynccontextmanager
async def joining_doors(fleet: ScriptedFleet, **settings: Any) -> AsyncIterator[Addresses]:
    """The same; yields both addresses."""
    stop = asyncio.Event()
    gateway, addresses = await start_gateway(fleet.codec, fleet.store, stop, settings)
    try:
        yield addresses
    finally:
        stop.set()
        await gateway


async def start_gateway(
    codec: TextCodec,
    store: MemoryStore,
    stop: asyncio.Event,
    settings: dict[str, Any],
    own: ModelDefaults = NO_DEFAULTS,
) -> tuple[asyncio.Task[None], Addresses]:
    """Starts a gateway on free ports; setting `stop` ends it."""
    defaults = {
        "model": (),
        "port": 0,
        "grpc_port": 0,
        "refresh_s": 0.05,
        "grace_s": 5.0,
        "failover_s": 0.0,
        "record_interval_s": 0.05,
    }
    config = GatewayConfig(**{**defaults, **settings})
    ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    gateway = asyncio.create_task(serve(config, store, {MODEL: codec}, stop, ready.set_result, {MODEL: own}))
    either: set[asyncio.Future[Any]] = {gateway, ready}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if gateway.done():
        gateway.result()
    return gateway, ready.result()


async def verifier_server(verifier: ScriptedVerifier, port: int = 0) -> GrpcServer:
    """Lets a verifier listen; port 0 picks a free one."""
    return await start_grpc_server(
        host="127.0.0.1",
        port=port,
        add_servicers=partial(verifier_pb2_grpc.add_VerifierServicer_to_server, verifier),
        service_names=["paceline.rpc.v1.Verifier"],
    )


async def _start_verifiers(
    codec: TextCodec, store: MemoryStore, num_verifiers: int, context_len: int
) -> tuple[list[ScriptedVerifier], list[GrpcServer]]:
    verifiers: list[ScriptedVerifier] = []
    servers: list[GrpcServer] = []
    for index in range(num_verifiers):
        verifier = ScriptedVerifier(codec)
        server = await verifier_server(verifier)
        replica = Replica(
            replica_id=f"verifier-{index}",
            role="verifier",
            address=server.address,
            identity=identity(codec, context_len=context_len),
            max_sessions=8,
        )
        await store.announce(replica, 3600)
        verifiers.append(verifier)
        servers.append(server)
    return verifiers, servers

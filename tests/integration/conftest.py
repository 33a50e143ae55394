"""A scripted gateway for a file, and the verifier and drafter services on them, in this process, on loopback ports."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.messages import DRAFTER, GATEWAY, VERIFIER
from paceline.core.params import DRAFT_MODEL, NGRAM
from paceline.core.target_events import TargetLimits
from paceline.drafter.drafter_host import DraftHost
from paceline.drafter.servicer import DrafterServicer
from paceline.drafting.model_free import NgramSource
from paceline.engine.decoder import Decoder
from paceline.engine.draft_scheduler import DraftLimits
from paceline.engine.drafter import DraftEngine
from paceline.engine.eagle3 import draft_identity, load_draft, load_fusion, states_hash
from paceline.engine.grammar import Grammars
from paceline.engine.loading import load_decoder, model_identity
from paceline.engine.target import TargetEngine
from paceline.obs.metrics import DrafterMetrics, VerifierMetrics
from paceline.obs.tracing import OFF, Tracer
from paceline.rpc.v1 import drafter_pb2_grpc, verifier_pb2_grpc
from paceline.service.credentials import FleetTls, folder_of, load_tls, only_for
from paceline.service.learned import NO_STATE, TunedState
from paceline.service.process import start_grpc_server
from paceline.store.base import Replica
from paceline.verifier import config
from paceline.verifier.served import ServedEngine
from paceline.verifier.servicer import VerifierServicer
from paceline.verifier.verifier_host import TargetHost
from tests.support.log_stream import VerifierCalls, verifier_calls
from tests.support.poison import Poison
from tests.support.scripted_fleet import ScriptedFleet, scripted_fleet

LOOK_UP = (DRAFT_MODEL, NGRAM)
MAX_MODEL_LEN = 256
MAX_QUEUE = 4
NUM_PAGES, MAX_ROWS = 128, 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway_of_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ScriptedFleet]:
    """A gateway before scripted verifiers, with the settings that the file names `GATEWAY`."""
    settings = getattr(request.module, "GATEWAY", {})
    async with scripted_fleet(tmp_path_factory.mktemp("gateway"), **settings) as started:
        yield started


@pytest.fixture
def fleet(gateway_of_file: ScriptedFleet) -> ScriptedFleet:
    """The gateway of the file with verifiers that know of no other test; see `SHARES_A_GATEWAY`."""
    gateway_of_file.begin_again()
    return gateway_of_file


@pytest_asyncio.fixture(loop_scope="module")
async def fresh_fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ScriptedFleet]:
    """One like `fleet` for a single test, which counts or breaks something."""
    async with scripted_fleet(tmp_path, **getattr(request.module, "GATEWAY", {})) as started:
        yield started


def guarded(tls: FleetTls | None, client_role: str) -> dict[str, Any]:
    """What makes a server ask for certificates, as `serve_model` does."""
    if tls is None:
        return {}
    return {"credentials": tls.server_credentials(), "interceptors": [only_for(client_role)]}


@asynccontextmanager
async def running_verifier(
    folder: Path,
    methods: Sequence[str] = LOOK_UP,
    max_num_seqs: int = 4,
    tls_dir: Path | None = None,
    eagle3_model: Path | None = None,
    poison: Poison | None = None,
) -> AsyncIterator[tuple[VerifierCalls, TargetHost]]:
    """A verifier service and a stream to call it; `tls_dir` is a folder as `paceline dev-ca` makes it."""
    async with (
        verifier_at(folder, methods, max_num_seqs, tls_dir, eagle3_model, poison=poison) as (address, host),
        verifier_calls(address, host.identity.vocab_size, tls_dir) as calls,
    ):
        yield calls, host


def know(host: TargetHost, *addresses: str) -> None:
    """From now on the verifier pairs with these drafters, as if the registry had named them."""
    host.drafters.know(
        [Replica(replica_id=each, role=DRAFTER, address=each, identity=host.identity) for each in addresses]
    )


@asynccontextmanager
async def verifier_at(
    folder: Path,
    methods: Sequence[str] = LOOK_UP,
    max_num_seqs: int = 4,
    tls_dir: Path | None = None,
    eagle3_model: Path | None = None,
    tracer: Tracer = OFF,
    poison: Poison | None = None,
    grammars: Grammars | None = None,
    policy: Goodput | None = None,
    learned: TunedState | None = None,
) -> AsyncIterator[tuple[str, TargetHost]]:
    """A verifier service, whose engine some prompts may poison; yields its address.

    Args:
        learned: Where it keeps what it learns; it rehearses then.
    """
    tls = load_tls(folder_of(tls_dir, VERIFIER), VERIFIER)
    handed_out = "" if eagle3_model is None else states_hash(eagle3_model)
    identity = replace(
        model_identity(folder, "tiny"), states_hash=handed_out, methods=tuple(methods), context_len=MAX_MODEL_LEN
    )

    def target_decoder() -> Decoder:
        decoder = load_decoder(folder, "float32", "cpu", 1)
        if eagle3_model is not None:
            decoder.keep_states(load_fusion(eagle3_model, decoder))
        return decoder if poison is None else poison.into(decoder)

    served = ServedEngine(
        identity=identity,
        grammars=grammars,
        max_num_seqs=max_num_seqs,
        learned=learned or NO_STATE,
        rehearsal=config.NEVER if learned is None else config.IDLE,
        max_rows=MAX_ROWS,
        make=lambda: TargetEngine(
            decoder=target_decoder(),
            identity=identity,
            num_blocks=NUM_PAGES,
            limits=TargetLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=MAX_ROWS),
            policy=policy or FixedGamma(gamma=4),
            clock=time.monotonic,
            sources=[NgramSource()] if NGRAM in methods else [],
        ),
    )
    async with served_verifier(served, tls=tls, tracer=tracer) as running:
        yield running


@asynccontextmanager
async def served_verifier(
    served: ServedEngine, *, max_queue: int = MAX_QUEUE, tls: FleetTls | None = None, tracer: Tracer = OFF
) -> AsyncIterator[tuple[str, TargetHost]]:
    """A verifier service with an engine; yields its address."""
    host = TargetHost(
        served,
        max_queue=max_queue,
        grace_s=30.0,
        stream_interval_s=0.1,
        stall_s=20.0,
        metrics=VerifierMetrics(CollectorRegistry(), "tiny"),
        tls=tls,
        tracer=tracer,
    )
    await host.engine.start()
    server = await start_grpc_server(
        host="127.0.0.1",
        port=0,
        add_servicers=lambda it: verifier_pb2_grpc.add_VerifierServicer_to_server(VerifierServicer(host), it),
        service_names=["paceline.rpc.v1.Verifier"],
        **guarded(tls, GATEWAY),
    )
    try:
        yield server.address, host
    finally:
        await server.stop(0)
        await host.close()


@asynccontextmanager
async def running_drafter(
    folder: Path, port: int = 0, tls_dir: Path | None = None, target: Path | None = None, tracer: Tracer = OFF
) -> AsyncIterator[tuple[str, DraftHost]]:
    """A drafter service, of a head for the target if one is given; yields its address."""
    identity = draft_identity(folder, target, "tiny-drafter", "float32", "cpu")
    host = DraftHost(
        identity=identity,
        max_sessions=8,
        make_engine=lambda: DraftEngine(
            decoder=load_draft(folder, target, "float32", "cpu", 1),
            identity=identity,
            num_blocks=128,
            limits=DraftLimits(width=2, max_rows=8, max_rows_per_session=2, max_num_batched_tokens=64, max_num_seqs=8),
            clock=time.monotonic,
        ),
        metrics=DrafterMetrics(CollectorRegistry(), "tiny"),
        tracer=tracer,
    )
    await host.engine.start()
    server = await start_grpc_server(
        host="127.0.0.1",
        port=port,
        add_servicers=lambda it: drafter_pb2_grpc.add_DrafterServicer_to_server(DrafterServicer(host), it),
        service_names=["paceline.rpc.v1.Drafter"],
        **guarded(load_tls(folder_of(tls_dir, DRAFTER), DRAFTER), VERIFIER),
    )
    try:
        yield server.address, host
    finally:
        await server.stop(0)
        await host.close()

"""Starts a drafter: `python -m paceline.drafter --model FOLDER`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from paceline.config import loggable, parse
from paceline.core.errors import UnavailableError
from paceline.core.messages import ModelIdentity, OpenSession
from paceline.core.params import SamplingParams
from paceline.drafter.config import DrafterConfig
from paceline.drafter.host import DraftHost
from paceline.drafter.servicer import DrafterServicer
from paceline.drafting.draft_model import DraftEngine, DraftLimits, VerifierLeft, VerifierSaid
from paceline.engine.decoder import load_decoder
from paceline.engine.identity import model_identity
from paceline.engine.process import prepare_process
from paceline.obs.log import setup_logging
from paceline.obs.metrics import DrafterMetrics, start_metrics_server
from paceline.rpc.v1 import drafter_pb2_grpc
from paceline.serving import grpc_server, run, until_stopped
from paceline.store.announcer import announced
from paceline.store.base import Replica, Store, open_store, require

logger = logging.getLogger(__name__)

PROG = "paceline drafter"
SERVICE = "paceline.rpc.v1.Drafter"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `paceline drafter`."""
    arguments = sys.argv[1:] if argv is None else argv
    config = parse(DrafterConfig, arguments, os.environ, PROG, "Runs a draft model and grows draft trees.")
    setup_logging("drafter")
    run(serve(config), prog=PROG)


async def serve(config: DrafterConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        ConfigError: A setting, the checkpoint, a port or the registry makes serving impossible.
        Exception: Whatever broke the engine.
    """
    logger.info("starting", extra=loggable(config))
    prepare_process(config.cpus)
    identity = model_identity(config.model, config.model_name)
    registry = CollectorRegistry()
    host = DraftHost(
        identity=identity,
        make_engine=lambda: make_engine(config, identity),
        metrics=DrafterMetrics(registry),
    )
    async with open_store(config.redis_url) as store:
        await require(store)
        with start_metrics_server(registry, config.host, config.metrics_port):
            await _serve_host(config, host, store)


async def _serve_host(config: DrafterConfig, host: DraftHost, store: Store) -> None:
    async with grpc_server(
        host=config.host,
        port=config.port,
        add_servicers=lambda it: drafter_pb2_grpc.add_DrafterServicer_to_server(DrafterServicer(host), it),
        service_names=[SERVICE],
    ) as server:

        def replica() -> Replica:
            return Replica(
                replica_id=config.replica_id or f"drafter-{server.address}",
                role="drafter",
                address=server.address,
                identity=host.identity,
                max_sessions=config.max_num_seqs,
                num_sessions=host.num_sessions,
            )

        await host.start()
        try:
            await server.ready()
            async with announced(store, replica):
                await until_stopped(host.engine_ended())
            await server.drain()
            host.end_streams(UnavailableError("this drafter shuts down"))
            await server.stop(1.0)
        finally:
            await host.close()


def make_engine(config: DrafterConfig, identity: ModelIdentity) -> DraftEngine:
    """Loads the model and grows one tree, so that the first session finds everything compiled."""
    decoder = load_decoder(config.model, config.dtype, config.device, config.threads)
    engine = DraftEngine(
        decoder=decoder,
        identity=identity,
        num_blocks=config.num_kv_blocks,
        limits=DraftLimits(
            width=config.draft_width,
            max_rows=config.draft_rows,
            max_rows_per_session=config.draft_rows_per_session,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        ),
        clock=time.monotonic,
    )
    warm_up(engine)
    logger.info("model is ready", extra={"weight_bytes": decoder.weight_bytes, "model": identity.name})
    return engine


def warm_up(engine: DraftEngine) -> None:
    """Grows a greedy and a sampled tree of a few nodes."""
    for index, temperature in enumerate((0.0, 0.8)):
        opened = OpenSession(
            session_id=f"warm-up-{index}",
            epoch=0,
            token_ids=(0,),
            prompt_len=1,
            sampling=SamplingParams(max_tokens=8, temperature=temperature, top_p=0.9),
            price=0.0,
            room=8,
        )
        engine.handle(VerifierSaid(link=0, messages=[opened]))
    while engine.has_work():
        engine.step()
    engine.handle(VerifierLeft(link=0))


if __name__ == "__main__":
    main()

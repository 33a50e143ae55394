"""Starts a drafter: `python -m paceline.drafter --model FOLDER`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry

from paceline.checkpoints.families import is_eagle3
from paceline.checkpoints.source import fetched
from paceline.core.draft_scheduler import DraftLimits
from paceline.core.messages import DRAFTER, ModelIdentity
from paceline.core.pages import LEAST_PAGES, draft_scratch_blocks
from paceline.drafter.config import DrafterConfig
from paceline.drafter.drafter_host import DraftHost
from paceline.drafter.servicer import DrafterServicer
from paceline.drafting.checkpoint import DraftCheckpoint, warm_up
from paceline.engine.drafter import DraftEngine
from paceline.engine.memory import draft_page_bytes, log_memory, model_needs, plan_service
from paceline.engine.process import prepare_process, yield_cpus
from paceline.model_service import HOST_PAGES, serve_model, traces_of
from paceline.obs.families import service_registry
from paceline.obs.log import setup_logging
from paceline.obs.metrics import DrafterMetrics
from paceline.obs.tracing import Tracer
from paceline.rpc.v1 import drafter_pb2_grpc
from paceline.service.config import loggable, parse
from paceline.service.credentials import load_tls
from paceline.service.process import run

logger = logging.getLogger(__name__)

PROG = "paceline drafter"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `paceline drafter`."""
    arguments = sys.argv[1:] if argv is None else argv
    config = parse(DrafterConfig, arguments, os.environ, PROG, "Runs a draft model and grows draft trees.")
    setup_logging("drafter")
    run(serve(fetched(config, PROG, "model", "target_model")), prog=PROG)


async def serve(config: DrafterConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        ConfigError: A setting, the checkpoint, a port or the registry makes serving impossible.
        Exception: Whatever broke the engine.
    """
    logger.info("starting", extra=loggable(config))
    registry = service_registry(DRAFTER)
    # A drafter follows its verifiers and begins no trace.
    async with traces_of(config, DRAFTER, registry, sample_ratio=0.0) as tracer:
        await _serve(config, registry, tracer)


async def _serve(config: DrafterConfig, registry: CollectorRegistry, tracer: Tracer) -> None:
    tls = load_tls(config.tls_dir, DRAFTER)
    prepare_process(config.cpus)
    identity = checkpoint_of(config).identity()
    config = with_memory(config, identity)
    host = DraftHost(
        identity=identity,
        make_engine=lambda: make_engine(config, identity),
        metrics=DrafterMetrics(registry, identity.name),
        tracer=tracer,
    )
    await serve_model(
        host,
        config,
        role=DRAFTER,
        service_name="paceline.rpc.v1.Drafter",
        add_servicer=lambda server: drafter_pb2_grpc.add_DrafterServicer_to_server(DrafterServicer(host), server),
        registry=registry,
        tls=tls,
    )


def checkpoint_of(config: DrafterConfig) -> DraftCheckpoint:
    """What this drafter drafts with."""
    return DraftCheckpoint(
        folder=config.model,
        target=config.target_model,
        name=config.model_name,
        dtype=config.dtype,
        device=config.device,
    )


def with_memory(config: DrafterConfig, identity: ModelIdentity) -> DrafterConfig:
    """Returns the settings with a number of pages that fits; a head has one layer, for which any number does.

    Raises:
        ConfigError: None fits; says by how much and what to change.
    """
    if is_eagle3(config.model):
        return replace(config, num_kv_blocks=config.num_kv_blocks or HOST_PAGES[DRAFTER])
    needs = model_needs(config.model, config.dtype, config.device)
    plan = plan_service(
        config,
        [needs],
        page_bytes=draft_page_bytes(needs.page_bytes),
        scratch_bytes=0,
        context_len=identity.context_len,
        host_pages=HOST_PAGES[DRAFTER],
        least_pages=LEAST_PAGES,
    )
    return replace(config, num_kv_blocks=plan.num_pages)


def make_engine(config: DrafterConfig, identity: ModelIdentity) -> DraftEngine:
    """Loads the model and grows one tree, so that the first session finds everything compiled."""
    decoder = checkpoint_of(config).load(config.threads)
    engine = DraftEngine(
        decoder=decoder,
        identity=identity,
        num_blocks=config.num_pages,
        limits=DraftLimits(
            width=config.draft_width,
            max_rows=config.draft_rows,
            max_rows_per_session=config.draft_rows_per_session,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        ),
        clock=time.monotonic,
    )
    decoder.prepare(config.max_num_batched_tokens)
    warm_up(engine, decoder.feature_width)
    logger.info("model is ready", extra={"weight_bytes": decoder.weight_bytes, "model": identity.name})
    log_memory(
        decoder,
        num_blocks=config.num_pages,
        num_scratch_blocks=draft_scratch_blocks(config.num_pages),
    )
    if config.idle_priority:
        yield_cpus()
    return engine


if __name__ == "__main__":
    main()

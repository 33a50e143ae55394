"""Starts a drafter: `python -m paceline.drafter --model FOLDER`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from paceline.checkpoints.source import fetched
from paceline.core.messages import DRAFTER, ModelIdentity
from paceline.drafter.config import SIMULATED, DrafterConfig
from paceline.drafter.drafter_host import DraftHost
from paceline.drafter.servicer import DrafterServicer
from paceline.engine.drafter import DraftEngine
from paceline.model_service import refuse_settings, serve_model, traces_of
from paceline.obs.log import setup_logging
from paceline.obs.metrics import DrafterMetrics, service_registry
from paceline.obs.tracing import Tracer
from paceline.rpc.v1 import drafter_pb2_grpc
from paceline.service.config import loggable, parse
from paceline.service.credentials import load_tls
from paceline.service.process import run

logger = logging.getLogger(__name__)

PROG = "paceline drafter"
# Our settings that a simulated drafter's profile decides.
NOT_FOR_SIMULATED = {
    "max_num_seqs": "max_sessions of the profile's drafter",
    "max_num_batched_tokens": "max_rows of the profile's drafter",
    "draft_width": "draft_width of the profile's drafter",
    "draft_rows": "draft_rows of the profile's drafter",
    "draft_rows_per_session": "draft_rows_per_session of the profile's drafter",
}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    config = parse(DrafterConfig, arguments, os.environ, PROG, "Runs a draft model and grows draft trees.")
    setup_logging("drafter")
    run(serve(fetched(config, PROG, "model", "target_model")), prog=PROG)


async def serve(config: DrafterConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        ConfigError: A setting, the checkpoint, a port or the registry makes serving impossible.
        Exception: The error that broke the engine.
    """
    logger.info("starting", extra=loggable(config))
    registry = service_registry(DRAFTER)
    # A drafter follows its verifiers and begins no trace.
    async with traces_of(config, DRAFTER, sample_ratio=0.0) as tracer:
        await _serve(config, registry, tracer)


async def _serve(config: DrafterConfig, registry: CollectorRegistry, tracer: Tracer) -> None:
    tls = load_tls(config.tls_dir, DRAFTER)
    identity, max_sessions, make_engine = _engine(config)
    host = DraftHost(
        identity=identity,
        max_sessions=max_sessions,
        make_engine=make_engine,
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


def _engine(config: DrafterConfig) -> tuple[ModelIdentity, int, Callable[[], DraftEngine]]:
    """Returns the model, the most sessions, and what makes the engine; what the other one needs is not imported."""
    if config.engine == SIMULATED:
        return _simulated_engine(config)
    from paceline.drafter.own_engine import own_engine

    identity, make = own_engine(config)
    return identity, config.max_num_seqs, make


def _simulated_engine(config: DrafterConfig) -> tuple[ModelIdentity, int, Callable[[], DraftEngine]]:
    """Returns the real engine and scheduler, with a model on a simulated device that takes its time."""
    from paceline.simulated.model import Simulation, num_pages

    refuse_settings(config, SIMULATED, NOT_FOR_SIMULATED)
    simulation = Simulation.of(config.profile, config.model, config.acceptance)
    identity, facts = simulation.identity(config.model_name), simulation.profile.drafter
    pages = num_pages(facts, config.num_kv_blocks)

    def make() -> DraftEngine:
        return simulation.draft_engine(facts, identity, num_blocks=pages)

    return identity, facts.max_sessions, make


if __name__ == "__main__":
    main()

"""Starts a verifier: `python -m paceline.verifier --model FOLDER`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from prometheus_client import CollectorRegistry

from paceline.checkpoints.source import fetched
from paceline.core.messages import VERIFIER
from paceline.model_service import serve_model, traces_of
from paceline.obs.log import setup_logging
from paceline.obs.metrics import VerifierMetrics, service_registry
from paceline.obs.tracing import Tracer
from paceline.rpc.v1 import verifier_pb2_grpc
from paceline.service.config import loggable, parse
from paceline.service.credentials import load_tls
from paceline.service.process import run
from paceline.verifier.config import SIMULATED, VLLM, VerifierConfig
from paceline.verifier.served import ServedEngine
from paceline.verifier.servicer import VerifierServicer
from paceline.verifier.verifier_host import TargetHost

logger = logging.getLogger(__name__)

PROG = "paceline verifier"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    config = parse(VerifierConfig, arguments, os.environ, PROG, "Runs a target model and verifies draft trees.")
    setup_logging("verifier")
    run(serve(fetched(config, PROG, "model")), prog=PROG)


async def serve(config: VerifierConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        ConfigError: A setting, the checkpoint, a port or the registry makes serving impossible.
        Exception: The error that ended the engine.
    """
    logger.info("starting", extra=loggable(config))
    registry = service_registry(VERIFIER)
    async with traces_of(config, VERIFIER, sample_ratio=config.trace_sample_ratio) as tracer:
        await _serve(config, registry, tracer)


async def _serve(config: VerifierConfig, registry: CollectorRegistry, tracer: Tracer) -> None:
    tls = load_tls(config.tls_dir, VERIFIER)
    with _engine(config) as served:
        host = TargetHost(
            served,
            max_queue=config.max_queue,
            grace_s=config.grace_s,
            stream_interval_s=config.stream_interval_s,
            stall_s=config.engine_stall_s,
            metrics=VerifierMetrics(registry, served.identity.name),
            zone=config.zone,
            tls=tls,
            tracer=tracer,
        )
        servicer = VerifierServicer(host)
        await serve_model(
            host,
            config,
            role=VERIFIER,
            service_name="paceline.rpc.v1.Verifier",
            add_servicer=lambda server: verifier_pb2_grpc.add_VerifierServicer_to_server(servicer, server),
            registry=registry,
            background=host.background,
            prepared=host.prepared,
            stall_s=lambda: host.stall_s,
            tls=tls,
        )


def _engine(config: VerifierConfig) -> AbstractContextManager[ServedEngine]:
    """Returns the chosen engine; what others need is not imported."""
    if config.engine == VLLM:
        from paceline.verifier.vllm.launch import vllm_engine

        return vllm_engine(config)
    if config.engine == SIMULATED:
        from paceline.verifier.simulated_engine import simulated_engine

        return nullcontext(simulated_engine(config))
    from paceline.verifier.own_engine import own_engine

    return nullcontext(own_engine(config))


if __name__ == "__main__":
    main()

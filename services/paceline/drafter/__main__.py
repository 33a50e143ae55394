"""Starts a drafter: `python -m paceline.drafter --model FOLDER`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from paceline.config import loggable, parse
from paceline.core.errors import ConfigError
from paceline.core.messages import DRAFTER, CommittedStates, ModelIdentity, OpenSession, ToDrafter
from paceline.core.params import SamplingParams
from paceline.credentials import load_tls
from paceline.drafter.config import DrafterConfig
from paceline.drafter.host import DraftHost
from paceline.drafter.servicer import DrafterServicer
from paceline.drafting.draft_model import DraftEngine, DraftLimits, VerifierLeft, VerifierSaid
from paceline.engine.budget import draft_scratch_blocks
from paceline.engine.decoder import Decoder, load_decoder
from paceline.engine.eagle3 import head_identity, load_eagle3
from paceline.engine.identity import model_identity
from paceline.engine.process import prepare_process
from paceline.heads import is_eagle3
from paceline.hosting import log_memory, serve_model
from paceline.obs.log import setup_logging
from paceline.obs.metrics import DrafterMetrics
from paceline.rpc.v1 import drafter_pb2_grpc
from paceline.serving import run

logger = logging.getLogger(__name__)

PROG = "paceline drafter"


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
    tls = load_tls(config.tls_dir, DRAFTER)
    prepare_process(config.cpus, idle=config.idle_priority)
    identity = drafter_identity(config)
    registry = CollectorRegistry()
    host = DraftHost(
        identity=identity,
        make_engine=lambda: make_engine(config, identity),
        metrics=DrafterMetrics(registry),
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


def drafter_identity(config: DrafterConfig) -> ModelIdentity:
    """What this drafter announces.

    Raises:
        ConfigError: A folder is missing, or is no checkpoint that can be served.
    """
    if not is_eagle3(config.model):
        return model_identity(config.model, config.model_name, config.dtype)
    return head_identity(config.model, _target_of(config), config.model_name, config.dtype)


def load_drafting_decoder(config: DrafterConfig) -> Decoder:
    """The draft model, or the EAGLE-3 head.

    Raises:
        ConfigError: As `drafter_identity`, or a setting that does not fit the machine.
    """
    rest = (config.dtype, config.device, config.threads)
    if not is_eagle3(config.model):
        return load_decoder(config.model, *rest)
    return load_eagle3(config.model, _target_of(config), *rest)


def _target_of(config: DrafterConfig) -> Path:
    if config.target_model is None:
        raise ConfigError(f"--target-model: the EAGLE-3 head {config.model} needs the folder of its target")
    return config.target_model


def make_engine(config: DrafterConfig, identity: ModelIdentity) -> DraftEngine:
    """Loads the model and grows one tree, so that the first session finds everything compiled."""
    decoder = load_drafting_decoder(config)
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
    decoder.prepare(config.max_num_batched_tokens)
    warm_up(engine, decoder.feature_width)
    logger.info("model is ready", extra={"weight_bytes": decoder.weight_bytes, "model": identity.name})
    log_memory(
        decoder,
        num_blocks=config.num_kv_blocks,
        num_scratch_blocks=draft_scratch_blocks(config.num_kv_blocks),
    )
    return engine


def warm_up(engine: DraftEngine, feature_width: int = 0) -> None:
    """Grows a greedy and a sampled tree of a few nodes, for a head from a feature of zeros."""
    for index, temperature in enumerate((0.0, 0.8)):
        opened = OpenSession(
            session_id=f"warm-up-{index}",
            epoch=0,
            token_ids=(0, 0),
            prompt_len=2,
            sampling=SamplingParams(max_tokens=8, temperature=temperature, top_p=0.9),
            price=0.0,
            room=8,
        )
        messages: list[ToDrafter] = [opened]
        if feature_width:
            values = bytes(2 * feature_width)
            states = CommittedStates(session_id=opened.session_id, epoch=0, start=0, width=feature_width, values=values)
            messages.append(states)
        engine.handle(VerifierSaid(link=0, messages=messages))
    while engine.has_work():
        engine.step()
    engine.handle(VerifierLeft(link=0))


if __name__ == "__main__":
    main()

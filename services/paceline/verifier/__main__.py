"""Starts a verifier: `python -m paceline.verifier --model FOLDER`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry

from paceline.config import loggable, parse
from paceline.core.draft_scheduler import DraftLimits
from paceline.core.errors import ConfigError
from paceline.core.messages import VERIFIER, GenerateRequest, ModelIdentity
from paceline.core.pages import BLOCK_SIZE
from paceline.core.params import EAGLE3, SamplingParams, SpeculationParams
from paceline.core.step_time import StepMode
from paceline.core.target_events import Submit, TargetLimits
from paceline.credentials import load_tls
from paceline.drafting.checkpoint import DraftCheckpoint
from paceline.drafting.checkpoint import warm_up as warm_up_draft
from paceline.drafting.colocated import LOCAL, ColocatedEngine
from paceline.engine.budget import target_scratch_blocks
from paceline.engine.drafter import DraftEngine
from paceline.engine.eagle3 import states_hash
from paceline.engine.grammar import Grammars
from paceline.engine.identity import model_identity
from paceline.engine.loading import load_decoder
from paceline.engine.process import StepThreads, parse_cpus, prepare_process, until_quiet
from paceline.engine.ranks import Ranks
from paceline.engine.target import TargetEngine
from paceline.model_service import log_memory, serve_model, traces_of
from paceline.obs.families import service_registry
from paceline.obs.log import setup_logging
from paceline.obs.metrics import VerifierMetrics
from paceline.obs.tracing import Tracer
from paceline.rpc.v1 import verifier_pb2_grpc
from paceline.service_process import run
from paceline.verifier.config import Speculation, VerifierConfig, speculation_from
from paceline.verifier.learned import learned_file
from paceline.verifier.make_sources import make_sources
from paceline.verifier.ranks import Join, other_ranks
from paceline.verifier.servicer import VerifierServicer
from paceline.verifier.verifier_host import TargetHost

logger = logging.getLogger(__name__)

PROG = "paceline verifier"
# Drafters that load meanwhile get so many seconds before their CPUs are measured.
QUIET_MOST_S = 10.0
# The bound on an engine's silence holds so many full steps.
LEAST_STEPS = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `paceline verifier`."""
    arguments = sys.argv[1:] if argv is None else argv
    config = parse(VerifierConfig, arguments, os.environ, PROG, "Runs a target model and verifies draft trees.")
    setup_logging("verifier")
    run(serve(config), prog=PROG)


async def serve(config: VerifierConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        ConfigError: A setting, the checkpoint, a port or the registry makes serving impossible.
        Exception: Whatever broke the engine.
    """
    logger.info("starting", extra=loggable(config))
    registry = service_registry(VERIFIER)
    async with traces_of(config, VERIFIER, registry, sample_ratio=config.trace_sample_ratio) as tracer:
        await _serve(config, registry, tracer)


async def _serve(config: VerifierConfig, registry: CollectorRegistry, tracer: Tracer) -> None:
    tls = load_tls(config.tls_dir, VERIFIER)
    speculation = speculation_from(config.speculative_config)
    own_identity = model_identity(
        config.model, config.model_name, config.dtype, config.tensor_parallel_size, config.device
    )
    max_model_len = _max_model_len(config, own_identity)
    # What others may ask for is what fits here, not what the model could do.
    head = speculation.head
    identity = replace(
        own_identity,
        context_len=max_model_len,
        states_hash="" if head is None else states_hash(head),
        methods=speculation.methods,
        acceptance_rules=speculation.rules.names(speculation.methods),
    )
    grammars = _grammars(config, identity)
    with other_ranks(config, identity.weights_hash) as (own, join):
        prepare_process(own.cpus, spare_cpus=own.spare_cpus)
        host = TargetHost(
            identity=identity,
            max_model_len=max_model_len,
            max_queue=config.max_queue,
            max_num_seqs=config.max_num_seqs,
            grace_s=config.grace_s,
            stream_interval_s=config.stream_interval_s,
            methods=speculation.methods,
            own_drafter=LOCAL if speculation.own_draft is not None else "",
            rules=speculation.rules,
            grammars=grammars,
            learned=learned_file(own, identity, os.environ),
            make_engine=lambda: make_engine(own, identity, speculation, join),
            metrics=VerifierMetrics(registry),
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
            tls=tls,
        )


def _grammars(config: VerifierConfig, identity: ModelIdentity) -> Grammars | None:
    try:
        return Grammars(config.model, identity.vocab_size, identity.eos_token_ids)
    except ConfigError as error:
        logger.warning("%s", error)
        return None


def _max_model_len(config: VerifierConfig, identity: ModelIdentity) -> int:
    """Longest session that model and pages allow.

    Raises:
        ConfigError: `--max-model-len` is more than either allows.
    """
    paged = (config.num_kv_blocks - 1) * BLOCK_SIZE
    allowed = min(identity.context_len, paged)
    if config.max_model_len > allowed:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the model's {identity.context_len} tokens or "
            f"the {paged} tokens of --num-kv-blocks {config.num_kv_blocks} allow"
        )
    return config.max_model_len or allowed


def make_engine(
    config: VerifierConfig,
    identity: ModelIdentity,
    speculation: Speculation,
    join: Join,
) -> TargetEngine | ColocatedEngine:
    """Loads the model, once the ranks that share it are there, and the draft model if it runs here."""
    target = make_target_engine(config, identity, speculation, join())
    if speculation.own_draft is None:
        return target
    checkpoint = DraftCheckpoint(
        folder=speculation.own_draft, target=config.model, dtype=config.dtype, device=config.device
    )
    decoder, draft_identity = checkpoint.load(config.threads), checkpoint.identity()
    if not draft_identity.drafts_for(identity):
        raise ConfigError(f"--speculative-config: {draft_identity.name!r} cannot draft for {identity.name!r}")
    draft = DraftEngine(
        decoder=decoder,
        identity=draft_identity,
        num_blocks=config.num_kv_blocks,
        limits=DraftLimits(max_num_seqs=config.max_num_seqs),
        clock=time.monotonic,
    )
    decoder.prepare(config.max_num_batched_tokens)
    warm_up_draft(draft, decoder.feature_width)
    wants_states = draft_identity.draft_method == EAGLE3
    return ColocatedEngine(target, draft, wants_states=wants_states, clock=time.monotonic)


def make_target_engine(
    config: VerifierConfig, identity: ModelIdentity, speculation: Speculation, ranks: Ranks | None
) -> TargetEngine:
    """Loads the model and runs a few steps, so that the first request finds everything compiled."""
    decoder = load_decoder(config.model, config.dtype, config.device, config.threads, ranks)
    policy = speculation.draft_policy()
    engine = TargetEngine(
        decoder=decoder,
        identity=identity,
        num_blocks=config.num_kv_blocks,
        limits=TargetLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=identity.context_len,
        ),
        policy=policy,
        clock=time.monotonic,
        sources=make_sources(speculation, decoder),
        rules=speculation.rules,
        use_threads=StepThreads(config.threads, config.cpus, config.spare_cpus).use,
    )
    decoder.prepare(config.max_num_batched_tokens)
    warm_up(engine)
    drafting = engine.profile(StepMode.DRAFTING)
    if config.spare_cpus and not until_quiet(parse_cpus(config.spare_cpus), most_s=QUIET_MOST_S):
        logger.warning("the spare CPUs are busy; plain steps may be taken for slower than they are")
    plain = engine.profile(StepMode.PLAIN)
    _check_stall(config, max(plain.seconds[-1], drafting.seconds[-1]))
    policy.start_from(plain, drafting)
    learned_file(config, identity, os.environ).give_to(engine)
    logger.info(
        "model is ready",
        extra={
            "weight_bytes": decoder.weight_bytes,
            "model": identity.name,
            "step_ms": {rows: round(1e3 * s, 2) for rows, s in zip(plain.rows, plain.seconds, strict=True)},
        },
    )
    log_memory(
        decoder,
        num_blocks=config.num_kv_blocks,
        num_scratch_blocks=target_scratch_blocks(config.max_num_batched_tokens),
    )
    return engine


def _check_stall(config: VerifierConfig, step_s: float) -> None:
    """A full step may take a good part of the bound at most; attention over long contexts comes on top of it.

    Raises:
        ConfigError: Steps would be taken for hung.
    """
    least_s = LEAST_STEPS * step_s
    if least_s > config.engine_stall_s:
        raise ConfigError(
            f"--engine-stall-s: must be at least {least_s:.0f} s, {LEAST_STEPS} steps of --max-num-batched-tokens "
            f"{config.max_num_batched_tokens}, got {config.engine_stall_s:g} s"
        )


def warm_up(engine: TargetEngine) -> None:
    """Runs a greedy and a sampled session of a few tokens."""
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
    sampled = SamplingParams(
        max_tokens=8, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, frequency_penalty=0.1, ignore_eos=True
    )
    for index, sampling in enumerate((greedy, sampled)):
        request = GenerateRequest(
            session_id=f"warm-up-{index}",
            epoch=0,
            prompt_token_ids=(0,),
            sampling=sampling,
            speculation=SpeculationParams(enabled=False),
        )
        engine.handle(Submit(request=request, serial=index))
    while engine.has_work():
        engine.step()


if __name__ == "__main__":
    main()

"""Our own engine inside a verifier: checks its settings, loads the model and warms it up."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.checkpoints.families import is_eagle3
from paceline.checkpoints.source import folder_of
from paceline.core.acceptance import served_rules
from paceline.core.errors import ConfigError
from paceline.core.messages import VERIFIER, ModelIdentity
from paceline.core.pages import BLOCK_SIZE, LEAST_PAGES, target_scratch_blocks
from paceline.core.params import EAGLE3, MEDUSA, SOURCES, SpeculationParams
from paceline.core.target_events import TargetLimits
from paceline.engine.decoder import Decoder
from paceline.engine.draft_scheduler import DraftLimits
from paceline.engine.drafter import DraftEngine
from paceline.engine.eagle3 import draft_identity, load_draft, load_fusion, states_hash
from paceline.engine.grammar import Grammars
from paceline.engine.judging import READ_ROWS
from paceline.engine.loading import load_decoder, model_identity
from paceline.engine.memory import draft_page_bytes, log_memory, model_needs, pages_of_service
from paceline.engine.process import StepThreads, prepare_process
from paceline.engine.source_interface import AnySource, source_class
from paceline.engine.target import LOCAL, TargetEngine
from paceline.model_service import HOST_PAGES
from paceline.service.config import named
from paceline.service.learned import TunedState, kept_in
from paceline.verifier.config import NAME, TIER, Speculation, VerifierConfig, speculation_from
from paceline.verifier.served import (
    ALONE,
    GREEDY,
    NUM_FULL_STEPS,
    SAMPLED,
    ServedEngine,
    longest_served,
    warm_up,
)

logger = logging.getLogger(__name__)


def own_engine(config: VerifierConfig) -> ServedEngine:
    """Prepares this process for our engine.

    Raises:
        ConfigError: A setting or the checkpoint makes serving impossible.
    """
    speculation = _with_folders(speculation_from(config.speculative_config))
    with named("--model", config.model):
        own_identity = model_identity(
            config.model, config.model_name, config.dtype, config.device, max_model_len=config.max_model_len
        )
    config = replace(config, num_kv_blocks=_num_pages(config, own_identity.context_len, speculation))
    head = speculation.head
    identity = replace(
        own_identity,
        # Clients may ask for what fits here, which can be less than what the model allows.
        context_len=longest_served(config.max_model_len, own_identity.context_len, config.num_pages),
        states_hash="" if head is None else states_hash(head),
        methods=speculation.methods,
        acceptance_rules=served_rules(speculation.acceptance, speculation.methods),
    )
    prepare_process(config.cpus, spare_cpus=config.spare_cpus)
    return ServedEngine(
        identity=identity,
        own_drafter=LOCAL if speculation.own_draft is not None else "",
        default_rule=speculation.acceptance,
        grammars=_grammars(config, identity),
        max_num_seqs=limits_of(config).max_num_seqs,
        make=lambda: make_engine(config, identity, speculation),
        learned=learned_file(config, identity, os.environ),
        rehearsal=speculation.rehearsal(config.rehearse),
        max_rows=config.max_num_batched_tokens,
    )


def learned_file(config: VerifierConfig, identity: ModelIdentity, environ: Mapping[str, str]) -> TunedState:
    """The file in which a verifier with our engine keeps what it has learned on this machine.

    Args:
        config: Its settings; `learned_dir` names the folder.
        environ: Environment variables; XDG_CACHE_HOME says where caches are.
    """
    flags = (config.dtype, config.device, config.threads, config.cpus, config.spare_cpus)
    facts = (identity.arithmetic, identity.weights_hash, config.speculative_config, *flags)
    return kept_in(config.learned_dir, environ, *facts)


def _with_folders(speculation: Speculation) -> Speculation:
    """Fetches heads, and a draft model that runs in this process, if they are on the Hub."""
    keys = ("medusa_model", "eagle3_model", *(() if speculation.placement == TIER else ("model",)))
    folders: dict[str, Any] = {
        key: folder_of(given, f"{NAME} {key}") for key in keys if (given := getattr(speculation, key)) is not None
    }
    return replace(speculation, **folders)


def _num_pages(config: VerifierConfig, context_len: int, speculation: Speculation) -> int:
    """Returns how many pages of KV this process gets; planned before anything is loaded.

    Raises:
        ConfigError: It does not fit; says by how much, and what to change.
    """
    states = (speculation.head is not None) + (MEDUSA in speculation.methods)
    target = model_needs(config.model, config.dtype, config.device, state_width=states)
    models, page_bytes = [target], target.page_bytes
    # A head has one layer; its memory is not counted.
    if speculation.own_draft is not None and not is_eagle3(speculation.own_draft):
        draft = model_needs(speculation.own_draft, config.dtype, config.device)
        models, page_bytes = [target, draft], page_bytes + draft_page_bytes(draft.page_bytes)
    longest = min(config.max_model_len or context_len, context_len)
    return pages_of_service(
        config,
        models,
        page_bytes=page_bytes,
        scratch_bytes=target_scratch_blocks(config.max_num_batched_tokens) * target.page_bytes,
        # A row of each session is changed at a time, and few are read for log probabilities.
        copied_rows=min(config.max_num_batched_tokens, max(config.max_num_seqs, 2 * READ_ROWS)),
        context_len=longest,
        host_pages=HOST_PAGES[VERIFIER],
        least_pages=-(-longest // BLOCK_SIZE) + 1 if config.max_model_len else LEAST_PAGES,
    )


def _grammars(config: VerifierConfig, identity: ModelIdentity) -> Grammars | None:
    try:
        return Grammars(config.model, identity.vocab_size, identity.eos_token_ids)
    except ConfigError as error:
        logger.warning("%s", error)
        return None


def make_engine(config: VerifierConfig, identity: ModelIdentity, speculation: Speculation) -> TargetEngine:
    """Loads the model, and the draft model if it runs here."""
    target = make_target_engine(config, identity, speculation)
    if speculation.own_draft is None:
        return target
    decoder = load_draft(speculation.own_draft, config.model, config.dtype, config.device, config.threads)
    of_draft = draft_identity(speculation.own_draft, config.model, dtype=config.dtype, device=config.device)
    if not of_draft.drafts_for(identity):
        raise ConfigError(f"--speculative-config: {of_draft.name!r} cannot draft for {identity.name!r}")
    draft = DraftEngine(
        decoder=decoder,
        identity=of_draft,
        num_blocks=config.num_pages,
        limits=DraftLimits(max_num_seqs=config.max_num_seqs),
        clock=time.monotonic,
    )
    decoder.prepare(config.max_num_batched_tokens, draft.cache, drafts=True)
    draft.warm_up()
    target.draft_inside(draft, wants_states=of_draft.draft_method == EAGLE3, draft_model=of_draft.name)
    return target


def limits_of(config: VerifierConfig) -> TargetLimits:
    """Bounds of our engine."""
    return TargetLimits(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens)


def make_target_engine(config: VerifierConfig, identity: ModelIdentity, speculation: Speculation) -> TargetEngine:
    """Loads the model and runs a few steps, so that the first request finds everything compiled."""
    decoder = load_decoder(config.model, config.dtype, config.device, config.threads)
    policy = speculation.draft_policy(shares_cores=bool(config.spare_cpus))
    engine = TargetEngine(
        decoder=decoder,
        identity=identity,
        num_blocks=config.num_pages,
        limits=limits_of(config),
        policy=policy,
        clock=time.monotonic,
        sources=make_sources(speculation, decoder),
        default_rule=speculation.acceptance,
        use_threads=StepThreads(config.threads, config.cpus, config.spare_cpus).use,
    )
    decoder.prepare(config.max_num_batched_tokens, engine.cache)
    warm_up(engine, (GREEDY, SAMPLED, *ALONE), SpeculationParams(enabled=False))
    cost = engine.profile()
    _warn_of_slow_steps(config, NUM_FULL_STEPS * engine.full_step_s)
    learned_file(config, identity, os.environ).load_into(engine)
    logger.info(
        "model is ready",
        extra={
            "weight_bytes": decoder.weight_bytes,
            "model": identity.name,
            "step_ms": {rows: round(1e3 * s, 2) for rows, s in zip(cost.rows, cost.seconds, strict=True)},
        },
    )
    needs = model_needs(config.model, config.dtype, config.device)
    log_memory(decoder.device, needs.weight_bytes, engine.cache.nbytes)
    return engine


def _warn_of_slow_steps(config: VerifierConfig, least_s: float) -> None:
    if least_s > config.engine_stall_s:
        logger.warning(
            "--engine-stall-s: %d steps of --max-num-seqs %d sessions take %.0f s here; the engine counts as hung "
            "after that instead of %g s; fewer sessions take less",
            NUM_FULL_STEPS,
            config.max_num_seqs,
            least_s,
            config.engine_stall_s,
        )


def make_sources(speculation: Speculation, decoder: Decoder) -> list[AnySource]:
    """Makes the sources inside the verifier, and has the target keep the states that drafts are made from.

    Raises:
        ConfigError: Heads or layers do not fit the target, or it cannot run layers alone.
    """
    sources = [source_class(name).make(speculation, decoder) for name in SOURCES if name in speculation.methods]
    if speculation.head is not None:
        decoder.keep_states(load_fusion(speculation.head, decoder))
    return sources

"""Our own engine inside a drafter: plans its memory, loads the model and warms it up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from paceline.checkpoints.families import is_eagle3
from paceline.core.messages import DRAFTER, ModelIdentity
from paceline.core.pages import LEAST_PAGES
from paceline.core.params import DRAFT_MODEL
from paceline.drafter.config import DrafterConfig
from paceline.engine import pending
from paceline.engine.draft_scheduler import DraftLimits
from paceline.engine.drafter import DraftEngine
from paceline.engine.eagle3 import draft_identity, load_draft
from paceline.engine.memory import draft_page_bytes, log_memory, model_needs, pages_of_service
from paceline.engine.process import prepare_process, then_yields_cpus
from paceline.forest import Forest, warm_up
from paceline.model_service import HOST_PAGES
from paceline.service.config import named

logger = logging.getLogger(__name__)


def own_engine(config: DrafterConfig) -> tuple[ModelIdentity, Callable[[], DraftEngine]]:
    """Prepares this process for our engine; returns what the model calls itself, and what loads it.

    Raises:
        ConfigError: A setting or the checkpoint makes serving impossible.
    """
    prepare_process(config.cpus)
    with named("--model", config.model):
        identity = draft_identity(config.model, config.target_model, config.model_name, config.dtype, config.device)
    config = with_memory(config, identity)

    def make() -> DraftEngine:
        with then_yields_cpus() if config.idle_priority else nullcontext():
            return make_engine(config, identity)

    return identity, make


def with_memory(config: DrafterConfig, identity: ModelIdentity) -> DrafterConfig:
    """Returns the settings with a number of pages that fits; a head has one layer, for which any number does.

    Raises:
        ConfigError: None fits; says by how much and what to change.
    """
    if is_eagle3(config.model):
        return replace(config, num_kv_blocks=config.num_kv_blocks or HOST_PAGES[DRAFTER])
    needs = model_needs(config.model, config.dtype, config.device)
    pages = pages_of_service(
        config,
        [needs],
        page_bytes=draft_page_bytes(needs.page_bytes),
        scratch_bytes=0,
        copied_rows=config.max_num_batched_tokens,
        context_len=identity.context_len,
        host_pages=HOST_PAGES[DRAFTER],
        least_pages=LEAST_PAGES,
    )
    return replace(config, num_kv_blocks=pages)


def make_engine(config: DrafterConfig, identity: ModelIdentity) -> DraftEngine:
    """Loads the model and grows one tree, so that the first session finds everything compiled."""
    # First what a verifier beside it needs last: where neither finds anything compiled, each compiles half of it.
    warm_up(Forest((DRAFT_MODEL,)))
    pending.warm_up()
    decoder = load_draft(config.model, config.target_model, config.dtype, config.device, config.threads)
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
    decoder.prepare(config.max_num_batched_tokens, engine.cache, drafts=True)
    engine.warm_up()
    logger.info("model is ready", extra={"weight_bytes": decoder.weight_bytes, "model": identity.name})
    log_memory(decoder.device, decoder.weight_bytes, engine.cache.nbytes)
    return engine

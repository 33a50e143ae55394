"""A simulated device inside a drafter: the very engine and scheduler, with a model that takes its time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from paceline.core.draft_scheduler import DraftLimits
from paceline.core.messages import ModelIdentity
from paceline.core.pages import BLOCK_SIZE
from paceline.drafter.config import DrafterConfig
from paceline.engine.drafter import DraftEngine
from paceline.simulated.model import Simulation, find_profile

logger = logging.getLogger(__name__)


def simulated_engine(config: DrafterConfig) -> tuple[ModelIdentity, Callable[[], DraftEngine]]:
    """Returns what a simulated draft model calls itself, and what makes its engine.

    Raises:
        ConfigError: The profile or the tokenizer makes serving impossible.
    """
    simulation = Simulation(
        profile=find_profile(config.profile),
        folder=config.model,
        mean_length=config.mean_output_tokens,
        acceptance=config.acceptance,
    )
    identity, facts = simulation.identity(config.model_name), simulation.profile.drafter
    logger.warning("nothing is computed: devices are simulated", extra={"profile": simulation.profile.name})

    def make() -> DraftEngine:
        return DraftEngine(
            decoder=simulation.draft(),
            identity=identity,
            num_blocks=config.num_kv_blocks or facts.kv_tokens // BLOCK_SIZE,
            limits=DraftLimits(
                width=facts.draft_width,
                max_rows=facts.draft_rows,
                max_rows_per_session=facts.draft_rows_per_session,
                max_num_batched_tokens=facts.max_rows,
                max_num_seqs=facts.max_sessions,
            ),
            clock=time.monotonic,
        )

    return identity, make

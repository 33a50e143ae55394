"""A simulated device inside a drafter: the very engine and scheduler, with a model that takes its time."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.core.messages import ModelIdentity
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
    identity = simulation.identity(config.model_name)
    logger.warning("nothing is computed: devices are simulated", extra={"profile": simulation.profile.name})

    def make() -> DraftEngine:
        return simulation.draft_engine(simulation.profile.drafter, identity, num_blocks=config.num_kv_blocks)

    return identity, make

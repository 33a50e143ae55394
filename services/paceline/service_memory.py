"""Plans the memory of a service with a model, from what is free where its models will be, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.choice import choose_platform
from paceline.engine.budget import MemoryPlan, plan_memory
from paceline.engine.free_memory import free_host_bytes
from paceline.engine.sizing import ModelNeeds
from paceline.model_service import ModelServiceConfig

ConfigT = TypeVar("ConfigT", bound=ModelServiceConfig)


def plan_service(
    config: ModelServiceConfig,
    models: Sequence[ModelNeeds],
    *,
    page_bytes: int,
    scratch_bytes: int,
    context_len: int,
    host_pages: int,
    least_pages: int,
) -> MemoryPlan:
    """Plans the memory of a service.

    Args:
        config: Its settings.
        models: All that it loads; the logits of a full step are those of the first.
        page_bytes: Of one page in all models, with scratch that grows with the pages.
        scratch_bytes: Other scratch.
        context_len: Longest session.
        host_pages: Most pages in the memory of a host, which others use as well, unless a number is asked for.
        least_pages: Fewer are of no use.

    Raises:
        ConfigError: It does not fit; says by how much and what to change.
    """
    device = choose_platform(config.device).device
    on_host = device.type == "cpu"
    useful = config.max_num_seqs * -(-context_len // BLOCK_SIZE) + 1
    capped = on_host and config.num_kv_blocks is None
    return plan_memory(
        free_bytes=free_host_bytes() if on_host else torch.cuda.mem_get_info(device)[0],
        utilization=config.memory_utilization,
        weight_bytes=sum(model.weight_bytes for model in models),
        scratch_bytes=scratch_bytes + config.max_num_batched_tokens * models[0].logit_bytes,
        page_bytes=page_bytes,
        most_pages=min(useful, host_pages) if capped else useful,
        least_pages=least_pages,
        asked_pages=config.num_kv_blocks or 0,
    )


def with_pages(config: ConfigT, plan: MemoryPlan, say: Callable[[str], None]) -> ConfigT:
    """Returns settings with the number of pages that was planned, and tells the account."""
    for line in plan.lines():
        say(line)
    return replace(config, num_kv_blocks=plan.num_pages)

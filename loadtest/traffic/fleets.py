"""The gateways that the modes are sent to: one fleet a mode, alike but for what the mode is about."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from loadtest.fleet import bench_fleet
from loadtest.traffic.config import HTTP, ON, LoadConfig
from loadtest.traffic.sending import Door, open_door

# Nobody is refused: a replay asks how long requests take, not how many are turned away.
UNBOUNDED = ("--max-sessions=100000", "--max-wait-s=86400")


@asynccontextmanager
async def doors_of(config: LoadConfig, modes: Sequence[str]) -> AsyncIterator[Mapping[str, Door]]:
    """Starts a fleet for each mode, or takes the gateway that is named, and yields the mode's door."""
    async with AsyncExitStack() as stack:
        doors = {}
        for mode in modes:
            address = config.url or await _start(stack, config, mode)
            doors[mode] = open_door(config.door, address, mode)
            stack.push_async_callback(doors[mode].close)
        yield doors


async def _start(stack: AsyncExitStack, config: LoadConfig, mode: str) -> str:
    fleet = await stack.enter_async_context(bench_fleet(**settings_of(config, mode)))
    return fleet.gateway_url if config.door == HTTP else fleet.endpoint("gateway").second_address


def settings_of(config: LoadConfig, mode: str) -> dict[str, Any]:
    """Returns the `FleetSpec` settings of a mode's fleet."""
    settings: dict[str, Any] = {
        "dtype": config.dtype,
        "lend": config.lend,
        "model": config.model,
        "draft_model": config.draft_model,
        "gateway_arg": UNBOUNDED,
        "verifier_arg": ("--max-queue=100000",),
    }
    if mode == ON:
        fixed = {"policy": "fixed", "num_speculative_tokens": config.gamma}
        settings["speculative_config"] = json.dumps(fixed)
    return settings

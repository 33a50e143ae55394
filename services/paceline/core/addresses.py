"""Addresses of hosts and ports as text: `host:port`, with IPv6 addresses in brackets. It opens nothing."""

from __future__ import annotations

import ipaddress
import re

from paceline.core.errors import ConfigError

MAX_PORT = 65535
_BRACKETED = re.compile(r"\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._~-]{1,32})?\]")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


def host_port(host: str, port: int) -> str:
    """Returns `host:port`; an IPv6 address gets brackets, if it has none."""
    return f"[{host}]:{port}" if is_ipv6(host) and not host.startswith("[") else f"{host}:{port}"


def is_ipv6(host: str) -> bool:
    """Whether a host is given as an IPv6 address, which needs another kind of socket."""
    return ":" in host


def is_address(address: str) -> bool:
    """Whether this is `host:port` with a name, an IPv4 address or a bracketed IPv6 address."""
    host, _, port = address.rpartition(":")
    known = _BRACKETED.fullmatch(host) or _NAME.fullmatch(host)
    return known is not None and re.fullmatch("[0-9]{1,5}", port) is not None and 0 < int(port) <= MAX_PORT


def is_local(address: str) -> bool:
    """Whether `host:port` names this host by its loopback interface."""
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_address(name: str, address: str) -> None:
    """Refuses what is not `host:port`.

    gRPC takes more (`dns:///host`, a list), but an address in the registry must mean the same to every reader.

    Raises:
        ConfigError: Names the setting and the value.
    """
    if not is_address(address):
        raise ConfigError(
            f"{name} must be host:port with a port from 1 to {MAX_PORT}, such as 10.0.0.7:8201 or [fd00::7]:8201, "
            f"got {address!r}"
        )


def check_host(name: str, host: str) -> None:
    """Refuses what is no host to listen on, such as an address with its port or in brackets.

    Raises:
        ConfigError: Names the setting and the value.
    """
    if not is_address(host_port(host, 1)) or host.startswith("["):
        raise ConfigError(f"{name} must be a name or an address without a port, such as 0.0.0.0 or ::1, got {host!r}")

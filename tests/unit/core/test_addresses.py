"""Addresses as text: names, IPv4 and IPv6, in flags, URLs and the registry."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from paceline.core.addresses import check_address, check_host, host_port, is_address
from paceline.core.errors import ConfigError


def test_an_address_is_host_and_port_and_anything_else_is_refused_with_name_and_value() -> None:
    for address in ("10.0.0.7:8201", "drafter-0.pool_1.svc:1", "[fd00::7]:65535", "localhost:8201"):
        check_address("--announce", address)
    for address in (
        *("drafter", "drafter:", ":8201", "drafter:0", "drafter:65536"),
        *("fd00::7:8201", "dns:///drafter:8201", "a:1,b:2", "a b:1"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_address("--announce", address)
        assert str(caught.value).startswith("--announce must be host:port with a port from 1 to 65535")
        assert repr(address) in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fd00::7", "fe80::1%eth0", "::", "drafter-0.pool.svc", "[::1]"])
def test_what_is_joined_is_an_address_and_a_place_in_a_url(host: str) -> None:
    """TensorRT-LLM #10877: `::1:8000` is none."""
    joined = host_port(host, 8201)
    assert is_address(joined)
    parts = urlsplit(f"redis://:secret@{joined}/0")
    assert (parts.hostname, parts.port) == (host.strip("[]"), 8201)


def test_a_host_to_listen_on_has_neither_port_nor_brackets() -> None:
    for host in ("0.0.0.0", "::", "::1", "localhost"):
        check_host("--host", host)
    for host in ("", "[::1]", "[::1]:8000", "localhost:8000", "a b", "http://::1"):
        with pytest.raises(ConfigError, match="--host must be a name or an address without a port, such as"):
            check_host("--host", host)

"""A store behind a password, and one behind TLS, reached by what stands in its URL; counts of keys live there too."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.cluster.valkey import find_server, server_command
from paceline.core.errors import OverloadedError, UnavailableError
from paceline.gateway.access.keys import ApiKey
from paceline.gateway.access.rate_limit import RateLimit
from paceline.service.dev_ca import make_certificates
from paceline.store.base import Replica
from paceline.store.redis import open_store
from tools.ports import free_port, listens

HOST = "127.0.0.1"
PASSWORD = "open-sesame"
DRAFTER = Replica(replica_id="d1", role="drafter", address="127.0.0.1:8201")
ALICE = ApiKey(name="alice", digest=bytes(32), requests_per_minute=2)


@contextmanager
def protected_server(program: Path, data_dir: Path, tls_dir: Path | None = None) -> Iterator[int]:
    """A server that wants a password, and TLS too if it gets certificates; skips if the program cannot do that."""
    port = free_port(HOST)
    command = [*server_command(program, host=HOST, port=port, data_dir=data_dir), "--requirepass", PASSWORD]
    if tls_dir is not None:
        command += ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
        command += ["--tls-cert-file", str(tls_dir / "tls.pem"), "--tls-key-file", str(tls_dir / "tls.key")]
        command += ["--tls-ca-cert-file", str(tls_dir / "ca.pem")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not listens(HOST, port):
            if process.poll() is not None:
                pytest.skip(f"{program} is built without TLS")
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "ca"
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with protected_server(find_server(), tmp_path_factory.mktemp("data")) as port:
        yield port


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[int]:
    # The server in the wheel is built without TLS, that of most systems with it.
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("this system has no Valkey or Redis server of its own")
    with protected_server(Path(program), tmp_path_factory.mktemp("data"), certificates / "gateway") as port:
        yield port


async def test_the_password_in_the_url_opens_the_store(locked: int) -> None:
    async with open_store(f"redis://:{PASSWORD}@{HOST}:{locked}") as store:
        await store.announce(DRAFTER, ttl_s=60)
        assert await store.replicas() == [DRAFTER]


@pytest.mark.parametrize("user", ["", ":wrong-password@"])
async def test_without_the_right_password_the_store_is_closed_and_the_error_names_no_password(
    locked: int, user: str
) -> None:
    async with open_store(f"redis://{user}{HOST}:{locked}") as store:
        with pytest.raises(UnavailableError, match=f"{HOST}:{locked}.* refuses our user or password") as refused:
            await store.ping()
    assert "wrong-password" not in str(refused.value)


async def test_requests_are_counted_over_all_gateways(locked: int) -> None:
    gateways = [RateLimit(f"redis://:{PASSWORD}@{HOST}:{locked}", timeout_s=30) for _ in range(3)]
    for gateway in gateways[:2]:
        await gateway.count(ALICE)
    with pytest.raises(OverloadedError) as refused:
        await gateways[2].count(ALICE)
    assert 0 < refused.value.retry_after_s <= 60
    for gateway in gateways:
        await gateway.close()


async def test_a_store_behind_tls_is_reached_with_the_authority_named_in_the_url(
    encrypted: int, certificates: Path
) -> None:
    url = f"rediss://:{PASSWORD}@{HOST}:{encrypted}?ssl_ca_certs={certificates / 'ca.pem'}"
    async with open_store(url) as store:
        await store.announce(DRAFTER, ttl_s=60)
        assert await store.replicas() == [DRAFTER]
    limit = RateLimit(url, timeout_s=30)
    await limit.count(ALICE)
    await limit.count(ALICE)
    with pytest.raises(OverloadedError):
        await limit.count(ALICE)
    await limit.close()


async def test_a_store_behind_tls_is_not_believed_without_its_authority(encrypted: int) -> None:
    for url in (f"rediss://:{PASSWORD}@{HOST}:{encrypted}", f"redis://:{PASSWORD}@{HOST}:{encrypted}"):
        async with open_store(url) as store:
            with pytest.raises(UnavailableError):
                await store.ping()

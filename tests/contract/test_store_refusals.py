"""A server that answers and refuses: what a user may not do, a database that is not there, cluster mode."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from paceline.cluster.valkey import find_server, server_command
from paceline.core.errors import ConfigError, UnavailableError
from paceline.store.base import require
from paceline.store.redis import RedisStore
from tests.contract.test_store import HOST, VERIFIER, eventually, server_process
from tools.ports import free_port, listens

ALL = ("on", "nopass", "~*", "+@all")


@pytest.fixture(scope="module")
def server_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with server_process(find_server(), tmp_path_factory.mktemp("data")) as (port, _):
        yield port


async def refused(port: int, *rules: str) -> str:
    """Why a service does not start as a user with these rules."""
    async with Redis(host=HOST, port=port) as admin:
        await admin.execute_command("ACL", "SETUSER", "u", "reset", *rules)
    async with RedisStore(f"redis://u:x@{HOST}:{port}/0") as store:
        with pytest.raises(ConfigError) as caught:
            await require(store)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ((*ALL, "-evalsha", "-eval"), "refuses EVALSHA: User u has no permissions to run the 'evalsha' command"),
        (("on", "nopass", "~other:*", "+@all"), "refuses EVALSHA: No permissions to access a key"),
        ((*ALL, "-smembers"), "refuses EVALSHA: ACL failure in script"),
    ],
)
async def test_what_a_user_may_not_do_is_said_in_the_servers_own_words(
    server_port: int, rules: tuple[str, ...], said: str
) -> None:
    """redis-py #1171, redis-vl #673."""
    assert said in await refused(server_port, *rules)


async def test_a_user_who_may_not_ping_can_start_and_a_ping_names_itself(server_port: int) -> None:
    async with Redis(host=HOST, port=server_port) as admin:
        await admin.execute_command("ACL", "SETUSER", "u", "reset", *ALL, "-ping")
    async with RedisStore(f"redis://u:x@{HOST}:{server_port}/0") as store:
        await require(store)
        with pytest.raises(UnavailableError, match="refuses PING: User u has no permissions to run the 'ping' command"):
            await store.ping()


async def test_a_database_that_is_not_there_is_named(server_port: int) -> None:
    async with RedisStore(f"redis://{HOST}:{server_port}/99") as store:
        with pytest.raises(UnavailableError, match=r"refuses EVALSHA: (invalid DB index|DB index is out of range)"):
            await store.replicas()


async def test_cluster_mode_is_refused_at_the_start(tmp_path: Path) -> None:
    port = free_port(HOST)
    command = [*server_command(find_server(), host=HOST, port=port, data_dir=tmp_path), "--cluster-enabled", "yes"]
    command += ["--cluster-port", str(free_port(HOST))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while not listens(HOST, port):
                assert process.poll() is None
            async with Redis(host=HOST, port=port) as admin, RedisStore(f"redis://{HOST}:{port}") as store:
                # Before it has its slots, and after.
                for _ in range(2):
                    with pytest.raises(
                        ConfigError, match=r"runs in cluster mode, which is not served; .* cluster-enabled no"
                    ):
                        await require(store)
                    await admin.execute_command("CLUSTER", "FLUSHSLOTS")
                    await admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

                    async def served() -> bool:
                        return "cluster_state:ok" in str(await admin.execute_command("CLUSTER", "INFO"))

                    await eventually(served)
                with pytest.raises(UnavailableError, match="cluster mode"):
                    await store.announce(VERIFIER, 60)
        finally:
            process.kill()

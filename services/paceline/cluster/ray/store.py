"""The store of a fleet on Ray: one that runs already, or a Valkey on the host of the launcher."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from paceline.cluster.health import store_health
from paceline.cluster.ray.host import own_address
from paceline.cluster.spec import FleetSpec, plan_store_port, store_child
from paceline.cluster.supervisor import Supervisor
from paceline.cluster.valkey import find_server
from paceline.service.config import public_url


@asynccontextmanager
async def shared_store(
    services: FleetSpec, environ: Mapping[str, str], say: Callable[[str], None]
) -> AsyncIterator[str]:
    """Yields the URL of a store that all hosts reach; one started here asks for a password, and ends with the block.

    Raises:
        ConfigError: Its port is taken, or there is no server program.
    """
    if services.redis_url is not None:
        say(f"using the store at {public_url(services.redis_url)}")
        yield services.redis_url
        return
    host = own_address()
    port, password = plan_store_port(replace(services, host=host)), secrets.token_urlsafe(24)
    url = f"redis://:{password}@{host}:{port}"
    supervisor = Supervisor(say)
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as work_dir:
        child = store_child(find_server(services.redis_server), host, port, Path(work_dir), environ)
        # Everybody may read command lines; the folder is its owner's alone.
        settings = Path(work_dir) / "valkey.conf"
        settings.write_text(f"requirepass {password}\n", encoding="ascii")
        server, *flags = child.argv
        guarded = replace(child, argv=(server, str(settings), *flags), is_healthy=store_health(url))
        try:
            await supervisor.start([guarded], services.start_timeout_s)
            yield url
        finally:
            await supervisor.stop(services.grace_s)

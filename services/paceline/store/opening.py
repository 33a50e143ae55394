"""Opens the store that a URL names."""

from __future__ import annotations

from urllib.parse import urlsplit

from paceline.core.errors import ConfigError
from paceline.service.config import public_url
from paceline.store.base import Store
from paceline.store.memory import MemoryStore
from paceline.store.redis import RedisStore


def open_store(url: str) -> Store:
    """Opens the store at a URL: `redis://[user:password@]host:port/db`, also `rediss` and `unix`, or `memory://`.

    Nothing is dialled yet. `memory://` is private to the process, for tests and single services.

    Raises:
        ConfigError: The URL has another scheme.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise ConfigError(f"the store's URL cannot be read ({error})") from None
    if scheme == "memory":
        return MemoryStore()
    if scheme in ("redis", "rediss", "unix"):
        return RedisStore(url)
    raise ConfigError(
        f"the store's URL must begin with redis://, rediss://, unix:// or memory://, got {public_url(url)!r}"
    )

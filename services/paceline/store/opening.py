"""Opens the store that a URL names."""

from __future__ import annotations

from urllib.parse import urlsplit

from paceline.core.errors import ConfigError
from paceline.service.config import named, public_url
from paceline.store.base import Store
from paceline.store.no_store import NoStore
from paceline.store.redis import RedisStore


def open_store(url: str, setting: str = "--redis-url") -> Store:
    """Opens the store at a URL: `redis://[user:password@]host:port/db`, also `rediss` and `unix`, or `memory://`.

    Nothing is dialled yet. `memory://` stands for no store at all.

    Args:
        url: The URL; an option of redis-py may follow a question mark.
        setting: What it was given by, for errors.

    Raises:
        ConfigError: The URL has another scheme, or an option that is not known or has a bad value.
    """
    with named(setting, public_url(url)):
        scheme = urlsplit(url).scheme
        if scheme == "memory":
            return NoStore()
        if scheme in ("redis", "rediss", "unix"):
            return RedisStore(url)
        raise ConfigError("must begin with redis://, rediss://, unix:// or memory://")


def require_server(url: str, setting: str = "--redis-url") -> None:
    """Refuses `memory://` where services have to find one another.

    Raises:
        ConfigError: The URL names no server, or cannot be used.
    """
    if isinstance(open_store(url, setting), NoStore):
        raise ConfigError(f"{setting} must name a server, got memory://, which stands for none")

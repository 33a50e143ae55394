"""The server that a command talks to over OpenAI's HTTP API: a gateway, or one of another make."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from paceline.core.errors import ConfigError, PacelineError, UnavailableError
from paceline.service.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Flags that say which server, which model of it, and how it knows us."""

    url: str = setting("http://127.0.0.1:8000", help="Where the server answers HTTP.")
    api_key: str = setting("", help="API key, if the server needs one; safer in the environment than here.")
    ca_file: Path | None = setting(None, help="Certificates of the authorities to trust; without it the usual ones.")
    model: str = setting("", help="Model name; without it the only one served.")


@contextmanager
def reached(url: str) -> Iterator[None]:
    """Turns any httpx failure into an error that names the URL."""
    try:
        yield
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is no URL: {error}") from None
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise UnavailableError(f"the server at {url} cannot be reached: {reason}") from None


def connection(config: ServerConfig) -> dict[str, Any]:
    """Returns httpx's arguments for a client of the server, but its timeouts.

    Raises:
        ConfigError: `--ca-file` cannot be used.
    """
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    verify: ssl.SSLContext | bool = True
    if config.ca_file is not None:
        try:
            verify = ssl.create_default_context(cafile=config.ca_file)
        except OSError as error:
            raise ConfigError(f"--ca-file {config.ca_file} cannot be used ({error})") from None
    return {"base_url": config.url, "headers": headers, "verify": verify}


def chosen_model(client: httpx.Client, wanted: str = "") -> str:
    """Returns the model that is wanted, or the only one.

    Raises:
        PacelineError: The server refuses to name its models.
        ConfigError: It is not served, or there are several.
    """
    response = client.get("/v1/models")
    if response.status_code != httpx.codes.OK:
        raise PacelineError(error_message(response.text))
    try:
        names = [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"--url {client.base_url}: what answers there does not speak OpenAI's HTTP API") from None
    if wanted in names or (len(names) == 1 and not wanted):
        return wanted or names[0]
    if wanted:
        raise ConfigError(f"--model {wanted}: no such model is served; there are: {', '.join(names)}")
    raise ConfigError(f"the server has {len(names)} models, choose with --model: {', '.join(names)}")


def error_message(text: str) -> str:
    """Returns what OpenAI's API says of an error, or the beginning of anything else."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]

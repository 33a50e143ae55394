"""API keys: a file of their hashes, reread when it changes, and `paceline key`, which makes new ones.

A key has 256 random bits, so a plain SHA-256 of it cannot be searched; the keys themselves are not stored. It knows
neither HTTP nor gRPC.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.service.config import parse, setting

PROG = "paceline key"
DESCRIPTION = (
    "Prints a new API key, once, and the line that lets a gateway know it. NAME may stand first on the command "
    "line without a flag."
)
FLAG = "--api-keys-file"
KEY_PREFIX = "pl-"
KEY_BYTES = 32
MAX_REQUESTS_PER_MINUTE = 100_000
MAX_SESSIONS = 100_000
REREAD_S = 2.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FORM = "name:sha256[:requests-per-minute[:max-sessions]]"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as a gateway knows it.

    Attributes:
        name: Its owner, as shown in logs and records.
        digest: SHA-256 of the key.
        requests_per_minute: Most requests in any 60 s, over all gateways; None: no limit.
        max_sessions: Most sessions at once on one gateway; None: no limit of its own.
    """

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    max_sessions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConfig:
    """Settings of `paceline key`."""

    name: str = setting(help="Whose key it is: letters, digits, dot, dash and underscore, at most 64.")
    requests_per_minute: int | None = setting(
        None, help="Most requests in any 60 s.", low=1, high=MAX_REQUESTS_PER_MINUTE
    )
    max_sessions: int | None = setting(None, help="Most sessions at once on one gateway.", low=1, high=MAX_SESSIONS)


class KeyRing:
    """The keys of a file."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            ConfigError: It cannot be read, or a line is wrong; names the line.
        """
        self._path = path
        self._version = _version(path)
        self._keys = _read(path)
        self._problem = ""

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """Returns the key that was presented; None if it is unknown. The time does not depend on which key it is."""
        digest = _digest(presented)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def refresh(self) -> None:
        """Reads the file again if it has changed; if it is wrong, a warning is logged and the old keys stay valid."""
        try:
            version = _version(self._path)
            if version == self._version:
                return
            keys = _read(self._path)
        except ConfigError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.warning("API keys cannot be read again, the old ones stay in force", extra={"error": error})
            return
        self._version, self._keys, self._problem = version, keys, ""
        _log.info("API keys read again", extra={"num_keys": len(self._keys)})

    async def keep_fresh(self, interval_s: float = REREAD_S) -> None:
        """Refreshes without end, once per interval in seconds."""
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(self.refresh)


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Returns the keys of a file's text.

    Raises:
        ConfigError: A line is wrong, a name or key appears twice, or there is no key; names the line.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        key = _parse_line(content, number)
        if any(key.name == other.name or key.digest == other.digest for other in keys):
            raise ConfigError(f"{FLAG}: line {number}: the name or the key appears twice; give each its own")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{FLAG}: holds no key, so no client could be served; make one with paceline key NAME")
    return tuple(keys)


def main(argv: Sequence[str]) -> None:
    """Entry point of `paceline key`."""
    config = parse(KeyConfig, argv, os.environ, PROG, DESCRIPTION, first="name")
    if _NAME.fullmatch(config.name) is None:
        raise ConfigError(f"--name must be 1 to 64 letters, digits, dots, dashes or underscores, got {config.name!r}")
    key = new_key()
    sys.stdout.write(f"key, shown this once:       {key}\nline for {FLAG}:  {line_of(config, key)}\n")


def new_key() -> str:
    """Returns a fresh key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def line_of(config: KeyConfig, key: str) -> str:
    """Returns the line of the file for a key."""
    fields = [config.name, _digest(key).hex(), config.requests_per_minute, config.max_sessions]
    while fields[-1] is None:
        fields.pop()
    return ":".join("" if field is None else str(field) for field in fields)


def _parse_line(content: str, number: int) -> ApiKey:
    fields = content.split(":")
    if not 2 <= len(fields) <= 4:
        raise ConfigError(f"{FLAG}: line {number}: must be {_FORM}, got {len(fields)} fields")
    name, digest = fields[:2]
    # The content is not shown: it may be the key itself.
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{FLAG}: line {number}: the name must be 1 to 64 letters, digits, dots, dashes, underscores")
    if _DIGEST.fullmatch(digest) is None:
        raise ConfigError(
            f"{FLAG}: line {number}: the hash must be 64 lower-case hex digits, as paceline key prints it"
        )
    rest = [*fields[2:], "", ""]
    return ApiKey(
        name=name,
        digest=bytes.fromhex(digest),
        requests_per_minute=_limit(rest[0], "requests-per-minute", MAX_REQUESTS_PER_MINUTE, number),
        max_sessions=_limit(rest[1], "max-sessions", MAX_SESSIONS, number),
    )


def _limit(text: str, what: str, most: int, number: int) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise ConfigError(f"{FLAG}: line {number}: {what} must be a whole number from 1 to {most}, got {text[:20]!r}")
    return int(text)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _version(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{FLAG}: {path} cannot be read ({error.strerror})") from None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[ApiKey, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{FLAG}: {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{FLAG}: {path} is not UTF-8 text") from None
    return parse_keys(text)

"""API keys: a file of their hashes, reread when it changes, and `paceline key`, which makes new ones.

A key has 256 random bits, so a plain SHA-256 of it cannot be searched; the keys themselves are not stored. It knows
neither HTTP nor gRPC.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
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
    """The keys of a file, as far as it can be read; what cannot be read is not in force.

    Raises:
        ConfigError: At first the file must be readable, and each of its lines right; names the line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = _read(path)
        self._keys, self._problems = parse_keys(*self._read)
        if self._problems:
            raise self._problems[0]

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_problems(self) -> int:
        """How many lines are not in force; 1 if the file cannot be read at all."""
        return len(self._problems)

    @property
    def problem(self) -> str:
        """Keys or changes not in force, and why; empty: none."""
        more = f" (and {self.num_problems - 1} more)" if self.num_problems > 1 else ""
        return f"{self._problems[0]}{more}" if self._problems else ""

    def find(self, presented: str) -> ApiKey | None:
        """Returns the key that was presented; its hash is looked up, so the time it takes reveals nothing."""
        return self._keys.get(_digest(presented))

    def refresh(self) -> None:
        """Reads the file again."""
        read = _read(self._path)
        if read == self._read:
            return
        self._read = read
        self._keys, self._problems = parse_keys(*read)
        if self._problems:
            told = {"problem": self.problem, "num_keys": len(self)}
            _log.warning("the file of API keys is not wholly in force", extra=told)
        else:
            _log.info("API keys read again", extra={"num_keys": len(self)})

    async def keep_fresh(self, interval_s: float = REREAD_S) -> None:
        """Refreshes without end, once per interval in seconds."""
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(self.refresh)


def parse_keys(text: str, unreadable: str = "") -> tuple[Mapping[bytes, ApiKey], Sequence[ConfigError]]:
    """Returns the keys of a file's text by digest, and what is wrong with other lines, which count for nothing.

    Args:
        unreadable: Why there is no text; empty: there is.
    """
    keys: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    problems = [ConfigError(unreadable)] if unreadable else []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            if content := line.partition("#")[0].strip():
                key = _parse_line(content, number)
                if key.name in names or key.digest in keys:
                    raise ConfigError(f"{FLAG}: line {number}: the name or the key appears twice; give each its own")
                keys[key.digest] = key
                names.add(key.name)
        except ConfigError as error:
            problems.append(error)
    if not keys and not problems:
        problems.append(ConfigError(f"{FLAG}: holds no key, so no client could be served; make one with {PROG} NAME"))
    return keys, problems


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
        raise ConfigError(f"{FLAG}: line {number}: {what} must be a whole number from 1 to {most}")
    return int(text)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _read(path: Path) -> tuple[str, str]:
    """Returns the text of a file, and why there is none if it cannot be read."""
    try:
        # Bytes that are no text spoil their own line only.
        return path.read_text(encoding="utf-8", errors="replace"), ""
    except OSError as error:
        return "", f"{FLAG}: {path} cannot be read ({error.strerror})"

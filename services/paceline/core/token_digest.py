"""A short name of a row of tokens, by which two sides see whether they have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

DIGEST_CHARS = 32


class TokenDigest:
    """The digest of tokens as they come: the first 32 hex digits of SHA-256 over little-endian 32-bit ids."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, token_ids: Sequence[int]) -> None:
        self._hash.update(np.asarray(token_ids, dtype="<u4").tobytes())

    def hex(self) -> str:
        """Returns the digest of all tokens so far."""
        return self._hash.hexdigest()[:DIGEST_CHARS]


def token_digest(token_ids: Sequence[int]) -> str:
    """Returns the digest of tokens; see `TokenDigest`."""
    digest = TokenDigest()
    digest.add(token_ids)
    return digest.hex()

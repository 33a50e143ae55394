"""The tokens that a client already has of a session that it resumes, compared with those of the session.

Pure. Tokens from the log and tokens that are computed again are checked alike, so that the tokens of one text are never
joined to those of another.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import InvalidRequestError, ResumeMismatchError
from paceline.core.messages import DIGEST_CHARS, TokenDigest, token_digest

MISMATCH = "digest: the tokens that the client has are not those of the session; start a new one"


class KnownTokens:
    """The first `offset` tokens of a session, of which the client has sent the `digest`."""

    def __init__(self, offset: int, digest: str) -> None:
        self._offset = offset
        self._digest = digest
        self._num_left = offset
        self._seen = TokenDigest()

    def digest(self) -> str:
        """Digest of all tokens of the answer so far."""
        return self._seen.hex()

    def take(self, token_ids: Sequence[int]) -> int:
        """Takes the next tokens of the session and returns how many of them the client has; see `add` for the others.

        Raises:
            ResumeMismatchError: The client has others.
        """
        num_known = min(self._num_left, len(token_ids))
        self._num_left -= num_known
        self._seen.add(token_ids[:num_known])
        if num_known and not self._num_left and self._seen.hex() != self._digest:
            raise ResumeMismatchError(MISMATCH)
        return num_known

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes those of the others that belong to the answer."""
        self._seen.add(token_ids)

    def end(self, num_tokens: int) -> None:
        """The session has ended after `num_tokens` tokens.

        Raises:
            ResumeMismatchError: The client has more.
        """
        if num_tokens < self._offset:
            raise ResumeMismatchError(
                f"offset: the session ended with {num_tokens} tokens, the client has {self._offset}"
            )


def check_known(offset: int, digest: str, token_ids: Sequence[int]) -> None:
    """Compares the tokens that a client claims to have with those of a session, as far as these reach.

    Raises:
        InvalidRequestError: The digest is missing or malformed.
        ResumeMismatchError: The client has other tokens.
    """
    if offset == 0:
        return
    if len(digest) != DIGEST_CHARS or set(digest) - set("0123456789abcdef"):
        raise InvalidRequestError(
            "digest", f"must be {DIGEST_CHARS} lower-case hex digits where offset is above 0, got {digest[:40]!r}"
        )
    if offset <= len(token_ids) and token_digest(token_ids[:offset]) != digest:
        raise ResumeMismatchError(MISMATCH)

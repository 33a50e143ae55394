"""Keeps responses in the store for a time, so that later requests at any gateway can continue them."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import SessionNotFoundError, UnavailableError
from paceline.store.base import Store

Json = dict[str, Any]
# Ids that gateways make; the store is not asked for others.
_ID = re.compile(r"resp_[0-9a-f]{32}")
_NAME = "response:{response_id}"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """A response as it is kept.

    Attributes:
        api_key: Name of the key of its request; empty without keys.
        response: As clients see it.
        messages: The conversation before it, without instructions.
        document: As the store has it; empty: it was not read from there.
    """

    api_key: str
    response: Json
    messages: list[Json]
    document: bytes = b""

    def to_bytes(self) -> bytes:
        """Returns it as it is written."""
        fields = {"api_key": self.api_key, "response": self.response, "messages": self.messages}
        return json.dumps(fields, separators=(",", ":")).encode()


class ResponseShelf:
    """Where they are kept.

    Args:
        store: Holds documents.
        ttl_s: Life of a response after its last change, in seconds.
    """

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s

    async def keep(self, kept: KeptResponse) -> bytes:
        """Writes a response; without a store it cannot be retrieved later, but is answered all the same.

        Returns:
            The document, needed to change it later; empty: it is not kept.
        """
        document = kept.to_bytes()
        try:
            await self._store.keep(self._name(kept), document, self._ttl_s)
        except UnavailableError as error:
            self._warn(kept, error)
            return b""
        return document

    async def change(self, kept: KeptResponse, document: bytes) -> bool:
        """Writes what has become of a response, unless it was cancelled, ended elsewhere or deleted in the meantime.

        Args:
            kept: As it is now.
            document: As it was kept; empty: it was not.

        Returns:
            Whether it was written.
        """
        if not document:
            return bool(await self.keep(kept))
        try:
            return await self._store.exchange(self._name(kept), document, kept.to_bytes(), self._ttl_s)
        except UnavailableError as error:
            self._warn(kept, error)
            return False

    def _name(self, kept: KeptResponse) -> str:
        return _NAME.format(response_id=kept.response["id"])

    def _warn(self, kept: KeptResponse, error: UnavailableError) -> None:
        _log.warning("a response is not kept: %s", error, extra={"response_id": kept.response["id"]})

    async def find(self, response_id: str, api_key: str, field: str = "response_id") -> KeptResponse:
        """Returns a response.

        Raises:
            SessionNotFoundError: There is none for this key.
            UnavailableError: The store does not answer.
        """
        kept = await self._find(response_id)
        # A caller does not learn whether it exists under another key.
        if kept is None or kept.api_key != api_key:
            raise SessionNotFoundError(f"{field}: {response_id[:80]!r} is not known; it is not kept, or no longer")
        return kept

    async def forget(self, response_id: str, api_key: str) -> None:
        """Deletes a response.

        Raises:
            SessionNotFoundError: There is none for this key.
            UnavailableError: The store does not answer.
        """
        await self.find(response_id, api_key)
        await self._store.forget(_NAME.format(response_id=response_id))

    async def _find(self, response_id: str) -> KeptResponse | None:
        if _ID.fullmatch(response_id) is None:
            return None
        document = await self._store.kept(_NAME.format(response_id=response_id))
        try:
            return None if document is None else KeptResponse(**json.loads(document), document=document)
        except (ValueError, TypeError):
            _log.warning("a kept response cannot be read", extra={"response_id": response_id})
            return None

"""Keeps responses in the store for a time, so that later requests at any gateway can continue them."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial

from paceline.core.errors import SessionNotFoundError
from paceline.gateway.api.endpoints.reading import MAX_INLINE_BYTES, Workers
from paceline.gateway.api.responses.keeping_writer import KeepingWriter
from paceline.gateway.api.responses.kept import IN_PROGRESS, KeptResponse, interrupted
from paceline.store.documents import Document, Documents, Keeping

# Ids that gateways make; the store is not asked for others.
_ID = re.compile(r"resp_[0-9a-f]{32}")

_log = logging.getLogger(__name__)


class ResponseShelf:
    """Where responses are kept.

    Args:
        documents: Of the store.
        workers: Read long ones.
        ttl_s: Life of a response after its last change, in seconds.
        room_bytes: Room in the store for all responses of all keys.

    Attributes:
        writer: Writes them in the background.
    """

    def __init__(self, documents: Documents, workers: Workers, *, ttl_s: float, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self._ttl_s = ttl_s
        self.writer = KeepingWriter(documents, self._keep)
        self._documents = documents
        self._workers = workers

    async def end(self, kept: KeptResponse) -> bool:
        """Writes a final response now.

        Returns:
            False if it has ended otherwise by now, or is deleted.

        Raises:
            UnavailableError: The store does not answer.
        """
        outcome = await self._keep(kept.document(), work_s=0.0)
        self.writer.leave(kept)
        return outcome is Keeping.DONE

    async def find(self, response_id: str, api_key: str, field: str = "response_id") -> KeptResponse:
        """Returns a response; one that nobody runs any more is incomplete.

        Raises:
            SessionNotFoundError: There is none for this key.
            UnavailableError: The store does not answer.
            OverloadedError: It is long, and too many requests are being read.
        """
        kept = await self._find(response_id, api_key)
        if kept is None:
            raise SessionNotFoundError(f"{field}: {response_id[:80]!r} is not known; it is not kept, or no longer")
        if kept.at_work or kept.response["status"] != IN_PROGRESS:
            return kept
        return replace(kept, response={**kept.response, **interrupted()})

    async def forget(self, response_id: str, api_key: str) -> None:
        """Deletes a response.

        Raises:
            SessionNotFoundError: There is none for this key.
            UnavailableError: The store does not answer.
        """
        kept = await self.find(response_id, api_key)
        self.writer.forget(kept)
        await self._documents.forget(api_key, response_id)

    async def _keep(self, document: Document, *, work_s: float, replaces: bool = False) -> Keeping:
        return await self._documents.keep(
            document, ttl_s=self._ttl_s, room_bytes=self.room_bytes, work_s=work_s, replaces=replaces
        )

    async def _find(self, response_id: str, api_key: str) -> KeptResponse | None:
        if _ID.fullmatch(response_id) is None:
            return None
        waiting = self.writer.waiting(api_key, response_id)
        if waiting is not None:
            return waiting
        document = await self._documents.kept(api_key, response_id)
        if document is None:
            return None
        try:
            return await self._workers.run(
                partial(KeptResponse.from_document, document), small=len(document.body) <= MAX_INLINE_BYTES
            )
        except (ValueError, LookupError, TypeError):
            _log.warning("a kept response cannot be read", extra={"response_id": response_id})
            return None

"""Names a place in the stream of one session, for `id:` and `Last-Event-ID` of server-sent events.

Whoever has the id of the last event can go on from there at any gateway: it holds the session, how many
tokens the client has, and their digest.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import InvalidRequestError
from paceline.gateway.http.response import LAST_EVENT_ID

MAX_OFFSET_DIGITS = 10
_SEPARATOR = ":"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventId:
    """A place in a stream.

    Attributes:
        session_id: The session.
        offset: Generated tokens up to there.
        digest: Of these; see `paceline.core.token_digest`.
    """

    session_id: str
    offset: int = 0
    digest: str = ""

    def __str__(self) -> str:
        """Returns it as it stands in a stream."""
        return _SEPARATOR.join((self.session_id, str(self.offset), self.digest))

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Reads what a client sends back.

        Raises:
            InvalidRequestError: It is no id of ours.
        """
        session_id, _, rest = text.partition(_SEPARATOR)
        offset, separator, digest = rest.partition(_SEPARATOR)
        well_formed = offset.isascii() and offset.isdigit() and len(offset) <= MAX_OFFSET_DIGITS
        if not separator or not session_id or not well_formed:
            raise InvalidRequestError(LAST_EVENT_ID, f"must be the id of an event of the stream, got {text[:80]!r}")
        return cls(session_id=session_id, offset=int(offset), digest=digest)

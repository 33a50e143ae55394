"""What a verifier tells a session's drafter, and what it knows of it.

The numbers stand in the forest's rows, where one loop handles those of all sessions (`paceline.forest.links`).
"""

from __future__ import annotations

from paceline.core.messages import CloseSession, LaggingSession, OpenSession
from paceline.core.params import DRAFT_MODEL, EAGLE3
from paceline.core.session import VerifierSession
from paceline.forest import NONE, Links

# Expected seconds from a commit to the first nodes of a drafter that knew it.
RESPONSE_S = 0.004


class ConnectedDrafter:
    """A drafter whose stream to a verifier is up.

    Args:
        links: Of the verifier's sessions.
        response_s: Expected seconds from a commit to the first nodes of a drafter that knew it.
        wants_states: Whether it drafts from hidden states.
    """

    def __init__(self, links: Links, *, response_s: float = RESPONSE_S, wants_states: bool = False) -> None:
        self.number = links.new_drafter(response_s)
        self.wants_states = wants_states
        self._links = links

    @property
    def source(self) -> str:
        """The method that its guesses are known by."""
        return EAGLE3 if self.wants_states else DRAFT_MODEL

    def speaks(self) -> None:
        """It has sent something: steps wait for it again."""
        self._links.arrays.drafters["silent"][self.number] = False

    def drop(self) -> None:
        """It is gone, and no session is linked to it any more."""
        self._links.drop_drafter(self.number)


class SessionLink:
    """One session's link to its drafter.

    Args:
        session: The verifier's end of the session.
        address: Of its drafter; empty: it has none.
        price: Least survival worth drafting for; 1: its drafter idles.

    Attributes:
        number: The session's name in messages; 0: it has none yet.
    """

    def __init__(self, session: VerifierSession, address: str = "", *, price: float = 0.0) -> None:
        self.address = address
        self.number = 0
        self._session = session
        self._drafter: ConnectedDrafter | None = None
        self._row, self._links = session.tree.row, session.tree.forest.links
        # Committed positions whose hidden states were sent.
        self._num_states_sent = 0
        self._links.begin(self._row, price)

    @property
    def price(self) -> float:
        """Least survival worth drafting for; 1: its drafter idles."""
        return self._links.terms(self._row)[0]

    @property
    def sent_len(self) -> int:
        """Committed tokens that its drafter knows; 0: it does not know the session."""
        return self._links.sent_len(self._row)

    def name(self, number: int) -> None:
        """Its name in messages from now on."""
        self.number = number
        self._links.name(self._row, number)

    # Who drafts

    @property
    def drafter(self) -> ConnectedDrafter | None:
        """Its drafter, while the stream to it is up."""
        return self._drafter

    def connect(self, drafter: ConnectedDrafter) -> None:
        """The stream to its drafter is up, anew: it knows nothing of the session."""
        self._drafter = drafter
        self._links.connect(self._row, drafter.number)

    def disconnect(self) -> None:
        """The stream to its drafter is lost."""
        self._drafter = None
        self._links.connect(self._row, NONE)

    def pair(self, address: str, drafter: ConnectedDrafter | None) -> CloseSession | None:
        """Another drafter takes over; what the first may still send is dropped.

        Returns:
            What to send to the first.
        """
        closed = self.close()
        self.address = address
        if drafter is None:
            self.disconnect()
        else:
            self.connect(drafter)
        return closed

    # To the drafter

    def open(self) -> OpenSession:
        """What opens the session at its drafter, with all that is committed."""
        self._num_states_sent = 0
        price, room = self._links.open(self._row)
        return self._session.open(self.number, price=price, room=room)

    def close(self) -> CloseSession | None:
        """The session is over for its drafter; returns what to send to it, if it knows the session."""
        known = self.sent_len
        self._links.forget(self._row)
        return CloseSession(number=self.number) if known and self._drafter is not None else None

    def catch_up(self, lagging: LaggingSession) -> OpenSession | None:
        """A drafter misses commits: it is told all since those that it has; returns what opens the session anew."""
        if not 1 <= lagging.have_len <= self._session.committed_len:
            return self.open()
        self._links.tell_from(self._row, lagging.have_len)
        return None

    def next_states(self, num_computed: int, limit: int) -> range:
        """Positions whose hidden states are computed, of use to the drafter, and not sent yet; at most `limit`."""
        # A state is of use once the token after it is known.
        stop = min(num_computed, self.sent_len - 1, self._num_states_sent + limit)
        positions = range(self._num_states_sent, max(self._num_states_sent, stop))
        self._num_states_sent = positions.stop
        return positions

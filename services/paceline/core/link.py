"""The verifier's end of a session: what is committed, the tree of guesses beyond it, and what its drafter knows.

It is the authority on committed tokens. Every message names its session by a number that is never used again, and how
many committed tokens its sender knew; nothing is ever rolled back. The numbers of links stand in the forest's rows,
where one loop handles those of all sessions (`paceline.forest.links`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.core.errors import LocalProtocolError, RemoteProtocolError
from paceline.core.messages import CloseSession, Drafts, GenerateRequest, LaggingSession, OpenSession
from paceline.core.params import COUPLED, DRAFT_MODEL, EAGLE3
from paceline.core.tree import DraftTree
from paceline.forest import NONE, Committed, Forest, Ints, Links, Merged, rows_of

# Expected seconds from a commit to the first nodes of a drafter that knew it.
RESPONSE_S = 0.004


class ConnectedDrafter:
    """A drafter whose stream to a verifier is up.

    Args:
        links: Links of the verifier's sessions.
        response_s: Expected seconds from a commit to the first nodes of a drafter that knew it.
        wants_states: Whether it drafts from hidden states.
        labels: Labels of its metrics: its model and its address.
    """

    def __init__(
        self,
        links: Links,
        *,
        response_s: float = RESPONSE_S,
        wants_states: bool = False,
        labels: tuple[str, str] = ("", ""),
    ) -> None:
        self.number = links.new_drafter(response_s)
        self.wants_states = wants_states
        self.labels = labels
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
    """A session's link to its drafter.

    Args:
        request: The request that the session runs.
        number: The session's name in messages.
        tokens: Prompt and output so far; grows by `commit`.
        tree: The guesses beyond them.
        calibrations: Numbers of those of the sources that draft for it. Others take effect with the next `open`.
        acceptance: Name of the rule that judges guesses.
        address: Its drafter's address; empty: it has none.
        price: Least survival worth drafting for; 1: its drafter idles.
    """

    def __init__(
        self,
        request: GenerateRequest,
        number: int,
        tokens: list[int],
        tree: DraftTree,
        calibrations: Mapping[str, int],
        *,
        acceptance: str = COUPLED,
        address: str = "",
        price: float = 0.0,
    ) -> None:
        self.number, self.address = number, address
        self.tokens, self.tree, self.calibrations = tokens, tree, calibrations
        self._request = request
        self._acceptance = acceptance
        self._drafter: ConnectedDrafter | None = None
        self._row, self._links = tree.row, tree.forest.links
        # Committed positions whose hidden states were sent.
        self._num_states_sent = 0
        self._links.begin(self._row, number, price)

    @property
    def price(self) -> float:
        """Least survival worth drafting for; 1: its drafter idles."""
        return self._links.terms(self._row)[0]

    @property
    def sent_len(self) -> int:
        """Committed tokens that its drafter knows; 0: it does not know the session."""
        return self._links.sent_len(self._row)

    # Drafters

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
            The message to the first.
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
        """All that a drafter needs to start, or to start anew; the tree starts anew with it, as node ids do."""
        self._num_states_sent = 0
        price, room = self._links.open(self._row)
        self.tree.open(self.tokens, self.calibrations)
        request = self._request
        return OpenSession(
            session_id=request.session_id,
            epoch=request.epoch,
            number=self.number,
            token_ids=tuple(self.tokens),
            prompt_len=len(request.prompt_token_ids),
            price=price,
            room=room,
            traceparent=request.traceparent,
            **request.params()
            | {
                # Grammar and prediction are of no use to a drafter, and long.
                "sampling": replace(request.sampling, grammar=""),
                "speculation": replace(request.speculation, acceptance=self._acceptance, predicted_token_ids=()),
            },
        )

    def close(self) -> CloseSession | None:
        """The session is over for its drafter; returns what to send to it, if it knows the session."""
        known = self.sent_len
        self._links.forget(self._row)
        return CloseSession(number=self.number) if known and self._drafter is not None else None

    def catch_up(self, lagging: LaggingSession) -> OpenSession | None:
        """A drafter misses commits: it gets all since its last; returns the message that opens the session anew."""
        if not 1 <= lagging.have_len <= len(self.tokens):
            return self.open()
        self._links.resend_from(self._row, lagging.have_len)
        return None

    def next_states(self, num_computed: int, limit: int) -> range:
        """Positions whose hidden states are computed, of use to the drafter, and not sent yet; at most `limit`."""
        # A state is of use once the token after it is known.
        stop = min(num_computed, self.sent_len - 1, self._num_states_sent + limit)
        positions = range(self._num_states_sent, max(self._num_states_sent, stop))
        self._num_states_sent = positions.stop
        return positions

    # From the drafter

    def check(self, base_len: int, *, has_distributions: bool) -> None:
        """Checks what a drafter says of itself with its guesses.

        Args:
            base_len: Committed tokens that it knew.
            has_distributions: Whether each guess has one.

        Raises:
            RemoteProtocolError: The drafter claims to know tokens that were never committed, or leaves out the
                distributions where the acceptance rule needs them.
        """
        if self.tree.chain and not has_distributions:
            raise RemoteProtocolError(
                f"Drafts.distributions: session {self._request.session_id} is judged by the rule {self._acceptance},"
                " and needs that of every guess"
            )
        if not 1 <= base_len <= len(self.tokens):
            raise RemoteProtocolError(
                f"Drafts.base_lens: {base_len} of session {self._request.session_id} is not within its"
                f" {len(self.tokens)} committed tokens"
            )


def merge(
    forest: Forest, source: str, rows: Ints, drafts: Drafts, filtered: Mapping[int, DraftTree] | None = None
) -> Merged:
    """Adds a drafter's guesses that passed `SessionLink.check` to the trees.

    Args:
        forest: The sessions' forest.
        source: The drafter's method.
        rows: Theirs, in the order of the guesses.
        filtered: Trees that filter their guesses, by the places of their sessions in the rows.
    """
    filtered = filtered or {}
    firsts = [tree.num_nodes for tree in filtered.values()]
    merged = forest.merge(
        forest.number_of[source],
        rows,
        drafts.base_lens,
        drafts.ends,
        drafts.ids,
        drafts.parent_ids,
        drafts.tokens,
        drafts.confidences,
    )
    for first, (place, tree) in zip(firsts, filtered.items(), strict=True):
        start = int(drafts.ends[place - 1]) if place else 0
        num_masked = tree.filter_guesses(first, drafts, slice(start, int(drafts.ends[place])))
        merged.counts[place] += np.array((-num_masked, 0, num_masked), np.int32)
    return merged


def commit(
    forest: Forest, links: Sequence[SessionLink], ends: Sequence[int], tokens: list[int], chances: Sequence[float] = ()
) -> Committed:
    """Appends newly committed tokens to sessions, scores guesses by them, and prunes the trees.

    Args:
        links: Of the sessions.
        ends: Where the tokens of each end.
        chances: As of `StepCommit`.

    Raises:
        LocalProtocolError: There is no token to commit.
    """
    rows, start = list[int](), 0
    for link, end in zip(links, ends, strict=True):
        if end == start:
            raise LocalProtocolError("a commit holds at least one token")
        link.tokens += tokens[start:end]
        if link.tree.filters_guesses:
            link.tree.follow_commit(len(link.tokens))
        rows.append(link.tree.row)
        start = end
    return forest.commit(rows_of(rows), rows_of(ends), rows_of(tokens), np.array(chances, np.float64))

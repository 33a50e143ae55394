"""One session as a drafter's scheduler sees it: its end of the protocol, its pages, and its row in the forest."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.features import FeatureBuffer, Features, TokensAfterFirst
from paceline.core.messages import Commit, CommittedStates, LaggingSession, OpenSession
from paceline.core.pages import BLOCK_SIZE, BlockPool, SessionPages, block_hash, salted_root
from paceline.core.rejection_sampling import SparseDraft
from paceline.core.session import DrafterSession


class ScheduledDraftSession(DrafterSession):
    """A session from open to close.

    Args:
        opened: The message that opened it.
        pool: Pages for committed tokens.
        context_len: Most tokens that the draft model takes.
        feature_width: Of the features that the draft model takes; 0: it takes tokens alone.

    Attributes:
        link: Number of its verifier's stream.
        row: Of its tree in the forest.
        drafts: Distributions that the guesses of a chain were sampled from, by position.
        computed_to: Rows of its pages whose KV is there when the step under way ends.
        touched_s: When its verifier last sent something for it.
        parked: It found no place, and waits for its next commit or for another one's end.
        given_up: The draft model's logits were unusable: features are not requested again.
    """

    def __init__(self, opened: OpenSession, pool: BlockPool, *, context_len: int, feature_width: int = 0) -> None:
        super().__init__(opened)
        self.features = FeatureBuffer(feature_width, context_len) if feature_width else None
        self.pages = self._make_pages(pool, salted_root(opened.cache_salt))
        self.link, self.row = 0, -1
        self.drafts: dict[int, SparseDraft] = {}
        self.computed_to = 0
        self.touched_s = 0.0
        self.parked = False
        self.given_up = False
        self._context_len = context_len

    def _make_pages(self, pool: BlockPool, root: bytes | None) -> SessionPages:
        if self.features is None:
            return SessionPages(self.tokens, pool, before=root)
        return SessionPages(TokensAfterFirst(self.tokens), pool, before=block_hash(root, self.tokens[:1]))

    # Messages

    def receive_states(self, message: CommittedStates) -> None:
        """Takes in features of committed positions; a draft model that takes tokens alone has no use for them."""
        if self.features is not None:
            self.features.add(message)

    def receive(self, commit: Commit) -> list[int] | LaggingSession:
        """Applies a commit; see `DrafterSession.receive`."""
        outcome = super().receive(commit)
        self.drafts = {position: draft for position, draft in self.drafts.items() if position >= len(self.tokens)}
        return outcome

    def keep(self, base_len: int, kept: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """KV of nodes on the committed path goes to the session's pages, where there is room.

        Args:
            base_len: Tokens before the commit.
            kept: Slot and position of each, oldest first.

        Returns:
            What is to be moved, from slot to slot.
        """
        in_place = self.features is None and self.pages.num_computed == base_len
        if not kept or not in_place or not self.pages.reserve(base_len + len(kept)):
            return []
        moves = [(slot, self.pages.slot(position)) for slot, position in kept]
        self.pages.mark_computed(base_len + len(kept))
        return moves

    # What there is to compute

    @property
    def first_position(self) -> int:
        """Position of the token in the first row of its pages."""
        return 0 if self.features is None else 1

    @property
    def computable_to(self) -> int:
        """Rows of its pages that can be computed with what is here."""
        most = len(self.pages.tokens)
        return most if self.features is None else min(most, self.features.stop)

    @property
    def lost_features(self) -> bool:
        """True when it gave up KV that cannot be computed anew, because the features are gone."""
        return self.features is not None and not self.pages.blocks and self.features.start > 0

    @property
    def ready(self) -> bool:
        """True when its tree can grow: all committed tokens are computed, and more would fit."""
        return not self.pages.num_missing and len(self.tokens) < self._context_len

    @property
    def lags(self) -> bool:
        """True when tokens are to be computed, and can be."""
        missing = self.pages.num_missing > 0 and self.computable_to > self.pages.num_computed
        return not self.parked and missing and len(self.tokens) < self._context_len

    def prefix_features(self, start: int, stop: int) -> Features | None:
        """Features of the rows `start` to `stop` - 1 of its pages, if the draft model takes any."""
        return None if self.features is None else self.features.rows(start, stop)

    def settle(self) -> None:
        """The step is over: what it computed counts."""
        if self.computed_to > self.pages.num_computed:
            self.pages.mark_computed(self.computed_to)
        if self.features is not None:
            self.features.drop_before(self.pages.num_computed)

    # Room

    def fits(self, num_blocks: int) -> bool:
        """True when `num_blocks` pages hold all its tokens."""
        return len(self.pages.tokens) <= num_blocks * BLOCK_SIZE

    def take_pages(self) -> bool:
        """Takes pages for all its tokens, cached ones first; False when there are too few."""
        if not self.pages.blocks:
            self.computed_to = self.pages.attach_cached_prefix()
        return self.pages.reserve(len(self.pages.tokens))

    def give_up_pages(self) -> None:
        """Gives up all KV until the next commit; committed tokens stay, features do not."""
        self.pages.release()
        self.parked = True
        self.computed_to = 0

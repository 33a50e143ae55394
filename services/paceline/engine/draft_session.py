"""A session inside the drafter's engine: its end of the protocol, its pages, its row in the forest, and its sampler.

It is soft state: what a verifier has committed is all that it takes to build it anew. Its messages name it by a number
that is never used again, and say how many committed tokens their sender knew; nothing is ever rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.acceptance import SparseDraft, sparse_draft
from paceline.core.errors import RemoteProtocolError
from paceline.core.features import FeatureBuffer, Features
from paceline.core.messages import Commit, CommittedStates, LaggingSession, ModelIdentity, OpenSession
from paceline.core.noise import DRAFT_STREAM, uniforms
from paceline.core.pages import BLOCK_SIZE, BlockPool, SessionPages, block_hash, salted_root
from paceline.core.params import REJECTION
from paceline.engine.sampler import Logits, RowSampler


class DraftSession:
    """A session from open to close.

    Args:
        opened: The message that opened it.
        identity: The draft model.
        pool: Pages for committed tokens.
        feature_width: Width of the features that the draft model takes; 0: it takes tokens alone.

    Attributes:
        link: Number of its verifier's stream.
        row: Row of its tree in the forest.
        choice: How it ranks guesses, a `CHOICE`.
        by_logits: Whether it ranks them by logits alone; else rows go through `change`, or it draws from them.
        drafts: Distributions that the guesses of a chain were sampled from, by position.
        computed_to: Rows of its pages whose KV is there when the step under way ends.
        touched_s: When its verifier last sent something for it.
        parked: It found no place, and waits for its next commit or for another one's end.
        given_up: The draft model's logits were unusable: features are not requested again.

    Raises:
        LocalProtocolError: Its parameters name ids that the draft model lacks.
        RemoteProtocolError: It was opened without tokens.
    """

    def __init__(self, opened: OpenSession, identity: ModelIdentity, pool: BlockPool, feature_width: int = 0) -> None:
        if not opened.token_ids:
            raise RemoteProtocolError(f"session {opened.session_id} was opened without tokens")
        self.session_id, self.number = opened.session_id, opened.number
        self.tokens = list(opened.token_ids)
        self.sampling = opened.sampling
        self.chain = opened.speculation.acceptance == REJECTION
        self.price, self.room = opened.price, opened.room
        self.link, self.row = 0, -1
        self._context_len = identity.context_len
        self.features = FeatureBuffer(feature_width, identity.context_len) if feature_width else None
        # Tokens of its pages where the draft model takes features, whose rows begin with the second token.
        self._after_first = [] if self.features is None else self.tokens[1:]
        self.pages = self._make_pages(pool, salted_root(opened.cache_salt))
        self._sampler = RowSampler(
            opened.sampling,
            identity.vocab_size,
            identity.eos_token_ids,
            opened.token_ids[: opened.prompt_len],
            opened.token_ids[opened.prompt_len :],
        )
        self.choice = self._sampler.choice
        self.by_logits = not self.chain and not self._sampler.changes_rows
        # Neither its sampler, nor distributions, nor features follow its tokens.
        self._plain = self.by_logits and self.features is None
        self.drafts: dict[int, SparseDraft] = {}
        self.computed_to = 0
        self.touched_s = 0.0
        self.parked = False
        self.given_up = False

    def _make_pages(self, pool: BlockPool, root: bytes | None) -> SessionPages:
        if self.features is None:
            return SessionPages(self.tokens, pool, before=root)
        return SessionPages(self._after_first, pool, before=block_hash(root, self.tokens[:1]))

    # Messages

    def goes_on(self, base_len: int, count: int) -> bool:
        """Whether as many tokens behind so many others are simply its next ones."""
        plain = self._plain and not self.parked
        return plain and count > 0 and len(self.tokens) == base_len and base_len + count <= self._context_len

    def receive(self, commit: Commit) -> list[int] | LaggingSession:
        """Applies a commit.

        Returns:
            Its tokens that are new, none of a message received twice; a `LaggingSession` to send back when tokens
            before it are missing.

        Raises:
            RemoteProtocolError: It contradicts tokens that were committed before.
        """
        have_len = len(self.tokens)
        if commit.base_len > have_len:
            return LaggingSession(number=self.number, have_len=have_len)
        known = self.tokens[commit.base_len : commit.base_len + len(commit.token_ids)]
        if known != commit.token_ids[: len(known)]:
            raise RemoteProtocolError(
                f"session {self.session_id}: commit at {commit.base_len} contradicts earlier ones"
            )
        fresh = commit.token_ids[len(known) :]
        if fresh:
            self.price, self.room = commit.price, commit.room
            self.tokens += fresh
            if self.features is not None:
                self._after_first += fresh
            self.drafts = {position: draft for position, draft in self.drafts.items() if position >= len(self.tokens)}
            for token_id in fresh:
                self._sampler.push(token_id)
        return fresh

    def receive_states(self, message: CommittedStates) -> None:
        """Adds features of committed positions; a draft model that takes tokens alone has no use for them."""
        if self.features is not None:
            self.features.add(message)

    def keep(self, base_len: int, kept: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """KV of nodes on the committed path goes to the session's pages, where there is room.

        Args:
            base_len: Tokens before the commit.
            kept: Slot and position of each, oldest first.

        Returns:
            The moves from slot to slot.
        """
        in_place = self.features is None and self.pages.num_computed == base_len
        if not kept or not in_place or not self.pages.reserve(base_len + len(kept)):
            return []
        self.pages.mark_computed(base_len + len(kept))
        return self.pages.moved(kept)

    # Rows to compute

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
        return len(self.pages.tokens) == self.pages.num_computed and len(self.tokens) < self._context_len

    @property
    def lags(self) -> bool:
        """True when tokens are to be computed, and can be."""
        if self.parked or len(self.tokens) >= self._context_len:
            return False
        return self.computable_to > self.pages.num_computed

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

    # Guesses

    def change(self, row: Logits, path: Sequence[int]) -> None:
        """Changes a row of the draft model's logits `[vocab]` behind guesses as the request asks."""
        if self._sampler.changes_rows:
            self._sampler.change(row, path)

    def draw(self, path: Sequence[int], row: Logits, parent_id: int) -> int:
        """The one guess of a chain below a node, drawn once: another try would be another chance.

        The distribution that it was sampled from is kept in `drafts`.

        Args:
            path: Tokens from below the root down to the node.
            row: The logits `[vocab]` after it, changed already.
            parent_id: The node's id on the wire.

        Raises:
            UnusableLogitsError: The model's logits leave no token to choose.
        """
        position, base_len = len(self.tokens) + len(path), len(self.tokens)
        draft = self.drafts[position] = sparse_draft(self._sampler.probabilities(row))
        uniform, _ = uniforms(self.sampling.seed, DRAFT_STREAM, position, base_len, parent_id)
        return draft.sample(uniform)

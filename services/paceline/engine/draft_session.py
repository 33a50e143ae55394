"""One session inside the drafter's engine: what the scheduler knows of it, and its sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.calibration import CHAIN_CONFIDENCE, NUM_RANKED, confidences
from paceline.core.draft_plan import Offer
from paceline.core.drafted_trees import DraftedTrees
from paceline.core.messages import Commit, LaggingSession, ModelIdentity, OpenSession
from paceline.core.noise import DRAFT_STREAM, uniforms
from paceline.core.pages import BlockPool
from paceline.core.rejection_sampling import sparse_draft
from paceline.core.scheduled_draft_session import ScheduledDraftSession
from paceline.engine.sampler import RowSampler


class DraftSession(ScheduledDraftSession):
    """A session from open to close.

    Args:
        opened: The message that opened it.
        identity: The draft model.
        pool: Pages for committed tokens.
        feature_width: Of the features that the draft model takes; 0: it takes tokens alone.

    Attributes:
        choice: How it ranks guesses, a `CHOICE`; None: by more than logits, or it draws them, so by `offer`.

    Raises:
        LocalProtocolError: Its parameters name ids that the draft model lacks.
    """

    def __init__(
        self,
        opened: OpenSession,
        identity: ModelIdentity,
        pool: BlockPool,
        feature_width: int = 0,
    ) -> None:
        super().__init__(opened, pool, context_len=identity.context_len, feature_width=feature_width)
        tokens, prompt_len = opened.token_ids, opened.prompt_len
        self._sampler = RowSampler(
            opened.sampling,
            identity.vocab_size,
            identity.eos_token_ids,
            tokens[:prompt_len],
            tokens[prompt_len:],
        )
        self.choice = None if self.chain else self._sampler.choice

    def receive(self, commit: Commit) -> list[int] | LaggingSession:
        """Applies a commit; the sampler learns its tokens, too."""
        outcome = super().receive(commit)
        if isinstance(outcome, list):
            for token_id in outcome:
                self._sampler.push(token_id)
        return outcome

    def offer(
        self, trees: DraftedTrees[DraftSession], slot: int, path: Sequence[int], row: np.ndarray, width: int
    ) -> Offer:
        """The best `width` guesses below a node, from the draft model's logits `[vocab]` after it.

        Under a rule that judges chains it is one, drawn once for all: another try would be another chance.

        Args:
            trees: Where its tree is.
            slot: Of the node, or ROOT.
            path: Tokens from below the root down to it.

        Raises:
            UnusableLogitsError: The model's logits leave no token to choose.
        """
        if not self.chain:
            token_ids, weights = self._sampler.rank(row, len(self.tokens) + len(path), NUM_RANKED, path)
            sure = confidences(np.array(weights), greedy=self.sampling.temperature == 0.0)
            return Offer(self, slot, token_ids[:width], sure[:width].tolist())
        if not trees.wants_guesses(self, slot):
            return Offer(self, slot)
        return self._draw(slot, path, row, trees.node_id(self, slot))

    def _draw(self, slot: int, path: Sequence[int], row: np.ndarray, parent_id: int) -> Offer:
        """Samples one token from the very distribution that goes out with it."""
        draft = sparse_draft(self._sampler.distribution(row, path))
        position, base_len = len(self.tokens) + len(path), len(self.tokens)
        uniform, _ = uniforms(self.sampling.seed, DRAFT_STREAM, position, base_len, parent_id)
        return Offer(self, slot, [draft.sample(uniform)], [CHAIN_CONFIDENCE], (position, draft))

"""One session inside the drafter's engine: what the scheduler knows of it, and its sampler."""

from __future__ import annotations

import numpy as np

from paceline.core.confidence import CHAIN_CONFIDENCE, NUM_RANKED, confidences
from paceline.core.drafter_growth import Guesses
from paceline.core.messages import Commit, LaggingSession, ModelIdentity, OpenSession
from paceline.core.noise import DRAFT_STREAM, uniforms
from paceline.core.pages import BlockPool, SlotPool
from paceline.core.rejection_sampling import sparse_draft
from paceline.core.scheduled_draft_session import ScheduledDraftSession
from paceline.core.tree import Node, Pruning, path_tokens
from paceline.engine.sampler import RowSampler


class DraftSession(ScheduledDraftSession):
    """A session from open to close.

    Args:
        opened: The message that opened it.
        identity: The draft model.
        pool: Pages for committed tokens.
        scratch: Slots for tree nodes.
        feature_width: Of the features that the draft model takes; 0: it takes tokens alone.

    Raises:
        LocalProtocolError: Its parameters name ids that the draft model lacks.
    """

    def __init__(
        self,
        opened: OpenSession,
        identity: ModelIdentity,
        pool: BlockPool,
        scratch: SlotPool,
        feature_width: int = 0,
    ) -> None:
        super().__init__(opened, pool, scratch, context_len=identity.context_len, feature_width=feature_width)
        tokens, prompt_len = opened.token_ids, opened.prompt_len
        self._sampler = RowSampler(
            opened.sampling,
            identity.vocab_size,
            identity.eos_token_ids,
            tokens[:prompt_len],
            tokens[prompt_len:],
        )

    def receive(self, commit: Commit) -> Pruning | LaggingSession | None:
        """Applies a commit; the sampler learns its tokens, too."""
        base_len = len(self.tokens)
        outcome = super().receive(commit)
        for token_id in self.tokens[base_len:]:
            self._sampler.push(token_id)
        return outcome

    def expand(self, node: Node, row: np.ndarray, width: int) -> None:
        """Hangs the best `width` guesses below a node, from the draft model's logits `[vocab]` after it.

        Under a rule that judges chains it is one, drawn once for all: another try would be another chance.

        Raises:
            UnusableLogitsError: The model's logits leave no token to choose.
        """
        path = path_tokens(node)
        if not self.wants_guesses(node):
            self.grow_known(node)
        else:
            self.offer(node, self._draw(node, row, path) if self.chain else self._rank(node, row, path, width))

    def _rank(self, node: Node, row: np.ndarray, path: list[int], width: int) -> Guesses:
        token_ids, shares = self._sampler.rank(row, node.position + 1, NUM_RANKED, path)
        sure = confidences(shares, greedy=self.sampling.temperature == 0.0)
        return Guesses(ranked=list(zip(token_ids, sure, strict=True))[:width])

    def _draw(self, node: Node, row: np.ndarray, path: list[int]) -> Guesses:
        """Samples one token from the very distribution that goes out with it."""
        draft = sparse_draft(self._sampler.law(row, path))
        uniform, _ = uniforms(self.sampling.seed, DRAFT_STREAM, node.position + 1, len(self.tokens), node.node_id)
        return Guesses(ranked=[(draft.sample(uniform), CHAIN_CONFIDENCE)], draft=draft)

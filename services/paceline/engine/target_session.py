"""One session inside the verifier's engine: what the scheduler knows of it, its sampler and its sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.acceptance_rules import Verdict
from paceline.core.grammar import GrammarState, OutputGrammar
from paceline.core.messages import CommittedTokens, GenerateRequest, ModelIdentity, TokenFate
from paceline.core.noise import VERDICT_STREAM, uniforms
from paceline.core.pages import BlockPool
from paceline.core.params import COUPLED
from paceline.core.source_record import Gain
from paceline.engine.sampler import Logits, RowSampler
from paceline.engine.scheduled_session import ScheduledSession
from paceline.engine.source_interface import AnySource
from paceline.forest import Forest


class TargetSession(ScheduledSession):
    """A session from submission to its last token.

    Args:
        request: What to run.
        serial: Tells it from an earlier session of the same id.
        identity: The target model.
        drafter_address: Address of its drafter; empty: none.
        max_model_len: Most tokens, prompt and output.
        forest: Where its tree is; None: in one of its own.
        calibrations: Numbers of those of its sources.
        sources: Those inside the verifier.
        acceptance: Name of the rule that judges guesses.
        price: Of the last step.
        grammar: Of its sampling parameters, before the first token of the output; None: it has none.

    Attributes:
        choice: How the target chooses its tokens, a `CHOICE`.
        by_logits: Whether nothing else has a part in it.
        gains: What costly sources add to its steps, by source.
        followers: Sources at work on it, by name.
    """

    def __init__(
        self,
        request: GenerateRequest,
        serial: int,
        identity: ModelIdentity,
        *,
        drafter_address: str = "",
        max_model_len: int,
        pool: BlockPool,
        forest: Forest | None = None,
        calibrations: Mapping[str, int],
        sources: Sequence[AnySource] = (),
        acceptance: str = COUPLED,
        submitted_s: float,
        price: float = 0.0,
        grammar: GrammarState | None = None,
    ) -> None:
        sampling = request.sampling
        eos = () if sampling.ignore_eos else identity.eos_token_ids
        stop_ids = frozenset((*sampling.stop_token_ids, *eos))
        super().__init__(
            request,
            serial,
            pool,
            drafter_address=drafter_address,
            forest=forest,
            calibrations=calibrations,
            stop_ids=stop_ids,
            max_model_len=max_model_len,
            acceptance=acceptance,
            submitted_s=submitted_s,
            price=price,
            grammar=None
            if grammar is None
            else OutputGrammar(
                grammar, vocab_size=identity.vocab_size, stop_ids=stop_ids, eos_token_ids=identity.eos_token_ids
            ),
        )
        self._sampler = RowSampler(
            sampling,
            identity.vocab_size,
            identity.eos_token_ids,
            request.prompt_token_ids,
            request.committed_token_ids,
            self.grammar,
        )
        self.choice = self._sampler.choice
        self.by_logits = acceptance == COUPLED and not self._sampler.changes_rows
        self.gains: dict[str, Gain] = {}
        self.followers: dict[str, Any] = {
            source.name: follower for source in sources if (follower := source.follow(self)) is not None
        }
        if self.followers:
            self.tree.forest.links.guess_inside(self.tree.row)

    def rank(self, logits: Logits, position: int, count: int, path: Sequence[int]) -> tuple[list[int], list[float]]:
        """The best guesses at a position; see `RowSampler.rank`."""
        return self._sampler.rank(logits, position, count, path)

    def change(self, row: Logits, path: Sequence[int]) -> None:
        """Changes a row of logits behind guesses as the request asks; see `RowSampler.change`."""
        if self._sampler.changes_rows:
            self._sampler.change(row, path)

    def uniforms_at(self, position: int) -> tuple[float, float]:
        """Numbers in [0, 1) that no other round and no draft has seen, for a guess and for what takes its place."""
        seed, base_len = self.request.sampling.seed, self.committed_len
        return (
            uniforms(seed, VERDICT_STREAM, position, base_len)[0],
            uniforms(seed, VERDICT_STREAM, base_len, base_len)[1],
        )

    def require_usable(self, largest: float) -> None:
        """Refuses a row by its largest logit, once it is changed; see `RowSampler.require_usable`."""
        self._sampler.require_usable(largest)

    def accept(self, token_ids: Sequence[int], last: TokenFate, chances: tuple[float, ...] | None) -> Verdict:
        """What this round commits of the target's own tokens, up to the one that ends the text.

        Args:
            token_ids: Accepted guesses, and one more.
            last: How that one came about.
            chances: As of `Verdict`.
        """
        kept = tuple(self.until_end(token_ids))
        fates = (TokenFate.ACCEPTED,) * (len(token_ids) - 1) + (last,)
        self._fates = fates[: len(kept)]
        if self._sampler.changes_rows:
            for token_id in kept:
                self._sampler.push(token_id)
        return Verdict(token_ids=kept, chances=chances)

    def read_logprobs(self, token_ids: Sequence[int], logits: Logits) -> None:
        """Keeps the log probabilities of committed tokens for its client, from `[tokens, vocab]` as the model gave it.

        Raises:
            UnusableLogitsError: The model's logits leave no token to choose.
        """
        count = self.request.sampling.logprobs
        assert count is not None, "asked for"
        self._logprobs += [
            self._sampler.logprobs(row, token_id, count) for row, token_id in zip(logits, token_ids, strict=True)
        ]

    def judge_prompt(self, positions: range, logits: Logits) -> CommittedTokens:
        """Returns log probabilities of the tokens of the prompt that stand after some of its positions.

        Args:
            positions: Of the rows.
            logits: Their logits, `[len(positions), vocab]`.

        Raises:
            UnusableLogitsError: The model's logits leave no token to choose.
        """
        count = self.request.sampling.prompt_logprobs
        assert count is not None, "asked for, or there would be no rows"
        return self.hand_out_prompt(
            [
                self._sampler.logprobs(row, self.tokens[position + 1], count)
                for position, row in zip(positions, logits, strict=True)
            ]
        )

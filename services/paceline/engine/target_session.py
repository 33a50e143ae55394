"""One session inside the verifier's engine: what the scheduler knows of it, its sampler and its sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.core.acceptance_rules import RULES, TargetRows, Verdict, token_fates
from paceline.core.grammar import GrammarState, OutputGrammar
from paceline.core.messages import CommittedTokens, GenerateRequest, ModelIdentity, TokenFate
from paceline.core.noise import VERDICT_STREAM, uniforms
from paceline.core.pages import BlockPool
from paceline.core.params import COUPLED
from paceline.core.source_record import Gain
from paceline.core.tree import Node, path_tokens
from paceline.engine.sampler import RowSampler
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
        choice: How the target chooses its tokens, a `CHOICE`; None: by more than logits, so by `judge`.
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
        alone = sampling.logprobs is not None or acceptance != COUPLED
        self.choice = None if alone else self._sampler.choice
        self.gains: dict[str, Gain] = {}
        self.followers: dict[str, Any] = {
            source.name: follower for source in sources if (follower := source.follow(self)) is not None
        }
        if self.followers:
            self.tree.forest.links.guess_inside(self.tree.row)

    def rank(self, logits: np.ndarray, position: int, count: int, path: Sequence[int]) -> tuple[list[int], list[float]]:
        """The best guesses at a position; see `RowSampler.rank`."""
        return self._sampler.rank(logits, position, count, path)

    def judge(self, root: Node, verified: Sequence[Node], logits: Callable[[Node], np.ndarray]) -> Verdict:
        """What this round commits, up to the token that ends the text; remembers it as part of the prefix.

        Args:
            root: Stands for the last committed token.
            verified: Nodes below it whose rows this step computed, parents before children.
            logits: `[vocab]` of the root and of each of these.

        Raises:
            UnusableLogitsError: The model's logits leave no token to choose.
        """
        sampler = self._sampler
        rows = TargetRows(
            choose=lambda node: sampler.choose(logits(node), node.position + 1, path_tokens(node)),
            distribution=lambda node: sampler.distribution(logits(node), path_tokens(node)),
            uniforms=lambda count: _uniforms(self.request.sampling.seed, root.position + 1, count),
        )
        verdict = RULES[self.acceptance](root, verified, rows)
        node: Node | None = root
        kept: list[int] = []
        for token_id in verdict.token_ids:
            assert node is not None, "all tokens but the last are verified nodes"
            self._take(token_id, logits(node))
            kept.append(token_id)
            if self.ends_with(token_id):
                break
            node = node.children.get(token_id)
        self._fates = token_fates(root, verified, kept)
        return verdict if len(kept) == len(verdict.token_ids) else replace(verdict, token_ids=tuple(kept))

    def accept(self, token_ids: Sequence[int], last: TokenFate) -> Verdict:
        """What this round commits of the target's own tokens, up to the one that ends the text.

        Args:
            token_ids: Accepted guesses, and one more.
            last: How that one came about.
        """
        kept = tuple(self.until_end(token_ids))
        fates = (TokenFate.ACCEPTED,) * (len(token_ids) - 1) + (last,)
        self._fates = fates[: len(kept)]
        return Verdict(token_ids=kept)

    def judge_prompt(self, positions: range, logits: np.ndarray) -> CommittedTokens:
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

    def _take(self, token_id: int, row: np.ndarray) -> None:
        """Appends a token to the prefix; `row` is the one it was chosen from."""
        self._sampler.push(token_id)
        count = self.request.sampling.logprobs
        if count is not None:
            self._logprobs.append(self._sampler.logprobs(row, token_id, count))


def _uniforms(seed: int, base_len: int, count: int) -> list[float]:
    """Of one round: one for each guess, and the last for the token that follows."""
    places = [uniforms(seed, VERDICT_STREAM, base_len + place, base_len) for place in range(count)]
    return [*(each for each, _ in places[:-1]), places[0][1]]

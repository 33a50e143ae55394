"""One session inside the verifier's engine: its protocol state, its pages, its sampler and its clock marks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.calibration import Calibrations
from paceline.core.messages import (
    CommittedTokens,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ModelIdentity,
    PositionLogprobs,
    Timings,
)
from paceline.core.mixture import Gain
from paceline.core.pace import LinkPace
from paceline.core.session import VerifierSession
from paceline.engine.blocks import BlockPool
from paceline.engine.sampler import RowSampler
from paceline.engine.sequence import KVSequence
from paceline.engine.sources import AnySource, Follower

# With fewer tokens to go, waiting for drafts cannot pay for itself.
SHORT_REMAINDER = 10
NS_PER_S = 1e9


class TargetSession:
    """A session from submission to its last token.

    Args:
        request: What to run.
        serial: Tells it from an earlier session of the same id.
        identity: The target model.
        max_model_len: Most tokens, prompt and output.
        pool: Pages.
        calibrations: Of its sources.
        sources: Those inside the verifier.
        now_s: When it was submitted.
    """

    def __init__(
        self,
        request: GenerateRequest,
        serial: int,
        identity: ModelIdentity,
        max_model_len: int,
        pool: BlockPool,
        calibrations: Calibrations,
        sources: Sequence[AnySource],
        now_s: float,
    ) -> None:
        self.serial = serial
        sampling = request.sampling
        self.draft = VerifierSession(request, calibrations)
        # Survivals of the guesses these have made since the last commit, best first.
        self.own_survivals: list[float] = []
        # What costly sources add to its steps, by source.
        self.gains: dict[str, Gain] = {}
        self.pages = KVSequence(self.draft.tokens, pool)
        self.drafter_address = request.drafter_address if request.speculation.cap else ""
        self.prefilled_to = 0
        self.committed_s = now_s
        self.heard_s: float | None = None
        self.heard_len = self.draft.committed_len
        # What its drafter was told last: committed tokens, and the price.
        self.told_len = self.draft.committed_len
        self.told_price = 0.0
        self._sampler = RowSampler(
            sampling,
            identity.vocab_size,
            identity.eos_token_ids,
            request.prompt_token_ids,
            request.committed_token_ids,
        )
        eos = () if sampling.ignore_eos else identity.eos_token_ids
        self._stop_ids = frozenset((*sampling.stop_token_ids, *eos))
        self._last_len = min(self.draft.prompt_len + sampling.max_tokens, max_model_len)
        self.followers: dict[str, Follower] = {source.name: source.follow(self) for source in sources}
        self._chosen = self.draft.committed_len
        self._resumed_len = self.draft.committed_len
        self._finish: FinishReason | None = None
        self._logprobs: list[PositionLogprobs] = []
        self._submitted_s = now_s
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None
        self._num_cached = 0

    @property
    def is_decoding(self) -> bool:
        """True when only the root is left to compute, and a first token is out."""
        return self.pages.num_missing == 1 and self.draft.committed_len > self._resumed_len

    @property
    def lag_tokens(self) -> int:
        """Committed tokens that its drafter has not answered."""
        return self.draft.committed_len - self.heard_len

    def cap(self) -> int:
        """Most nodes that may be verified now; a node beyond the last token would be wasted."""
        return max(0, min(self.draft.request.speculation.cap, self._last_len - self.draft.committed_len - 1))

    @property
    def tokens(self) -> Sequence[int]:
        """Committed tokens, for sources."""
        return self.draft.tokens

    @property
    def prompt_len(self) -> int:
        """Prompt tokens, for sources."""
        return self.draft.prompt_len

    @property
    def greedy(self) -> bool:
        """Whether the target chooses without noise."""
        return self.draft.request.sampling.temperature == 0.0

    def rank(self, logits: np.ndarray, position: int, count: int, path: Sequence[int]) -> tuple[list[int], list[float]]:
        """The best guesses at a position; see `RowSampler.rank`."""
        return self._sampler.rank(logits, position, count, path)

    def close(self) -> None:
        """Frees pages, and lets the sources go."""
        self.pages.release()
        for follower in self.followers.values():
            follower.close()

    def may_wait(self) -> bool:
        """False for sessions that must not be delayed for drafts."""
        return self._last_len - self.draft.committed_len >= SHORT_REMAINDER

    def admit(self, now_s: float) -> bool:
        """Takes cached and fresh pages for all tokens so far; False, and nothing taken, when there are too few."""
        self.prefilled_to = self.pages.attach_cached_prefix()
        if not self.pages.reserve(self.draft.committed_len + 1):
            self.pages.release()
            return False
        if self._admitted_s is None:
            self._admitted_s = now_s
            self._num_cached = min(self.pages.num_cached, self.draft.prompt_len)
        return True

    def heard(self, arrived_s: float, pace: LinkPace) -> float | None:
        """Nodes beyond the committed tokens came; updates the link's pace.

        Returns:
            Seconds since the commit, for the first nodes after it.
        """
        first = self.heard_s is None
        elapsed_s = arrived_s - (self.committed_s if self.heard_s is None else self.heard_s)
        if first:
            pace.heard_response(elapsed_s)
        else:
            pace.heard_next(elapsed_s)
        self.heard_s = arrived_s
        return elapsed_s if first else None

    def choose(self, row: np.ndarray) -> int:
        """The target's token at the next position, from its logits `[vocab]`; remembers it as part of the prefix."""
        token_id = self._sampler.choose(row, self._chosen)
        self._sampler.push(token_id)
        self._chosen += 1
        count = self.draft.request.sampling.logprobs
        if count is not None:
            self._logprobs.append(self._sampler.logprobs(row, token_id, count))
        return token_id

    def ends(self, token_id: int) -> bool:
        """True when nothing may follow the token just chosen."""
        if token_id in self._stop_ids:
            self._finish = FinishReason.STOP
        elif self._chosen >= self._last_len:
            self._finish = FinishReason.LENGTH
        return self._finish is not None

    def hand_out(self, base_len: int, now_s: float) -> CommittedTokens:
        """The tokens committed since `base_len`, with the result if they are the last."""
        tokens = tuple(self.draft.tokens[base_len:])
        if self._finish is None:
            self.ends(tokens[-1])
        if self._first_token_s is None:
            self._first_token_s = now_s
        self.committed_s, self.heard_s = now_s, None
        logprobs, self._logprobs = tuple(self._logprobs), []
        return CommittedTokens(token_ids=tokens, logprobs=logprobs, result=self._result(now_s))

    def _result(self, now_s: float) -> GenerateResult | None:
        if self._finish is None:
            return None
        admitted_s = self._submitted_s if self._admitted_s is None else self._admitted_s
        first_s = now_s if self._first_token_s is None else self._first_token_s
        return GenerateResult(
            finish_reason=self._finish,
            num_prompt_tokens=self.draft.prompt_len,
            num_cached_tokens=self._num_cached,
            num_generated_tokens=self.draft.committed_len - self._resumed_len,
            speculation=self.draft.tally.record(),
            timings=Timings(
                queue_ns=int((admitted_s - self._submitted_s) * NS_PER_S),
                prefill_ns=int((first_s - admitted_s) * NS_PER_S),
                decode_ns=int((now_s - first_s) * NS_PER_S),
            ),
        )

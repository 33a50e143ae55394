"""One session inside the verifier's engine: its protocol state, its pages, its sampler and its clock marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.calibration import Calibrations
from paceline.core.holdings import Holdings
from paceline.core.link import SessionLink
from paceline.core.messages import (
    CommittedTokens,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ModelIdentity,
    PositionLogprobs,
    Timings,
    TokenFate,
)
from paceline.core.mixture import Gain
from paceline.core.noise import VERDICT_STREAM, uniforms
from paceline.core.pages import BlockPool, SessionPages, salted_root
from paceline.core.rules import Rule, Verdict, token_fates
from paceline.core.session import VerifierSession
from paceline.core.tree import Node
from paceline.engine.sampler import RowSampler
from paceline.engine.sources import AnySource, Follower
from paceline.engine.target_events import TracedRound, TracedStart

# With fewer tokens to go, waiting for drafts cannot pay for itself.
SHORT_REMAINDER = 10
NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The target's rows of one round, as the acceptance rule sees them; see `paceline.core.rules.TargetRows`."""

    root: Node
    logits: Callable[[Node], np.ndarray]
    sampler: RowSampler
    seed: int

    def choose(self, node: Node) -> int:
        """The target's choice, by the coupled noise."""
        return self.sampler.choose(self.logits(node), node.position + 1, self._path(node))

    def law(self, node: Node) -> np.ndarray:
        """Processed probabilities, `[vocab]`."""
        return self.sampler.law(self.logits(node), self._path(node))

    def uniforms(self, count: int) -> list[float]:
        """One for each guess, and the last for the token that follows."""
        base_len = self.root.position + 1
        places = [uniforms(self.seed, VERDICT_STREAM, base_len + place, base_len) for place in range(count)]
        return [*(each for each, _ in places[:-1]), places[0][1]]

    def _path(self, node: Node) -> list[int]:
        """Tokens from below the root down to the node."""
        path: list[int] = []
        while node is not self.root:
            path.append(node.token_id)
            assert node.parent is not None, "every verified node hangs below the root"
            node = node.parent
        return path[::-1]


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
        rule: What judges guesses.
        now_s: Now.
        arrived_s: When it was submitted; None: now. Steps are not interrupted, so that may be one ago.
        price: Of the last step.
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
        rule: Rule,
        now_s: float,
        arrived_s: float | None = None,
        *,
        price: float = 0.0,
    ) -> None:
        self.serial = serial
        self.traced = bool(request.traceparent)
        self._rule = rule
        sampling = request.sampling
        self.draft = VerifierSession(request, calibrations, rule.name)
        # Survivals of the guesses these have made since the last commit, best first.
        self.own_survivals: list[float] = []
        self.holdings = Holdings()
        # What costly sources add to its steps, by source.
        self.gains: dict[str, Gain] = {}
        self.pages = SessionPages(self.draft.tokens, pool, before=salted_root(request.cache_salt))
        self.link = SessionLink(self.draft, request.drafter_address if request.speculation.cap else "", price=price)
        self.prefilled_to = 0
        self.committed_s = now_s
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
        self._begun = False
        # Of a suspect: when its turn came, and whether its gateway knows that.
        self.called_up_s: float | None = None
        self.heard = False
        self._finish: FinishReason | None = None
        self._logprobs: list[PositionLogprobs] = []
        self._fates: tuple[TokenFate, ...] = ()
        self._submitted_s = now_s if arrived_s is None else arrived_s
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None
        self._num_cached = 0

    @property
    def is_decoding(self) -> bool:
        """True when only the root is left to compute, and a first token is out."""
        return self.pages.num_missing == 1 and self.draft.committed_len > self._resumed_len

    @property
    def is_suspect(self) -> bool:
        """True while it may be what ended an engine before: it has not got through its prompt here."""
        return self.draft.request.suspect and self.draft.committed_len == self._resumed_len

    def call_up(self, now_s: float) -> None:
        """A suspect's turn has come."""
        if self.called_up_s is None:
            self.called_up_s = now_s

    def begins(self) -> CommittedTokens | None:
        """What says that its rows are computed now; None where that has been said."""
        if self._begun:
            return None
        self._begun = True
        return CommittedTokens(token_ids=(), offset=self.draft.num_generated, running=True)

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
    def cache_salt(self) -> str:
        """Whose texts it may be guessed from, for sources."""
        return self.draft.request.cache_salt

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

    def judge(self, verified: Sequence[Node], logits: Callable[[Node], np.ndarray]) -> Verdict:
        """What this round commits, up to the token that ends the text; remembers it as part of the prefix.

        Args:
            verified: Nodes whose rows this step computed, parents before children.
            logits: `[vocab]` of the root and of each of these.

        Raises:
            UnusableLogitsError: The model gave nothing to choose from.
        """
        root = self.draft.tree.root
        rows = _Rows(root=root, logits=logits, sampler=self._sampler, seed=self.draft.request.sampling.seed)
        verdict = self._rule.judge(root, verified, rows)
        node: Node | None = root
        kept: list[int] = []
        for token_id in verdict.token_ids:
            assert node is not None, "all tokens but the last are verified nodes"
            self._take(token_id, logits(node))
            kept.append(token_id)
            if self._ends(token_id):
                break
            node = node.children.get(token_id)
        self._fates = token_fates(root, verified, kept)
        return verdict if len(kept) == len(verdict.token_ids) else replace(verdict, token_ids=tuple(kept))

    def _take(self, token_id: int, row: np.ndarray) -> None:
        """Appends a token to the prefix; `row` is the one it was chosen from."""
        self._sampler.push(token_id)
        self._chosen += 1
        count = self.draft.request.sampling.logprobs
        if count is not None:
            self._logprobs.append(self._sampler.logprobs(row, token_id, count))

    def _ends(self, token_id: int) -> bool:
        """True when nothing may follow the token just taken."""
        if token_id in self._stop_ids:
            self._finish = FinishReason.STOP
        elif self._chosen >= self._last_len:
            self._finish = FinishReason.LENGTH
        return self._finish is not None

    def hand_out(self, base_len: int, now_s: float) -> CommittedTokens:
        """The tokens committed since `base_len`, with the result if they are the last."""
        tokens = tuple(self.draft.tokens[base_len:])
        if self._first_token_s is None:
            self._first_token_s = now_s
        self.committed_s = now_s
        logprobs, self._logprobs = tuple(self._logprobs), []
        return CommittedTokens(
            token_ids=tokens,
            offset=base_len - self.draft.prompt_len,
            fates=self._fates,
            logprobs=logprobs,
            result=self._result(now_s),
            lossy=self._rule.lossy,
        )

    def start(self) -> TracedStart:
        """How it came to the token just handed out, for its trace."""
        assert self._admitted_s is not None, "tokens are for sessions that have a place"
        return TracedStart(
            serial=self.serial,
            submitted_s=self._submitted_s,
            admitted_s=self._admitted_s,
            at_s=self.committed_s,
            num_cached_tokens=self._num_cached,
        )

    def round(self, gamma: int, num_accepted: int, batch_size: int) -> TracedRound:
        """The step that committed the tokens just handed out, for its trace."""
        return TracedRound(
            serial=self.serial,
            at_s=self.committed_s,
            gamma=gamma,
            num_accepted=num_accepted,
            batch_size=batch_size,
            price=self.link.price,
        )

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
            speculation=self.draft.tally.record(lossy=self._rule.lossy),
            timings=Timings(
                queue_ns=int((admitted_s - self._submitted_s) * NS_PER_S),
                prefill_ns=int((first_s - admitted_s) * NS_PER_S),
                decode_ns=int((now_s - first_s) * NS_PER_S),
            ),
        )

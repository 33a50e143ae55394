"""A session inside the verifier's engine: its tokens and tree, pages, link to a drafter, sampler, and clock marks.

"Prefill" and "decode" are not two worlds: `pages.num_computed` catches up with the committed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.grammar import GrammarState, OutputGrammar
from paceline.core.link import SessionLink
from paceline.core.messages import (
    NS_PER_S,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ModelIdentity,
    PositionLogprobs,
    SessionEvent,
    Timings,
)
from paceline.core.noise import VERDICT_STREAM, uniforms
from paceline.core.pages import BlockPool, SessionPages, salted_root
from paceline.core.params import COUPLED, REJECTION
from paceline.core.target_events import SpeculationTally, TracedRound, TracedStart
from paceline.core.tree import DraftTree
from paceline.engine.sampler import Logits, RowSampler
from paceline.engine.source_interface import AnySource
from paceline.forest import Forest

# With fewer tokens to go, waiting for drafts cannot pay for itself.
SHORT_REMAINDER = 10


class TargetSession:
    """A session from submission to its last token.

    Args:
        request: The request to run.
        number: Its name; grows with every session.
        identity: The target model.
        drafter_address: Address of its drafter, unless it wants no speculation; empty: none.
        max_model_len: Most tokens, prompt and output.
        forest: Where its tree is.
        calibrations: Numbers of those of its sources.
        sources: Draft sources inside the verifier.
        acceptance: Name of the rule that judges guesses.
        price: Price of the last step.
        grammar: Grammar of its sampling parameters, before the first token of the output; None: it has none.
        tally: Gets its speculation counts; None: a new one.

    Attributes:
        prefilled_to: Committed tokens whose KV is there when the step under way ends.
        num_judged: Prompt tokens, but for the first, whose log probabilities have been handed out.
        judges_prompt: Whether some are still to be handed out.
        choice: How the target chooses its tokens, a `CHOICE`.
        by_logits: Whether nothing else has a part in it.
        finish: Why its last token has been chosen; None: that is still to come.
        logprobs: Log probabilities of committed tokens that its client has not got.
        first_token_s: When it first got a token here.
        committed_s: When it last got one.
        announced: Whether its client knows that its rows are computed.
        followers: Sources at work on it, by name.
    """

    def __init__(
        self,
        request: GenerateRequest,
        number: int,
        identity: ModelIdentity,
        *,
        drafter_address: str = "",
        max_model_len: int,
        pool: BlockPool,
        forest: Forest,
        calibrations: Mapping[str, int],
        sources: Sequence[AnySource] = (),
        acceptance: str = COUPLED,
        submitted_s: float,
        price: float = 0.0,
        grammar: GrammarState | None = None,
        tally: SpeculationTally | None = None,
    ) -> None:
        self.request, self.number, self.session_id = request, number, request.session_id
        self.traced = bool(request.traceparent)
        self.tokens = [*request.prompt_token_ids, *request.committed_token_ids]
        self.prompt_len = len(request.prompt_token_ids)
        self._stop_ids = _stop_ids(request, identity)
        self.grammar = None if grammar is None else _output_grammar(grammar, identity, self._stop_ids)
        self.tree = self._make_tree(forest, calibrations, chain=acceptance == REJECTION)
        address = drafter_address if request.speculation.cap else ""
        self.link = SessionLink(
            request, number, self.tokens, self.tree, calibrations, acceptance=acceptance, address=address, price=price
        )
        self.pages = SessionPages(self.tokens, pool, before=salted_root(request.cache_salt))
        self.prefilled_to = 0
        self.num_judged = 0
        self.judges_prompt = request.num_to_judge > 0
        self._last_len = min(self.prompt_len + request.sampling.max_tokens, max_model_len)
        self._bound_guesses()
        self._resumed_len = len(self.tokens)
        # Tokens chosen so far: those committed, and those of the verdict that is being passed.
        self._num_chosen = len(self.tokens)
        self._sampler = RowSampler(
            request.sampling,
            identity.vocab_size,
            identity.eos_token_ids,
            request.prompt_token_ids,
            request.committed_token_ids,
            self.grammar,
        )
        self.choice = self._sampler.choice
        self.by_logits = acceptance == COUPLED and not self._sampler.changes_rows
        self.tally = SpeculationTally() if tally is None else tally
        self.finish: FinishReason | None = None
        self.logprobs: list[PositionLogprobs] = []
        self.announced = False
        self._num_cached = 0
        self._submitted_s = self.committed_s = submitted_s
        self._admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.followers = self._followers_of(sources)

    def _make_tree(self, forest: Forest, calibrations: Mapping[str, int], *, chain: bool) -> DraftTree:
        # A chain is judged by the distribution its guesses were drawn from; dropping a guess unjudged would bias that.
        can_follow = None if self.grammar is None or chain else self.grammar.permits
        return DraftTree(forest, self.tokens, calibrations, chain=chain, can_follow=can_follow)

    def _bound_guesses(self) -> None:
        self.tree.forest.links.bound(
            self.tree.row,
            most_guesses=self.request.speculation.cap,
            last_len=self._last_len,
            waits_up_to=self._last_len - SHORT_REMAINDER,
        )

    def _followers_of(self, sources: Sequence[AnySource]) -> dict[str, Any]:
        followers = {source.name: follower for source in sources if (follower := source.follow(self)) is not None}
        if followers:
            self.tree.forest.links.guess_inside(self.tree.row)
        return followers

    @property
    def committed_len(self) -> int:
        """Prompt and generated tokens."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Generated tokens, those of earlier owners included."""
        return len(self.tokens) - self.prompt_len

    @property
    def tenant(self) -> str:
        """The session's tenant; tenants share places and prompt rows."""
        return self.request.tenant

    @property
    def order(self) -> tuple[int, int]:
        """Its place among its tenant's: lower ones get places and pages first, and keep them longest."""
        return self.request.priority, self.number

    @property
    def is_decoding(self) -> bool:
        """True when only the root is left to compute, and a first token is out."""
        return (length := len(self.tokens)) - self.pages.num_computed == 1 and length > self._resumed_len

    @property
    def output(self) -> tuple[int, Sequence[int]]:
        """Where in its tokens the output begins, and what its client predicts of it."""
        return self.prompt_len, self.request.speculation.predicted_token_ids

    @property
    def greedy(self) -> bool:
        """Whether the target chooses without noise."""
        return self.request.sampling.temperature == 0.0

    @property
    def runs_ahead(self) -> bool:
        """Whether the row of its next token needs nothing of the host but a page, whichever token that is."""
        return self.by_logits and self.request.sampling.logprobs is None

    @property
    def ends_next(self) -> bool:
        """Whether its next token is its last, whichever it is."""
        return self._num_chosen + 1 >= self._last_len

    @property
    def ended(self) -> bool:
        """Whether its last token has been chosen."""
        return self.finish is not None

    def announce(self) -> SessionEvent:
        """Announces that its rows are computed now."""
        self.announced = True
        return SessionEvent(running=True)

    def admit(self, now_s: float) -> bool:
        """Takes cached and fresh pages for all tokens so far; False, and nothing taken, when there are too few."""
        self.prefilled_to = self.pages.attach_cached_prefix(self.num_judged if self.judges_prompt else None)
        if not self.pages.reserve(self.committed_len + 1):
            self.pages.release()
            return False
        if self._admitted_s is None:
            self._admitted_s = now_s
            self._num_cached = min(self.pages.num_cached, self.prompt_len)
        return True

    # Choosing

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

    def accept(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Of accepted guesses and one token more, those that the step commits: up to the one that ends the text."""
        room = max(1, self._last_len - self._num_chosen)
        if len(token_ids) >= room or not self._stop_ids.isdisjoint(token_ids):
            token_ids = self._until_end(token_ids, room)
        self._num_chosen += len(token_ids)
        if self._sampler.changes_rows:
            for token_id in token_ids:
                self._sampler.push(token_id)
        return token_ids

    def _until_end(self, token_ids: Sequence[int], room: int) -> Sequence[int]:
        for count, token_id in enumerate(token_ids, start=1):
            if token_id in self._stop_ids or count == room:
                self.finish = FinishReason.STOP if token_id in self._stop_ids else FinishReason.LENGTH
                return token_ids[:count]
        return token_ids

    def read_logprobs(self, token_ids: Sequence[int], logits: Logits) -> None:
        """Keeps the log probabilities of committed tokens for its client, from `[tokens, vocab]` as the model gave it.

        Raises:
            UnusableLogitsError: The model's logits leave no token to choose.
        """
        count = self.request.sampling.logprobs
        assert count is not None, "asked for"
        self.logprobs += [
            self._sampler.logprobs(row, token_id, count) for row, token_id in zip(logits, token_ids, strict=True)
        ]

    def judge_prompt(self, positions: range, logits: Logits) -> list[PositionLogprobs]:
        """Returns log probabilities of the tokens of the prompt that stand after some of its positions.

        Args:
            positions: Positions of the rows.
            logits: Their logits, `[len(positions), vocab]`.

        Raises:
            UnusableLogitsError: The model's logits leave no token to choose.
        """
        count = self.request.sampling.prompt_logprobs
        assert count is not None, "asked for, or there would be no rows"
        return [
            self._sampler.logprobs(row, self.tokens[position + 1], count)
            for position, row in zip(positions, logits, strict=True)
        ]

    # Reports to clients and traces

    def hand_out_prompt(self, logprobs: Sequence[PositionLogprobs]) -> SessionEvent:
        """The log probabilities of further tokens of the prompt."""
        first = self.num_judged + 1
        self.num_judged += len(logprobs)
        self.judges_prompt = self.num_judged < self.request.num_to_judge
        return SessionEvent(prompt_logprobs=tuple(logprobs), prompt_offset=first)

    def take_event(self) -> SessionEvent:
        """Log probabilities of the tokens just committed, and the result if these are the last."""
        logprobs, self.logprobs = tuple(self.logprobs), []
        return SessionEvent(logprobs, None if self.finish is None else self._result(self.finish))

    def close(self) -> None:
        """Frees its pages, and its row in the forest."""
        self.pages.release()
        self.tree.close()

    def start(self) -> TracedStart:
        """How it came to the token just handed out, for its trace."""
        assert self._admitted_s is not None, "tokens are for sessions that have a place"
        return TracedStart(
            number=self.number,
            submitted_s=self._submitted_s,
            admitted_s=self._admitted_s,
            at_s=self.committed_s,
            num_cached_tokens=self._num_cached,
        )

    def round(self, **step: Any) -> TracedRound:
        """The step that committed the tokens just handed out, for its trace; `step` has its other fields."""
        return TracedRound(number=self.number, at_s=self.committed_s, price=self.link.price, **step)

    def _result(self, finish: FinishReason) -> GenerateResult:
        admitted_s = self._submitted_s if self._admitted_s is None else self._admitted_s
        first_s = self.committed_s if self.first_token_s is None else self.first_token_s
        return GenerateResult(
            finish_reason=finish,
            num_prompt_tokens=self.prompt_len,
            num_cached_tokens=self._num_cached,
            num_generated_tokens=self.committed_len - self._resumed_len,
            speculation=self.tally.record(),
            timings=Timings(
                queue_ns=int((admitted_s - self._submitted_s) * NS_PER_S),
                prefill_ns=int((first_s - admitted_s) * NS_PER_S),
                decode_ns=int((self.committed_s - first_s) * NS_PER_S),
            ),
        )


def _stop_ids(request: GenerateRequest, identity: ModelIdentity) -> frozenset[int]:
    """Tokens that end a session."""
    eos = () if request.sampling.ignore_eos else identity.eos_token_ids
    return frozenset((*request.sampling.stop_token_ids, *eos))


def _output_grammar(grammar: GrammarState, identity: ModelIdentity, stop_ids: frozenset[int]) -> OutputGrammar:
    return OutputGrammar(
        grammar, vocab_size=identity.vocab_size, stop_ids=stop_ids, eos_token_ids=identity.eos_token_ids
    )

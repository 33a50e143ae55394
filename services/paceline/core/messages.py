"""Messages between verifier, drafter and gateway, as plain values; `paceline.wire` encodes them."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.acceptance import SparseDraft
from paceline.core.errors import PacelineError
from paceline.core.params import DRAFT_MODEL, EAGLE3, SessionParams

DIGEST_CHARS = 32


class TokenDigest:
    """The digest of tokens as they come: the first 32 hex digits of SHA-256 over little-endian 32-bit ids."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        # Few sessions are ever asked for their digest.
        self._unread: list[int] = []

    def add(self, token_ids: Sequence[int]) -> None:
        self._unread += token_ids

    def hex(self) -> str:
        """Returns the digest of all tokens so far."""
        self._hash.update(np.asarray(self._unread, dtype="<u4").tobytes())
        self._unread.clear()
        return self._hash.hexdigest()[:DIGEST_CHARS]


def token_digest(token_ids: Sequence[int]) -> str:
    """Returns the digest of tokens; see `TokenDigest`."""
    digest = TokenDigest()
    digest.add(token_ids)
    return digest.hex()


Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

# Roles of replicas, in the registry and in certificates.
GATEWAY, VERIFIER, DRAFTER = "gateway", "verifier", "drafter"
REPLICA_ROLES = (GATEWAY, VERIFIER, DRAFTER)

NS_PER_S = 1e9

# First words of `ModelIdentity.arithmetic` where logits depend on who shares the batch: such engines guarantee a text's
# distribution, and not its tokens.
VLLM_ARITHMETIC, CUDA_ARITHMETIC = "vllm ", "cuda "
# Arithmetic of devices that compute nothing.
SIMULATED = "simulated"


def distribution_only(arithmetic: str) -> bool:
    """Whether an engine of this arithmetic guarantees a text's distribution, and not its tokens."""
    return arithmetic.startswith((VLLM_ARITHMETIC, CUDA_ARITHMETIC))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """The model's identity, which must agree between replicas before they are paired.

    A verifier and a drafter need the same vocabulary; verifiers that take over one another's sessions need the same
    `weights_hash` too, or the text would change, and the same `arithmetic`, or its last bits could. `states_hash` names
    the hidden states that a verifier hands out, or that a drafter drafts from; empty: none.

    Attributes:
        arithmetic: Device's kind and versions that decide the last bits of logits; of an engine that is not ours, its
            name first.
        methods: Ways to draft that a verifier serves; none: unknown.
        acceptance_rules: Rules that a verifier serves, its default first; none: unknown.
    """

    name: str
    vocab_hash: str
    vocab_size: int
    context_len: int
    eos_token_ids: tuple[int, ...] = ()
    weights_hash: str = ""
    states_hash: str = ""
    arithmetic: str = ""
    methods: tuple[str, ...] = ()
    acceptance_rules: tuple[str, ...] = ()

    @property
    def draft_method(self) -> str:
        """The method that a drafter of this model serves."""
        return EAGLE3 if self.states_hash else DRAFT_MODEL

    @property
    def simulated(self) -> bool:
        """Whether nothing is computed: steps take a device's time, and texts are made up."""
        return self.arithmetic == SIMULATED

    @property
    def exact(self) -> bool:
        """Whether the same seed brings the same text, whatever is drafted and served beside it."""
        return not distribution_only(self.arithmetic)

    def drafts_for(self, target: ModelIdentity) -> bool:
        """Whether it has a target's vocabulary, and needs no hidden states but those that its verifier hands out."""
        return self.vocab_hash == target.vocab_hash and self.states_hash in ("", target.states_hash)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession(SessionParams):
    """Everything a drafter needs to know of a session; its speculation names the acceptance rule.

    `number` is its name in all other messages, from 1 on and never reused; `traceparent` is the W3C trace context of a
    session that is traced.
    """

    session_id: str
    epoch: int
    number: int
    token_ids: tuple[int, ...]
    prompt_len: int
    price: float
    room: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStates:
    """The target's fused hidden states at committed positions from `start` on, for drafters that draft from them.

    Args:
        width: Numbers a position.
        values: bfloat16 [n, width], little-endian.
    """

    number: int
    start: int
    width: int
    values: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """A session ended."""

    number: int


def sizes_of(ends: Ints) -> Ints:
    """How long stretches are of which the ends are known; `np.diff` takes eight times as long."""
    sizes = ends.copy()
    sizes[1:] -= ends[:-1]
    return sizes


class Commit(NamedTuple):
    """A session's committed tokens, and the drafts to make for it; see `Commits`."""

    number: int
    base_len: int
    token_ids: list[int]
    price: float
    room: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Commits:
    """Committed tokens of several sessions, in columns; session by session, oldest first.

    Attributes:
        numbers: int32 `[sessions]`, see `OpenSession`.
        base_lens: int32 `[sessions]`, committed tokens before these.
        ends: int32 `[sessions]`, where the tokens of each end.
        tokens: int32 `[tokens]`.
        prices: float64 `[sessions]`, least survival worth drafting for; 1: the drafter idles.
        rooms: int32 `[sessions]`, most nodes ahead of the committed tokens.
    """

    numbers: Ints
    base_lens: Ints
    ends: Ints
    tokens: Ints
    prices: Floats
    rooms: Ints

    @property
    def num_sessions(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Commit]:
        tokens, start = self.tokens.tolist(), 0
        counts = (self.numbers, self.base_lens, self.ends, self.rooms)
        for number, base_len, end, room, price in zip(
            *(column.tolist() for column in counts), self.prices.tolist(), strict=True
        ):
            yield Commit(number, base_len, tokens[start:end], price, room)
            start = end

    def only(self, sessions: Bools) -> Commits:
        """Keeps the commits of some sessions, bool `[sessions]`."""
        return Commits(
            numbers=self.numbers[sessions],
            base_lens=self.base_lens[sessions],
            ends=np.cumsum(sizes_of(self.ends)[sessions], dtype=np.int32),
            tokens=self.tokens[sessions.repeat(sizes_of(self.ends))],
            prices=self.prices[sessions],
            rooms=self.rooms[sessions],
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Drafts:
    """New nodes of the trees of some sessions, in columns; nodes come session by session, parents before children.

    Attributes:
        numbers: int32 `[sessions]`, see `OpenSession`.
        base_lens: int32 `[sessions]`, committed tokens that the drafter knew.
        ends: int32 `[sessions]`, where the nodes of each end.
        ids: int32 `[nodes]`, from 1 on.
        parent_ids: int32 `[nodes]`; 0: the last committed token that the drafter knew.
        tokens: int32 `[nodes]`, the guesses.
        confidences: float64 `[nodes]`, from 0 to 1.
        distributions: Distribution each guess was sampled from, for rules that ask for it; else none.
    """

    numbers: Ints
    base_lens: Ints
    ends: Ints
    ids: Ints
    parent_ids: Ints
    tokens: Ints
    confidences: Floats
    distributions: Sequence[SparseDraft] = ()

    @property
    def num_sessions(self) -> int:
        return len(self.numbers)

    @property
    def num_nodes(self) -> int:
        return len(self.ids)

    @property
    def sizes(self) -> Ints:
        """Nodes of each session, int32 `[sessions]`."""
        return sizes_of(self.ends)

    @classmethod
    def joined(cls, parts: Sequence[Drafts]) -> Drafts:
        """All of some messages, without distributions where there are several; a session may be in more than one."""
        if len(parts) == 1:
            return parts[0]
        before = accumulate((each.num_nodes for each in parts), initial=0)
        ends = np.concatenate([each.ends + count for each, count in zip(parts, before, strict=False)])
        each_has = [(each.numbers, each.base_lens, each.ids, each.parent_ids, each.tokens) for each in parts]
        numbers, base_lens, ids, parent_ids, tokens = map(np.concatenate, zip(*each_has, strict=True))
        return cls(
            numbers=numbers,
            base_lens=base_lens,
            ends=ends,
            ids=ids,
            parent_ids=parent_ids,
            tokens=tokens,
            confidences=np.concatenate([each.confidences for each in parts]),
        )

    def only(self, sessions: Bools, nodes: Bools | None = None) -> Drafts:
        """Keeps the drafts of some sessions.

        Args:
            sessions: bool `[sessions]`.
            nodes: bool `[nodes]`, which of theirs; None: all.
        """
        kept = sessions.repeat(self.sizes)
        if nodes is not None:
            kept &= nodes
        num_before = np.concatenate((np.zeros(1, np.int32), np.cumsum(kept, dtype=np.int32)))
        return Drafts(
            numbers=self.numbers[sessions],
            base_lens=self.base_lens[sessions],
            ends=num_before[self.ends[sessions]],
            ids=self.ids[kept],
            parent_ids=self.parent_ids[kept],
            tokens=self.tokens[kept],
            confidences=self.confidences[kept],
            distributions=[*compress(self.distributions, kept.tolist())],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingSession:
    """The drafter misses commits after `have_len` tokens; 0: it does not know the session."""

    number: int
    have_len: int


ToDrafter = OpenSession | CommittedStates | Commits | CloseSession
ToVerifier = Drafts | LaggingSession


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(SessionParams):
    """A session for a verifier to run; it is refused where it would wait longer than `max_wait_s` (None: any).

    A `whole` text is handed to the client in one piece, so that its tokens may gather. `traceparent` is the W3C trace
    context it runs in.
    """

    session_id: str
    epoch: int
    prompt_token_ids: tuple[int, ...]
    committed_token_ids: tuple[int, ...] = ()
    max_wait_s: float | None = None
    whole: bool = False
    traceparent: str = ""

    @property
    def num_to_judge(self) -> int:
        """Tokens of the prompt whose log probabilities are asked for: all but the first, before the first token."""
        asked = self.sampling.prompt_logprobs is not None and not self.committed_token_ids
        return len(self.prompt_token_ids) - 1 if asked else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Log probabilities of the token at a position and of the best alternatives, best first.

    `rank` is the token's own place among all, from 1 on; of equals the best.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


class SpeculationRecord(NamedTuple):
    """Speculation counts of a session; a round is a step that verified at least one draft token.

    `lossy` marks a text whose distribution is not the target's, by penalties that were counted anew; `mixed` one that
    verifiers of different arithmetic have computed; `distribution_only` one of an engine that preserves the
    distribution, and does not promise the same tokens again.
    """

    num_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    mean_batch_size: float = 0.0
    num_hits: int = 0
    num_misses: int = 0
    lossy: bool = False
    mixed: bool = False
    distribution_only: bool = False

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted draft tokens over verified ones; 0 without any."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round commits: 1 + accepted / rounds, vLLM's definition."""
        return 1.0 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @classmethod
    def sum(cls, records: Sequence[SpeculationRecord]) -> SpeculationRecord:
        """Returns the record of several sessions, or of one that moved; batch sizes are weighted by steps."""
        num_steps = sum(record.num_steps for record in records)
        histograms = zip_longest(*(record.acceptance_histogram for record in records), fillvalue=0)
        return cls(
            num_steps=num_steps,
            num_spec_steps=sum(record.num_spec_steps for record in records),
            num_draft_tokens=sum(record.num_draft_tokens for record in records),
            num_accepted_draft_tokens=sum(record.num_accepted_draft_tokens for record in records),
            acceptance_histogram=tuple(map(sum, histograms)),
            mean_batch_size=sum(r.mean_batch_size * r.num_steps for r in records) / max(1, num_steps),
            num_hits=sum(record.num_hits for record in records),
            num_misses=sum(record.num_misses for record in records),
            lossy=any(record.lossy for record in records),
            mixed=any(record.mixed for record in records),
            distribution_only=any(record.distribution_only for record in records),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of a request went."""

    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """How a session ended."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    speculation: SpeculationRecord = field(default_factory=SpeculationRecord)
    timings: Timings = field(default_factory=Timings)


class TokenOrigin(enum.IntEnum):
    """How a committed token came about, numbered as on the wire: a draft token that matched, or the target's own.

    The target's own token is recovered where no verified draft token matched, bonus after the last one had, and
    plain where the step verified none.
    """

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3
    PLAIN = 4


class SessionEvent(NamedTuple):
    """News about a session beside its tokens; few steps have any.

    Attributes:
        logprobs: Log probabilities, one a token of the step.
        result: How the session ended; nothing comes after it.
        lossy: See `SpeculationRecord`.
        running: The engine computes the session now; comes once, before its first tokens.
        prompt_logprobs: Log probabilities of prompt tokens from `prompt_offset` on; none come after the first token.
        prompt_offset: Position in the prompt of the first of these.
        speculation: The session's record under this epoch so far, as a gateway that ends the session itself, or that
            loses its verifier, gets no result; None: unknown.
    """

    logprobs: tuple[PositionLogprobs, ...] = ()
    result: GenerateResult | None = None
    lossy: bool = False
    running: bool = False
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_offset: int = 0
    speculation: SpeculationRecord | None = None

    @classmethod
    def joined(cls, events: Sequence[SessionEvent]) -> SessionEvent:
        """Joins the events of several steps of a session, in order."""
        if len(events) == 1:
            return events[0]
        return cls(
            logprobs=tuple(position for each in events for position in each.logprobs),
            result=events[-1].result,
            lossy=any(each.lossy for each in events),
            running=any(each.running for each in events),
            prompt_logprobs=tuple(position for each in events for position in each.prompt_logprobs),
            prompt_offset=next((each.prompt_offset for each in events if each.prompt_logprobs), 0),
        )


# Most steps of a session commit tokens and nothing else.
NO_EVENT = SessionEvent()


@dataclass(slots=True)
class StepCommit:
    """Tokens that a step commits, or several steps whose tokens leave for a gateway together, in columns.

    The forest, drafters, clients and gateways read the same columns. Events and errors of sessions are rare.

    Attributes:
        numbers: Numbers of the sessions.
        offsets: Generated tokens of each before these.
        ends: Where the tokens of each end.
        tokens: The tokens, oldest first.
        origins: A `TokenOrigin` a token; 0: unknown.
        chances: For each token the probability that the guess in its place was accepted, where the acceptance rule
            knows it; below 0: a guess matched or did not. Empty: all are so.
        events: Events of sessions, by number; some have no tokens.
        errors: Why sessions ended early, after their tokens, by number.
    """

    numbers: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    origins: bytearray = field(default_factory=bytearray)
    chances: list[float] = field(default_factory=list)
    events: dict[int, SessionEvent] = field(default_factory=dict)
    errors: dict[int, PacelineError] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.numbers or self.events or self.errors)

    @property
    def sessions(self) -> set[int]:
        """Numbers of all sessions in it."""
        return {*self.numbers, *self.events, *self.errors}

    def add(
        self,
        number: int,
        offset: int,
        token_ids: Sequence[int] = (),
        origins: bytes | bytearray = b"",
        chances: Sequence[float] | None = None,
    ) -> None:
        """Adds a session's tokens; without `origins` these are unknown."""
        if chances is not None and not self.chances:
            self.chances = [-1.0] * len(self.tokens)
        self.numbers.append(number)
        self.offsets.append(offset)
        self.tokens += token_ids
        self.ends.append(len(self.tokens))
        self.origins += origins or bytes(len(token_ids))
        if self.chances or chances is not None:
            self.chances += [*(chances or ()), *[-1.0] * len(token_ids)][: len(token_ids)]

    def add_event(self, number: int, event: SessionEvent) -> None:
        """Adds an event of a session, after those that it has."""
        known = self.events.get(number)
        self.events[number] = event if known is None else SessionEvent.joined([known, event])

    def extend(self, other: StepCommit) -> None:
        """Adds other sessions."""
        for each in other:
            self.add(*each)
        self.events |= other.events
        self.errors |= other.errors

    def by_session(self) -> Iterator[tuple[int, StepCommit]]:
        """Yields the number of each session that columns or errors name, and what becomes of it alone."""
        for each in self:
            alone, number = StepCommit(), each[0]
            alone.add(*each)
            if number in self.events:
                alone.events[number] = self.events[number]
            yield number, alone
        yield from ((number, StepCommit(errors={number: error})) for number, error in self.errors.items())

    def __iter__(self) -> Iterator[tuple[int, int, list[int], bytearray]]:
        """Yields number, offset, tokens and origins of each session."""
        start = 0
        for number, offset, end in zip(self.numbers, self.offsets, self.ends, strict=True):
            yield number, offset, self.tokens[start:end], self.origins[start:end]
            start = end

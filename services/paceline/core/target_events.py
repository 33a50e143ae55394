"""Inputs and outputs of the verifier's engine, as plain values."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError, RemoteProtocolError
from paceline.core.grammar import GrammarState
from paceline.core.messages import (
    GenerateRequest,
    Ints,
    SpeculationRecord,
    StepCommit,
    ToDrafter,
    ToVerifier,
    sizes_of,
)
from paceline.core.pages import BlockPool


@dataclass(slots=True)
class SpeculationTally:
    """Running counts behind a session's `SpeculationRecord`.

    Clients may be sent a record while the device's thread counts. So a part is counted after its whole, and read before
    it.
    """

    num_steps: int = 0
    batch_size_sum: int = 0
    num_draft_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    num_hits: int = 0

    def count(self, num_draft_tokens: int, num_accepted: int, batch_size: int, *, hit: bool) -> None:
        """Adds one step of the session; `num_accepted` as `num_accepted_of` gives it."""
        self.num_steps += 1
        self.batch_size_sum += batch_size
        if num_draft_tokens:
            self.num_draft_tokens += num_draft_tokens
            if num_accepted >= len(self.histogram):
                self.histogram.extend([0] * (num_accepted + 1 - len(self.histogram)))
            self.histogram[num_accepted] += 1
            self.num_hits += hit

    def record(self) -> SpeculationRecord:
        num_hits, histogram, num_draft_tokens = self.num_hits, tuple(self.histogram), self.num_draft_tokens
        batch_size_sum, num_steps = self.batch_size_sum, self.num_steps
        return SpeculationRecord(
            num_steps=num_steps,
            num_spec_steps=(num_spec_steps := sum(histogram)),
            num_draft_tokens=num_draft_tokens,
            num_accepted_draft_tokens=sum(length * rounds for length, rounds in enumerate(histogram)),
            acceptance_histogram=histogram,
            mean_batch_size=batch_size_sum / max(1, num_steps),
            num_hits=num_hits,
            num_misses=num_spec_steps - num_hits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A session to run, and who drafts for it (empty: nobody).

    `number` is its name in all that follows, to its drafter too; no two sessions under way share one. It waits since
    `arrived_s`; None: since the engine knows it. `grammar` is that of its sampling parameters, compiled, before the
    first token of the output; it is nobody else's. `tally` gets its speculation counts, of engines that count.
    """

    request: GenerateRequest
    number: int
    drafter_address: str = ""
    arrived_s: float | None = None
    grammar: GrammarState | None = None
    tally: SpeculationTally = field(default_factory=SpeculationTally)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The client of a session left."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsArrived:
    """Messages of one drafter, with the time they arrived."""

    address: str
    messages: Sequence[ToVerifier]
    arrived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChanged:
    """A drafter was reached (its sessions are opened anew) or lost.

    Attributes:
        wants_states: Whether it drafts from hidden states.
        draft_model: Name of its model, for metrics.
    """

    address: str
    up: bool
    wants_states: bool = False
    draft_model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """A session is drafted by another drafter from now on."""

    number: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMode:
    """Nobody asked for the sessions from now on, and nobody is to see what becomes of them.

    Attributes:
        drafts: Whether steps draft, whatever pays; None: the rehearsal stops, and steps are as usual again.
        over: The draft model with which all has been rehearsed that was to be; empty: something is left.
    """

    drafts: bool | None
    over: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningLoaded:
    """Tuning learned by another engine of the same kind, JSON."""

    learned: bytes


TargetEvent = Submit | Cancel | DraftsArrived | LinkChanged | Paired | SetMode | TuningLoaded


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLimits:
    """Bounds of the engine, beside the context that its model announces.

    Args:
        max_num_seqs: Most sessions that run at once.
        max_num_batched_tokens: Most rows of a step.

    Raises:
        ConfigError: A step has too few rows for its sessions.
    """

    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"a step of {self.max_num_batched_tokens} rows (--max-num-batched-tokens) is too short for "
                f"{self.max_num_seqs} sessions (--max-num-seqs), which take a row each"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStart:
    """A session that is traced got a token from its prompt; again, where it was preempted and computed anew.

    Attributes:
        submitted_s: When it came, by the engine's clock, as all times here.
        admitted_s: When it first got a place.
        at_s: When the token was committed.
        num_cached_tokens: Tokens of its prompt that the prefix cache had.
    """

    number: int
    submitted_s: float
    admitted_s: float
    at_s: float
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRound:
    """A decoding step of a traced session.

    Attributes:
        at_s: When its tokens were committed.
        gamma: Draft tokens verified.
        num_accepted: Matching draft tokens among them.
        batch_size: Sessions that committed tokens in the step.
        price: The step's price.
        num_rows: Rows of the step, all sessions together.
        num_prompt_rows: Prompt rows among them.
        wait_s: From the end of the step before to the plan of this one: the wait for drafts, and events.
        step_s: From its plan to its tokens: mostly the device's time.
    """

    number: int
    at_s: float
    gamma: int
    num_accepted: int
    batch_size: int
    price: float
    num_rows: int
    num_prompt_rows: int
    wait_s: float
    step_s: float


def num_accepted_of(num_matched: Ints, ends: Sequence[int]) -> list[int]:
    """Guesses of each session that a step has accepted beside the one token that it commits in any case.

    A guess that ends the text takes the place of that token: nothing is committed after it.

    Args:
        num_matched: Verified guesses that were committed, int32 `[sessions]`.
        ends: Where the committed tokens of each end; each has at least one.
    """
    accepted: list[int] = np.minimum(num_matched, sizes_of(np.array(ends, np.int32)) - 1).tolist()
    return accepted


class Reason(enum.StrEnum):
    """Why a verifier's steps draft, or decode plainly."""

    # At this load drafts pay by what was measured, or are expected to.
    PAYS = "pays"
    # Both ways are being compared at this load, in a trial or before the first one.
    TRYING = "trying"
    # Nobody drafts for the sessions of the step: there is no drafter, or the requests want none.
    NO_DRAFTER = "no_drafter"
    # Drafts are not expected to pay with so many sessions; they were not tried here yet.
    TOO_LOADED = "too_loaded"
    # At this load drafts were measured, and plain decoding was faster.
    DID_NOT_PAY = "did_not_pay"
    # A setting says how many guesses are verified at any load.
    FIXED = "fixed"


@dataclass(slots=True)
class StepReport:
    """A report on a step of a target or draft model, for metrics and traces; or on some steps, see `add`.

    Attributes:
        counts: Amounts for counters, by the name of the metric in `paceline.obs.metrics` and its labels.
        levels: States of gauges after the step, by name.
        samples: Values for histograms, by the name of the metric and its labels.
        mode: Origin of its guesses, a `drafting_mode.Mode`.
        reason: Why; None: that is decided elsewhere.
        measured: Mode, about how many sessions, and tokens a second of all of them, at the present load.
        responded: Whether its time shows what its mode is worth: drafters have answered, if they were to.
        num_levels: Levels of trees that a draft model has grown.
    """

    counts: dict[tuple[str, ...], float] = field(default_factory=lambda: defaultdict(float))
    levels: dict[str, float] = field(default_factory=dict)
    samples: dict[tuple[str, ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: float = 0.0
    num_rows: int = 0
    num_prefill_rows: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_levels: int = 1
    price: float = 1.0
    mode: str = "plain"
    reason: Reason | None = None
    measured: list[tuple[str, int, float]] = field(default_factory=list)
    responded: bool = True
    gammas: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    traced: list[TracedStart | TracedRound] = field(default_factory=list)

    def count(self, metric: str, *labels: str, by: float = 1) -> None:
        """Adds to a counter."""
        self.counts[metric, *labels] += by

    def sample(self, metric: str, *values: float) -> None:
        """Adds values to a histogram without labels."""
        self.samples[metric,] += values

    def add(self, step: StepReport) -> None:
        """Adds the report of the next step; mode and price are those of the last step that had any."""
        for counted, amount in step.counts.items():
            self.counts[counted] += amount
        for sampled, values in step.samples.items():
            self.samples[sampled] += values
        self.levels |= step.levels
        self.gammas += step.gammas
        self.accepted += step.accepted
        self.num_running, self.num_waiting = step.num_running, step.num_waiting
        if step.num_rows:
            self.num_rows, self.price, self.mode = step.num_rows, step.price, step.mode
            self.reason, self.measured = step.reason, step.measured

    def count_pages(self, pool: BlockPool) -> None:
        """Adds the pool's look-ups since the last call, and its state."""
        num_queries, num_hits = pool.take_counts()
        self.count("vllm:prefix_cache_queries", by=num_queries)
        self.count("vllm:prefix_cache_hits", by=num_hits)
        self.levels["vllm:kv_cache_usage_perc"] = pool.num_used / pool.num_blocks

    def count_nodes(self, sources: Sequence[str], counts: npt.NDArray[np.int64]) -> None:
        """Counts nodes that commits took from trees, see `Committed`."""
        for source, (judged, accepted, unverified) in zip(sources, counts.sum(axis=0).T.tolist(), strict=True):
            for fate, num in (("accepted", accepted), ("rejected", judged - accepted), ("unverified", unverified)):
                if num:
                    self.count("paceline:draft_nodes", source, fate, by=num)

    def count_rounds(self, num_verified: Sequence[int], num_accepted: Sequence[int], hits: Sequence[bool]) -> None:
        """Counts a step of sessions that decode.

        Args:
            num_verified: Nodes of each that the step has verified.
            num_accepted: As `num_accepted_of` gives it.
            hits: Whether the tree held all tokens that were committed.
        """
        self.gammas += num_verified
        self.accepted += compress(num_accepted, num_verified)
        judged = [*compress(hits, num_verified)]
        for metric, num in (("paceline:round_hits", sum(judged)), ("paceline:round_misses", judged.count(False))):
            if num:
                self.count(metric, by=num)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterNews:
    """Messages to drafters by address, and the links to reset."""

    to_drafters: dict[str, list[ToDrafter]]
    broken_links: dict[str, RemoteProtocolError]

    @property
    def is_empty(self) -> bool:
        return not (self.to_drafters or self.broken_links)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput(DrafterNews):
    """A step's output; `commit` is for clients."""

    commit: StepCommit
    report: StepReport

    @property
    def is_empty(self) -> bool:
        return not (self.to_drafters or self.broken_links) and self.commit.is_empty

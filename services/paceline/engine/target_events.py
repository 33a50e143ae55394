"""What goes into the verifier's engine and what comes out, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.errors import PacelineError, RemoteProtocolError
from paceline.core.messages import CommittedTokens, GenerateRequest, ToDrafter, ToVerifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A session to run; its outputs carry the serial."""

    request: GenerateRequest
    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The client of a session left."""

    session_id: str
    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsArrived:
    """Messages of one drafter, with the time they arrived."""

    address: str
    messages: Sequence[ToVerifier]
    arrived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChanged:
    """A drafter was reached (its sessions are opened anew) or lost; `wants_states`: it drafts from hidden states."""

    address: str
    up: bool
    wants_states: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """A session is drafted by another drafter from now on."""

    session_id: str
    serial: int
    address: str


TargetEvent = Submit | Cancel | DraftsArrived | LinkChanged | Paired


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLimits:
    """Bounds of the engine.

    Args:
        max_num_seqs: Most sessions that run at once.
        max_num_batched_tokens: Most rows of a step.
        max_model_len: Most tokens of a session, prompt and output.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(slots=True)
class StepReport:
    """What one step did, for metrics."""

    seconds: float = 0.0
    num_rows: int = 0
    num_prefill_rows: int = 0
    num_decoding: int = 0
    num_running: int = 0
    num_waiting: int = 0
    price: float = 1.0
    gammas: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    # Nodes that were judged, and those of them that matched, by the source that guessed them first.
    verified_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    # Sources that take time: the sessions each was asked for, and its seconds.
    asked_of: Counter[str] = field(default_factory=Counter)
    asked_s: dict[str, float] = field(default_factory=dict)
    num_hits: int = 0
    num_misses: int = 0
    # Nodes that fell off or went with their session before a step verified them, by the source that guessed them first.
    unverified_by: Counter[str] = field(default_factory=Counter)
    # Guesses that came when other tokens were committed, or that hang below none we know.
    late_by: Counter[str] = field(default_factory=Counter)
    num_preempted: int = 0
    num_silenced: int = 0
    round_trips_s: list[float] = field(default_factory=list)
    lag_tokens: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """What one step has to say to the world."""

    committed: Sequence[tuple[int, CommittedTokens | PacelineError]]
    to_drafters: dict[str, list[ToDrafter]]
    broken_links: dict[str, RemoteProtocolError]
    report: StepReport

"""What a running session yields: pieces of the answer, then how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.messages import FinishReason, PositionLogprobs, SpeculationRecord, Timings
from paceline.gateway.token_texts import TokenText


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text and the tokens committed meanwhile; text lags behind tokens where it is not certain yet.

    `offset`: generated tokens before these. `digest`: of all up to these, see `paceline.core.token_digest`.
    `known_text`: that of tokens which a client has that goes on with a stream; it has this text, too.
    `tokens`, where the request asks for it, are those behind the text: their texts join to it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    tokens: tuple[TokenText, ...] = ()
    offset: int = 0
    digest: str = ""
    known_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a session ended.

    Attributes:
        finish_reason: Why.
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Of these, found in the verifier's prefix cache.
        num_generated_tokens: Tokens of the answer, a stop token included.
        speculation: What speculation did; where the gateway ended the session at a stop string the verifier
            reports nothing, and this is None, or of a lossy session all that is known: that it is.
        timings: Where the time went, as far as the verifier told.
        stop: The stop string that ended it; None: something else did.
    """

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int = 0
    speculation: SpeculationRecord | None = None
    timings: Timings = field(default_factory=Timings)
    stop: str | None = None


Event = Piece | Ending


def sum_of_records(records: Sequence[SpeculationRecord | None]) -> SpeculationRecord | None:
    """Returns the record of several sessions, batch sizes weighted by steps; None if nothing is known."""
    known = [record for record in records if record is not None]
    if not known:
        return None
    num_steps = sum(record.num_steps for record in known)
    longest = max(len(record.acceptance_histogram) for record in known)
    return SpeculationRecord(
        num_steps=num_steps,
        num_spec_steps=sum(record.num_spec_steps for record in known),
        num_draft_tokens=sum(record.num_draft_tokens for record in known),
        num_accepted_draft_tokens=sum(record.num_accepted_draft_tokens for record in known),
        acceptance_histogram=tuple(
            sum(r.acceptance_histogram[k] for r in known if k < len(r.acceptance_histogram)) for k in range(longest)
        ),
        mean_batch_size=sum(r.mean_batch_size * r.num_steps for r in known) / max(1, num_steps),
        num_hits=sum(record.num_hits for record in known),
        num_misses=sum(record.num_misses for record in known),
        lossy=any(record.lossy for record in known),
    )

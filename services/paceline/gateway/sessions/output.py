"""A running session's output: pieces of the answer, then its ending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.messages import FinishReason, PositionLogprobs, SpeculationRecord, Timings
from paceline.gateway.message.reader import Part, content_of
from paceline.gateway.text.streaming import TokenText


class Piece(NamedTuple):
    """New parts of the message and the tokens committed meanwhile; text lags behind tokens where it is not certain yet.

    Attributes:
        token_ids: Tokens among them that belong to the answer.
        parts: Parts of the new text; without a form of the message, content alone.
        tokens: Tokens behind the text, if the request asks for them; see `OutputStream`.
        offset: Generated tokens before these.
        digest: Returns the digest of all tokens up to these, until more are there; see `paceline.core.messages`.
        known_parts: Parts that a client which resumes the stream has already.
        prompt_logprobs: In the first piece, if asked for: of all tokens of the prompt but the first.
    """

    token_ids: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    tokens: tuple[TokenText, ...] = ()
    offset: int = 0
    digest: Callable[[], str] = str
    known_parts: tuple[Part, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """The new content."""
        return content_of(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a session ended.

    Attributes:
        finish_reason: Why.
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Tokens among them found in the verifier's prefix cache.
        num_generated_tokens: Tokens of the answer, a stop token included.
        num_reasoning_tokens: Tokens among them of its reasoning.
        speculation: Speculation counts of all verifiers that ran the session, and whether the text is lossy, mixed or
            guaranteed in distribution only; None if no verifier reported it and none of these holds.
        timings: Where the time went, as far as the verifier reported it.
        stop: The stop string that ended it; None if there was none.
        stop_token_id: The stop token of the request that ended it; None if there was none, or the model's own did.
        parts: Parts of a message with a form that were uncertain up to its end.
    """

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    speculation: SpeculationRecord | None = None
    timings: Timings = field(default_factory=Timings)
    stop: str | None = None
    stop_token_id: int | None = None
    parts: tuple[Part, ...] = ()


TakePiece = Callable[[Piece], object]


def sum_of_records(records: Sequence[SpeculationRecord | None]) -> SpeculationRecord | None:
    """Returns the record of several sessions, batch sizes weighted by steps; None if nothing is known."""
    known = [record for record in records if record is not None]
    return SpeculationRecord.sum(known) if known else None

"""Spans of the sessions on a verifier, made in the event loop from what the engine thread reports."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Self

from paceline.core.messages import GenerateRequest, GenerateResult
from paceline.core.target_events import TracedRound, TracedStart
from paceline.obs import attributes as names
from paceline.obs.tracing import Span, Tracing

# Rounds of a session that its span shows, far apart in a long one; `paceline.obs.otlp` keeps as many events.
MAX_ROUNDS = 120


class SessionTrace:
    """One session from its request to its end; as a context manager it ends the span.

    Args:
        tracing: Where its span is recorded, if it is.
        request: The session.
    """

    def __init__(self, tracing: Tracing, request: GenerateRequest) -> None:
        self._span: Span = tracing.start("verify", traceparent=request.traceparent)
        self._rounds = SampledRounds(MAX_ROUNDS)
        self._start: TracedStart | None = None

    @property
    def recording(self) -> bool:
        """Whether the session is traced."""
        return self._span.recording

    def hand_on(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request as the engine and the drafter are to see it: with a trace context if it is traced."""
        if not self.recording:
            return replace(request, traceparent="") if request.traceparent else request
        self._span.set(
            {
                names.SESSION_ID: request.session_id,
                names.EPOCH: request.epoch,
                names.NUM_PROMPT_TOKENS: len(request.prompt_token_ids),
                names.NUM_COMMITTED_TOKENS: len(request.committed_token_ids),
            }
        )
        return replace(request, traceparent=self._span.traceparent)

    def paired(self, address: str) -> None:
        """The session is drafted by this drafter from now on; empty: by none."""
        self._span.set({names.DRAFTER: address})

    def saw(self, report: TracedStart | TracedRound) -> None:
        """The engine ran a step for the session."""
        match report:
            case TracedRound():
                self._rounds.add(report)
            case TracedStart() if self._start is not None:
                self._span.event("computed anew", at_s=report.at_s)
            case TracedStart():
                self._start = report

    def ended(self, result: GenerateResult) -> None:
        """The session came to its end."""
        if not self.recording:
            return
        record = result.speculation
        self._span.set(
            {
                names.FINISH_REASON: result.finish_reason.value,
                names.NUM_GENERATED_TOKENS: result.num_generated_tokens,
                names.NUM_STEPS: record.num_steps,
                names.NUM_SPEC_STEPS: record.num_spec_steps,
                names.NUM_DRAFT_TOKENS: record.num_draft_tokens,
                names.NUM_ACCEPTED: record.num_accepted_draft_tokens,
                names.NUM_HITS: record.num_hits,
                names.NUM_MISSES: record.num_misses,
                names.MEAN_BATCH_SIZE: record.mean_batch_size,
            }
        )

    def __enter__(self) -> Self:
        self._span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.recording:
            # All spans of a session end with it: who collects them gets them together.
            self._end_children()
            for each in self._rounds.kept:
                self._span.event("round", _attributes(each), at_s=each.at_s)
            self._span.set({names.ROUNDS_LEFT_OUT: self._rounds.num_left_out})
        self._span.__exit__(kind, error, traceback)

    def _end_children(self) -> None:
        start = self._start
        if start is None:
            return
        self._span.child("queue", start_s=start.submitted_s).end(start.admitted_s)
        cached = {names.NUM_CACHED_TOKENS: start.num_cached_tokens}
        self._span.child("prefill", start_s=start.admitted_s, attributes=cached).end(start.at_s)


class SampledRounds:
    """At most so many rounds of a session, evenly spread over all of it: each time they are full, every second goes.

    Attributes:
        kept: The rounds, oldest first.

    Args:
        limit: Most rounds to keep; an even number.
    """

    def __init__(self, limit: int) -> None:
        self.kept: list[TracedRound] = []
        self._limit = limit
        self._num_seen = 0
        self._stride = 1

    @property
    def num_left_out(self) -> int:
        """Rounds that were seen and are not kept."""
        return self._num_seen - len(self.kept)

    def add(self, each: TracedRound) -> None:
        """Takes in the next round."""
        if self._num_seen % self._stride == 0:
            if len(self.kept) == self._limit:
                del self.kept[1::2]
                self._stride *= 2
            self.kept.append(each)
        self._num_seen += 1


def _attributes(each: TracedRound) -> dict[str, int | float]:
    return {
        names.GAMMA: each.gamma,
        names.NUM_ACCEPTED: each.num_accepted,
        names.BATCH_SIZE: each.batch_size,
        names.PRICE: each.price,
    }

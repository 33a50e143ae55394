"""Spans of the sessions on a verifier, made in the event loop from what the engine reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from paceline.core.messages import NS_PER_S, GenerateRequest, GenerateResult
from paceline.core.target_events import TracedRound, TracedStart
from paceline.obs import attributes as names
from paceline.obs.tracing import (
    Attributes,
    SampledEvents,
    Span,
    SpanKind,
    Tracer,
    ended,
    start_span,
    traceparent_of,
)


class SessionTrace:
    """A session from its request to its end, made by `traced_session`.

    Args:
        tracer: Records its spans, if it does.
    """

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        # The offset between the clocks is taken once, so that the times of a session never run backwards.
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._rounds = SampledEvents()
        # When the session's tokens before the next round were committed.
        self._last_s = 0.0
        self._start: TracedStart | None = None

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def hand_on(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request for engine and drafter: with a trace context if the session is traced."""
        if not self.recording:
            return replace(request, traceparent="") if request.traceparent else request
        self._span.set_attributes(
            {
                names.SESSION_ID: request.session_id,
                names.EPOCH: request.epoch,
                names.NUM_PROMPT_TOKENS: len(request.prompt_token_ids),
                names.NUM_COMMITTED_TOKENS: len(request.committed_token_ids),
            }
        )
        return replace(request, traceparent=traceparent_of(self._span))

    def paired(self, address: str, draft_model: str) -> None:
        """From now on this drafter drafts for the session, with this model; empty: none."""
        self._span.set_attributes({names.DRAFTER: address, names.DRAFT_MODEL: draft_model})

    def saw(self, report: TracedStart | TracedRound) -> None:
        """The engine ran a step for the session."""
        match report:
            case TracedRound():
                since_s = report.at_s - self._last_s
                self._rounds.add(self._unix_ns(report.at_s), since_s, _attributes(report, since_s))
            case TracedStart() if self._start is not None:
                self._span.add_event("computed anew", timestamp=self._unix_ns(report.at_s))
            case TracedStart():
                self._start = report
        self._last_s = report.at_s

    def ended(self, result: GenerateResult) -> None:
        if not self.recording:
            return
        record = result.speculation
        self._span.set_attributes(
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

    def end_children(self) -> None:
        """Adds what the engine reported, at the end: a collector gets all spans of a session together."""
        if not self.recording:
            return
        if self._start is not None:
            start = self._start
            self._child("queue", start.submitted_s, start.admitted_s, {})
            self._child("prefill", start.admitted_s, start.at_s, {names.NUM_CACHED_TOKENS: start.num_cached_tokens})
        self._rounds.add_to(self._span, "round")
        self._span.set_attribute(names.ROUNDS_LEFT_OUT, self._rounds.num_left_out)

    def _child(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        start_ns = self._unix_ns(start_s)
        kind = SpanKind.INTERNAL
        child = start_span(self._tracer, name, parent=self._span, kind=kind, attributes=attributes, start_ns=start_ns)
        child.end(self._unix_ns(end_s))

    def _unix_ns(self, at_s: float) -> int:
        return int(at_s * NS_PER_S) + self._offset_ns


@contextmanager
def traced_session(tracer: Tracer, request: GenerateRequest) -> Iterator[SessionTrace]:
    """Starts the span of a session, and ends it with the block."""
    with ended(start_span(tracer, "verify", parent=request.traceparent)) as span:
        trace = SessionTrace(tracer, span)
        try:
            yield trace
        finally:
            trace.end_children()


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _attributes(each: TracedRound, since_last_s: float) -> dict[str, int | float]:
    return {
        names.GAMMA: each.gamma,
        names.NUM_ACCEPTED: each.num_accepted,
        names.BATCH_SIZE: each.batch_size,
        names.PRICE: each.price,
        names.ROWS: each.num_rows,
        names.PROMPT_ROWS: each.num_prompt_rows,
        names.WAIT_MS: _ms(each.wait_s),
        names.STEP_MS: _ms(each.step_s),
        names.SINCE_LAST_MS: _ms(since_last_s),
    }

"""Spans of the sessions that a drafter drafts for, made in the event loop from what goes over the streams.

A drafter begins no traces: a session is traced if its verifier sends a trace context when it opens it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.messages import (
    CloseSession,
    Commits,
    Drafts,
    LaggingSession,
    OpenSession,
    ToDrafter,
    ToVerifier,
)
from paceline.obs import attributes as names
from paceline.obs.tracing import OFF, Attributes, SampledEvents, Span, Tracer, start_span

# Sessions beyond are not traced; a verifier may open any number.
MAX_TRACED = 4096

# A stream, and the number of a session there.
_Key = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class _DraftTrace:
    """A traced session, from its opening to its end."""

    span: Span
    committed_len: int
    num_commits: int = 0
    num_nodes: int = 0
    num_lagging: int = 0
    max_lag_tokens: int = 0
    # When commits came that nothing was sent for yet; None: there are none.
    unanswered_s: float | None = None
    answers: SampledEvents = field(default_factory=SampledEvents)

    def committed(self, committed_len: int) -> None:
        self.num_commits += 1
        self.committed_len = max(self.committed_len, committed_len)
        if self.unanswered_s is None:
            self.unanswered_s = time.monotonic()

    def drafted(self, base_len: int, num_nodes: int) -> None:
        lag_tokens = self.committed_len - base_len
        self.num_nodes += num_nodes
        self.max_lag_tokens = max(self.max_lag_tokens, lag_tokens)
        if self.unanswered_s is None:
            return
        took_s, self.unanswered_s = time.monotonic() - self.unanswered_s, None
        attributes = {
            names.NUM_NODES: num_nodes,
            names.LAG_TOKENS: lag_tokens,
            names.REPLY_MS: round(1e3 * took_s, 3),
        }
        self.answers.add(time.time_ns(), took_s, attributes)

    def end(self) -> None:
        self.span.set_attributes(
            {
                names.NUM_COMMITS: self.num_commits,
                names.NUM_NODES: self.num_nodes,
                names.NUM_LAGGING: self.num_lagging,
                names.MAX_LAG_TOKENS: self.max_lag_tokens,
                names.DRAFTS_LEFT_OUT: self.answers.num_left_out,
            }
        )
        self.answers.add_to(self.span, "drafts")
        self.span.end()


class DraftTraces:
    """The traced sessions of all streams.

    Args:
        tracer: Records their spans, if it does.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._traces: dict[_Key, _DraftTrace] = {}

    def received(self, link: int, messages: Sequence[ToDrafter]) -> None:
        """Messages came over a verifier's stream."""
        if self._tracer is OFF:
            return
        for message in messages:
            match message:
                case OpenSession():
                    self._end((link, message.number))
                    if message.traceparent and len(self._traces) < MAX_TRACED:
                        self._open((link, message.number), message)
                case Commits() if self._traces:
                    self._committed(link, message)
                case CloseSession():
                    self._end((link, message.number))

    def _committed(self, link: int, commits: Commits) -> None:
        for commit in commits:
            trace = self._traces.get((link, commit.number))
            if trace is not None:
                trace.committed(commit.base_len + len(commit.token_ids))

    def sent(self, link: int, messages: Sequence[ToVerifier]) -> None:
        """Messages went out over a verifier's stream."""
        if not self._traces:
            return
        for message in messages:
            match message:
                case Drafts():
                    self._sent_drafts(link, message)
                case LaggingSession() if (link, message.number) in self._traces:
                    self._traces[link, message.number].num_lagging += 1

    def _sent_drafts(self, link: int, drafts: Drafts) -> None:
        columns = zip(drafts.numbers.tolist(), drafts.base_lens.tolist(), drafts.sizes.tolist(), strict=True)
        for number, base_len, size in columns:
            trace = self._traces.get((link, number))
            if trace is not None:
                trace.drafted(base_len, size)

    def closed(self, link: int) -> None:
        """A stream ended, and its sessions with it."""
        for key in [key for key in self._traces if key[0] == link]:
            self._end(key)

    def _open(self, key: _Key, message: OpenSession) -> None:
        attributes: Attributes = {
            names.SESSION_ID: message.session_id,
            names.EPOCH: message.epoch,
            names.ACCEPTANCE: message.speculation.acceptance,
            names.NUM_COMMITTED_TOKENS: len(message.token_ids),
        }
        span = start_span(self._tracer, "draft", parent=message.traceparent, attributes=attributes)
        self._traces[key] = _DraftTrace(span=span, committed_len=len(message.token_ids))

    def _end(self, key: _Key) -> None:
        trace = self._traces.pop(key, None)
        if trace is not None:
            trace.end()

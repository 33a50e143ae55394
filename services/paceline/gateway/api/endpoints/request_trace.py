"""The request span: what a client requested and got, by the GenAI conventions; the parent of its sessions' spans."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.core.errors import shortened
from paceline.core.params import MAX_SEED, SamplingParams
from paceline.gateway.sessions.output import Ending, Piece, TakePiece
from paceline.gateway.sessions.request import SessionRequest
from paceline.obs import attributes as names
from paceline.obs.tracing import Attributes, Span, Tracer, ended, fail, start_span

MAX_MODEL_CHARACTERS = 128
TOOL_CALLS = "tool_calls"
# Beginnings of the fields of a chat that ask for JSON by a grammar.
_JSON_FIELDS = ("response_format", "structured_outputs.json")


class RequestTrace:
    """A client's call, made by `traced_request`.

    Args:
        operation: `chat` or `text_completion`.
    """

    def __init__(self, span: Span, operation: str) -> None:
        self.span = span
        self._started_s = time.monotonic()
        self._operation = operation
        self._first_s: float | None = None
        self._samples_per_prompt = 1
        self._num_sessions = 0
        self._endings: dict[int, Ending] = {}
        self._called_tools: set[int] = set()
        self._model = ""
        self._failed = False

    def asked(self, fields: Mapping[str, Any]) -> None:
        """Notes the body of a request as it came, which may yet be refused."""
        if not self.span.is_recording():
            return
        model = fields.get("model")
        if isinstance(model, str) and model:
            self._named(shortened(model, MAX_MODEL_CHARACTERS))

    def understood(self, sessions: Sequence[SessionRequest], response_id: str, samples_per_prompt: int = 1) -> None:
        """Notes the sessions of a request, samples of the same prompt side by side."""
        if not self.span.is_recording():
            return
        self._num_sessions, self._samples_per_prompt = len(sessions), samples_per_prompt
        model = sessions[0].model.identity.name
        if not self._model:
            self._named(model)
        self.span.set_attributes(
            {
                names.GEN_AI_RESPONSE_MODEL: model,
                names.GEN_AI_RESPONSE_ID: response_id,
                names.GEN_AI_USAGE_INPUT_TOKENS: sum(
                    len(each.prompt_token_ids) for each in sessions[::samples_per_prompt]
                ),
                **_requested(sessions[0].sampling),
            }
        )
        if sessions[0].grammar_field.startswith(_JSON_FIELDS):
            self.span.set_attribute(names.GEN_AI_OUTPUT_TYPE, "json")
        if sessions[0].stops:
            self.span.set_attribute(names.GEN_AI_REQUEST_STOP_SEQUENCES, sessions[0].stops)
        if len(sessions) > 1:
            self.span.set_attribute(names.GEN_AI_REQUEST_CHOICE_COUNT, len(sessions))

    def noting(self, take: TakePiece) -> TakePiece:
        """Returns what takes a session's pieces, and notes when the first tokens come where that is recorded."""
        if not self.span.is_recording():
            return take

        def noted(piece: Piece) -> None:
            if self._first_s is None and piece.token_ids:
                self._first_s = time.monotonic()
            take(piece)

        return noted

    def ended(self, ending: Ending, index: int = 0) -> None:
        """Notes how a session has ended."""
        self._endings[index] = ending

    def called_tools(self, index: int = 0) -> None:
        """Notes that what a session wrote are calls of tools."""
        self._called_tools.add(index)

    def fail(self, error: BaseException) -> None:
        """Notes an error that is reported to the client."""
        self._failed = True
        fail(self.span, error)

    def over(self, *, normally: bool) -> None:
        """Notes the end of the call; the HTTP door ends normally even when its client has left."""
        if not self.span.is_recording():
            return
        self.span.set_attributes(self._answered())
        if normally and not self._failed and len(self._endings) < self._num_sessions:
            self.span.set_attribute(names.CANCELLED, True)

    def _named(self, model: str) -> None:
        self._model = model
        self.span.update_name(f"{self._operation} {model}")
        self.span.set_attribute(names.GEN_AI_REQUEST_MODEL, model)

    def _answered(self) -> Attributes:
        answered: dict[str, str | int | float | Sequence[str]] = {}
        if self._endings:
            ended = [self._endings[index] for index in sorted(self._endings)]
            reasons = [
                TOOL_CALLS if index in self._called_tools else self._endings[index].finish_reason.value
                for index in sorted(self._endings)
            ]
            first_samples = range(0, self._num_sessions, self._samples_per_prompt)
            answered[names.GEN_AI_RESPONSE_FINISH_REASONS] = reasons
            answered[names.GEN_AI_USAGE_OUTPUT_TOKENS] = sum(each.num_generated_tokens for each in ended)
            # A prompt counts once, however many samples it has.
            answered[names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] = sum(
                self._endings[index].num_cached_tokens for index in first_samples if index in self._endings
            )
        if self._first_s is not None:
            answered[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = self._first_s - self._started_s
        return answered


@contextmanager
def traced_request(tracer: Tracer, operation: str, traceparent: str, request_id: str = "") -> Iterator[RequestTrace]:
    """Starts the span of a client's call, and ends it with the block, saying how the request went.

    Args:
        tracer: Records the span, if tracing is on.
        operation: `chat` or `text_completion`.
        traceparent: Trace context of the client; empty: none.
        request_id: The client's name for the request; empty: none.
    """
    attributes = {
        names.GEN_AI_OPERATION_NAME: operation,
        names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
        names.GEN_AI_OUTPUT_TYPE: "text",
        **({names.REQUEST_ID: request_id} if request_id else {}),
    }
    with ended(start_span(tracer, operation, parent=traceparent, attributes=attributes)) as span:
        trace = RequestTrace(span, operation)
        normally = False
        try:
            yield trace
            normally = True
        finally:
            trace.over(normally=normally)


def _requested(sampling: SamplingParams) -> Attributes:
    # OTLP's whole numbers have a sign; a seed's upper half goes out as the negative one that asks for the same.
    seed = sampling.seed if sampling.seed <= MAX_SEED >> 1 else sampling.seed - MAX_SEED - 1
    requested: dict[str, int | float] = {
        names.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_SEED: seed,
    }
    optional = {
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
    }
    return {**requested, **{name: value for name, value in optional.items() if value}}

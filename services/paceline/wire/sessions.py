"""Messages between gateway and verifier, on the wire: sessions to run, and the log of what has become of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.core import errors
from paceline.core.errors import (
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    PeerLostError,
    RemoteProtocolError,
    shortened,
)
from paceline.core.messages import (
    NO_EVENT,
    NS_PER_S,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PositionLogprobs,
    SessionEvent,
    StepCommit,
    TokenOrigin,
)
from paceline.rpc.v1 import common_pb2, verifier_pb2
from paceline.wire.columns import MAX_SESSIONS, WORD, check_count, check_size, read_columns
from paceline.wire.common import (
    MAX_SESSION_ID_CHARS,
    MAX_UINT32,
    check_uint32,
    session_params_from_pb,
    session_params_to_pb,
    speculation_record_from_pb,
    speculation_record_to_pb,
    timings_from_pb,
    timings_to_pb,
)

_FINISH_REASON_TO_PB = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_REASON_FROM_PB = {value: reason for reason, value in _FINISH_REASON_TO_PB.items()}
_ORIGINS = bytes(TokenOrigin)
# How a verifier ends one session: by the nearest of these. A peer that a verifier lost is none that its gateway lost.
_KINDS: dict[str, type[PacelineError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PacelineError) and not issubclass(kind, PeerLostError)
}
MAX_PROBLEM_CHARS, MAX_FIELD_CHARS = 256, 64
# A client gets the pause unchanged.
MAX_RETRY_AFTER_S = 3600.0
# Sessions that a message of a gateway starts and leaves; ours names one.
MAX_REQUEST_ENTRIES = 256

# Positions of a prompt whose log probabilities are written and read at a time: with 20 each, some 5 ms.
JUDGED_AT_ONCE = 128
# Bytes of a token or a log probability in a message, at most.
ENTRY_BYTES = 16

# A session's number, its tokens, their origins (none: unknown), and the event beside them; or why the session ended.
Received = tuple[int, tuple[int, ...], bytes, SessionEvent | PacelineError]
# A session's number, and what it asks for, or why that cannot be served.
Start = tuple[int, GenerateRequest | InvalidRequestError]


@dataclass(slots=True, kw_only=True)
class LogPart:
    """Messages that a verifier sends a gateway at once.

    Attributes:
        commit: Tokens, events and errors of sessions; in columns each is named once, also those with events alone.
        taken: Numbers of sessions that it has accepted.
        alive: The engine makes progress, or is inside a step for less than the time after which it counts as hung.
        step_s: Seconds for which it has been inside that step; 0: it has made progress.
    """

    commit: StepCommit = field(default_factory=StepCommit)
    taken: Sequence[int] = ()
    alive: bool = False
    step_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class AskedSession:
    """A gateway's request, and the tokens that have come.

    Attributes:
        vocab_size: Tokens of the verifier's model.
        num_generated: Generated tokens of the session so far, including those that it began with.
        num_to_judge: Tokens of the prompt whose log probabilities are still to come, before the first token.
    """

    request: GenerateRequest
    vocab_size: int
    num_generated: int = field(init=False)
    num_to_judge: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_generated = len(self.request.committed_token_ids)
        self.num_to_judge = self.request.num_to_judge

    def check(self, offset: int, token_ids: Sequence[int]) -> None:
        """Refuses tokens that were not asked for, that are none, or that do not join onto those before.

        Raises:
            RemoteProtocolError: Names what is wrong.
        """
        room = self.request.sampling.max_tokens - self.num_generated
        if len(token_ids) > room:
            check_count("VerifyResponse.token_ids", len(token_ids), room)
        highest = max(token_ids, default=0)
        if highest >= self.vocab_size:
            raise RemoteProtocolError(
                f"VerifyResponse.token_ids: {highest} is outside the vocabulary of {self.vocab_size}"
            )
        if token_ids and offset != self.num_generated:
            raise RemoteProtocolError(
                f"VerifyResponse.offsets: must be {self.num_generated}, the number of tokens received, got {offset}"
            )

    def check_judged(self, message: verifier_pb2.SessionLogprobs, num_tokens: int) -> None:
        """Refuses log probabilities that were not asked for, or out of place, before anything is made of them.

        Raises:
            RemoteProtocolError: Names what is wrong.
        """
        sampling, kind = self.request.sampling, "SessionLogprobs"
        if message.logprobs and len(message.logprobs) != num_tokens:
            raise RemoteProtocolError(f"{kind}.logprobs: has {len(message.logprobs)} entries for {num_tokens} tokens")
        check_count(f"{kind}.prompt_logprobs", len(message.prompt_logprobs), self.num_to_judge)
        first = self.request.num_to_judge - self.num_to_judge + 1
        if message.prompt_logprobs and message.prompt_offset != first:
            raise RemoteProtocolError(f"{kind}.prompt_offset: must be {first}, got {message.prompt_offset}")
        for name, asked in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if getattr(message, name) and asked is None:
                raise RemoteProtocolError(f"{kind}.{name}: were not asked for")

    def judged(self, name: str, positions: Sequence[common_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
        """Decodes some of a session's log probabilities.

        Raises:
            RemoteProtocolError: They cannot be right.
        """
        asked = self.request.sampling.logprobs if name == "logprobs" else self.request.sampling.prompt_logprobs
        _check_judged(f"SessionLogprobs.{name}", positions, asked or 0, self.vocab_size)
        return tuple(map(_position_logprobs_from_pb, positions))

    def prompt_judged(self, positions: Sequence[common_pb2.PositionLogprobs]) -> SessionEvent:
        """Decodes and counts log probabilities of the next prompt tokens.

        Raises:
            RemoteProtocolError: They cannot be right.
        """
        judged, offset = self.judged("prompt_logprobs", positions), self.request.num_to_judge - self.num_to_judge + 1
        self.num_to_judge -= len(judged)
        return SessionEvent(prompt_logprobs=judged, prompt_offset=offset if judged else 0)


def size_of_event(event: SessionEvent) -> int:
    """An upper bound of the bytes of its log probabilities on the wire."""
    if not (event.logprobs or event.prompt_logprobs):
        return ENTRY_BYTES
    return ENTRY_BYTES * sum(1 + len(each.top) for each in (*event.logprobs, *event.prompt_logprobs))


def start_session_to_pb(number: int, request: GenerateRequest) -> verifier_pb2.StartSession:
    """Encodes one session for a verifier.

    Raises:
        InvalidRequestError: A whole number does not fit into 32 bits.
    """
    check_uint32("prompt_token_ids", request.prompt_token_ids)
    return verifier_pb2.StartSession(
        number=number,
        session_id=request.session_id,
        epoch=request.epoch,
        prompt_token_ids=request.prompt_token_ids,
        committed_token_ids=request.committed_token_ids,
        params=session_params_to_pb(request),
        max_wait_ns=None if request.max_wait_s is None else round(max(0.0, request.max_wait_s) * NS_PER_S),
        whole=request.whole,
        traceparent=request.traceparent,
    )


def starts_from_pb(message: verifier_pb2.VerifyRequest, *, context_len: int = MAX_UINT32) -> list[Start]:
    """Decodes the sessions that a gateway wants to be run; what is wrong with one is nobody else's problem.

    Args:
        context_len: Tokens that the verifier takes; a longer text is refused before its tokens are made.

    Raises:
        RemoteProtocolError: The message starts and leaves too many.
    """
    check_count("VerifyRequest", len(message.starts) + len(message.leaves), MAX_REQUEST_ENTRIES)
    return [(each.number, _start_from_pb(each, context_len)) for each in message.starts]


def _start_from_pb(message: verifier_pb2.StartSession, context_len: int) -> GenerateRequest | InvalidRequestError:
    try:
        return generate_request_from_pb(message, context_len=context_len)
    except InvalidRequestError as error:
        return error


def generate_request_from_pb(message: verifier_pb2.StartSession, *, context_len: int = MAX_UINT32) -> GenerateRequest:
    """Decodes one session for a verifier.

    Args:
        context_len: Tokens that the verifier takes; a longer text is refused before its tokens are made.

    Raises:
        InvalidRequestError: A field is missing or outside its limits; token ids are not checked here.
    """
    if not message.session_id:
        raise InvalidRequestError("session_id", "must not be empty")
    if len(message.session_id) > MAX_SESSION_ID_CHARS:
        raise InvalidRequestError(
            "session_id", f"has {len(message.session_id)} characters, at most {MAX_SESSION_ID_CHARS} are allowed"
        )
    if not message.prompt_token_ids:
        raise InvalidRequestError("prompt_token_ids", "must hold at least one token")
    num_tokens = len(message.prompt_token_ids) + len(message.committed_token_ids)
    if num_tokens > context_len:
        raise InvalidRequestError("prompt_token_ids", f"{num_tokens} tokens exceed the context of {context_len}")
    return GenerateRequest(
        session_id=message.session_id,
        epoch=message.epoch,
        prompt_token_ids=tuple(message.prompt_token_ids),
        committed_token_ids=tuple(message.committed_token_ids),
        max_wait_s=message.max_wait_ns / NS_PER_S if message.HasField("max_wait_ns") else None,
        whole=message.whole,
        traceparent=message.traceparent,
        **session_params_from_pb(message.params),
    )


def log_to_pb(part: LogPart) -> verifier_pb2.VerifyResponse:
    """Encodes a verifier's messages to a gateway."""
    commit = part.commit
    message = verifier_pb2.VerifyResponse(
        alive=part.alive,
        taken=part.taken,
        step_ns=round(part.step_s * NS_PER_S),
        sessions=_column(commit.numbers),
        offsets=_column(commit.offsets),
        ends=_column(commit.ends),
        token_ids=_column(commit.tokens),
        origins=bytes(commit.origins),
        errors=[_error_to_pb(number, error) for number, error in commit.errors.items()],
    )
    for number, event in commit.events.items():
        _add_event(message, number, event)
    return message


def _column(values: Sequence[int]) -> bytes:
    return np.array(values, WORD).tobytes()


def log_from_pb(
    message: verifier_pb2.VerifyResponse, sessions: Mapping[int, AskedSession], last_number: int
) -> Iterator[Received]:
    """Decodes a verifier's messages, and counts them; other sessions' are passed over.

    Sessions are decoded as they are asked for, a long prompt's log probabilities in several parts; how sessions ended
    early comes last. Unrequested tokens, or tokens that do not join onto earlier ones, are an error of their session
    alone.

    Args:
        sessions: Sessions that run there, by number.
        last_number: The highest that a session was given.

    Raises:
        RemoteProtocolError: Columns differ in length, or name sessions that nobody started.
    """
    numbers, ends, offsets, tokens = read_columns(message, ("offsets",), ("token_ids",), last_number=last_number)
    check_size("VerifyResponse.origins", len(message.origins), len(tokens))
    for each in ("errors", "taken", "running", "lossy"):
        check_count(f"VerifyResponse.{each}", len(getattr(message, each)), MAX_SESSIONS)
    for each in ("logprobs", "records", "results"):
        check_count(f"VerifyResponse.{each}", len(getattr(message, each)), len(numbers))
    columns = numbers.tolist(), offsets.tolist(), ends.tolist()
    return _outcomes(message, columns, tuple(tokens.tolist()), _Events(message, frozenset(columns[0])), sessions)


def _outcomes(
    message: verifier_pb2.VerifyResponse,
    columns: tuple[list[int], list[int], list[int]],
    tokens: tuple[int, ...],
    events: _Events,
    sessions: Mapping[int, AskedSession],
) -> Iterator[Received]:
    """Yields what has become of the sessions; `columns` are numbers, offsets and ends."""
    origins, start = message.origins, 0
    all_known = not origins.translate(None, _ORIGINS)
    for number, offset, end in zip(*columns, strict=True):
        asked = sessions.get(number)
        if asked is not None:
            token_ids = tokens[start:end]
            try:
                asked.check(offset, token_ids)
                some = origins[start:end] if all_known else _known(origins[start:end])
                event = NO_EVENT
                if number in events.numbers:
                    for part in events.before(number, asked, len(token_ids)):
                        yield number, (), b"", part
                    event = events.of(number, asked)
                if token_ids and asked.num_to_judge:
                    due = asked.request.num_to_judge
                    problem = f"{due - asked.num_to_judge} came of {due} tokens"
                    raise RemoteProtocolError(f"SessionLogprobs.prompt_logprobs: {problem}")
                asked.num_generated += len(token_ids)
                yield number, token_ids, some, event
            except RemoteProtocolError as error:
                yield number, (), b"", error
        start = end
    for each in message.errors:
        if each.number in sessions:
            yield each.number, (), b"", _error_from_pb(each)


def _known(origins: bytes) -> bytes:
    """Origins of a session; none where all are unknown."""
    strange = origins.translate(None, _ORIGINS)
    if strange and any(origins):
        raise RemoteProtocolError(f"VerifyResponse.origins: got {strange[0]}")
    return b"" if strange else origins


def _add_event(message: verifier_pb2.VerifyResponse, number: int, event: SessionEvent) -> None:
    if event.running:
        message.running.append(number)
    if event.lossy:
        message.lossy.append(number)
    if event.logprobs or event.prompt_logprobs:
        message.logprobs.add(
            number=number,
            logprobs=map(position_logprobs_to_pb, event.logprobs),
            prompt_logprobs=map(position_logprobs_to_pb, event.prompt_logprobs),
            prompt_offset=event.prompt_offset,
        )
    if event.result is not None:
        message.results.append(_result_to_pb(number, event.result))
    elif event.speculation is not None:
        message.records.add(number=number, speculation=speculation_record_to_pb(event.speculation))


class _Events:
    """Events of a message's sessions, not decoded yet; `numbers` names the sessions that have any."""

    def __init__(self, message: verifier_pb2.VerifyResponse, numbers: frozenset[int]) -> None:
        self._known = numbers
        self._running, self._lossy = (self._of("running", message.running), self._of("lossy", message.lossy))
        self._logprobs = self._named("logprobs", message.logprobs)
        self._records = self._named("records", message.records)
        self._results = self._named("results", message.results)
        self.numbers = {*self._running, *self._lossy, *self._logprobs, *self._records, *self._results}

    def before(self, number: int, asked: AskedSession, num_tokens: int) -> Iterator[SessionEvent]:
        """Yields all but the last part of a long prompt's log probabilities: each costs some milliseconds.

        Raises:
            RemoteProtocolError: They cannot be right, or were not asked for.
        """
        judged = self._logprobs.get(number)
        if judged is not None:
            asked.check_judged(judged, num_tokens)
            for start in range(0, len(judged.prompt_logprobs) - JUDGED_AT_ONCE, JUDGED_AT_ONCE):
                yield asked.prompt_judged(judged.prompt_logprobs[start : start + JUDGED_AT_ONCE])

    def of(self, number: int, asked: AskedSession) -> SessionEvent:
        """A session's event, with what is left of its log probabilities.

        Raises:
            RemoteProtocolError: It cannot be right.
        """
        judged, record, result = (each.get(number) for each in (self._logprobs, self._records, self._results))
        event = NO_EVENT
        if judged is not None:
            left = (len(judged.prompt_logprobs) - 1) % JUDGED_AT_ONCE + 1 if judged.prompt_logprobs else 0
            event = asked.prompt_judged(judged.prompt_logprobs[len(judged.prompt_logprobs) - left :])
            event = event._replace(logprobs=asked.judged("logprobs", judged.logprobs))
        ended = None if result is None else _result_from_pb(result)
        known = None if record is None else speculation_record_from_pb(record.speculation)
        return event._replace(
            running=number in self._running,
            lossy=number in self._lossy,
            result=ended,
            speculation=known if ended is None else ended.speculation,
        )

    def _named(self, field: str, entries: Sequence[Any]) -> dict[int, Any]:
        numbers = self._of(field, [each.number for each in entries])
        return dict(zip(numbers, entries, strict=True)) if numbers else {}

    def _of(self, field: str, numbers: Sequence[int]) -> Sequence[int]:
        if numbers and not (len(numbers) == len(found := set(numbers)) and found <= self._known):
            raise RemoteProtocolError(f"VerifyResponse.{field}: names sessions twice, or others than `sessions` does")
        return numbers


def _check_judged(name: str, positions: Sequence[common_pb2.PositionLogprobs], num_asked: int, vocab_size: int) -> None:
    for position in positions:
        check_count(f"{name}.top", len(position.top), num_asked)
        for entry in (position.chosen, *position.top):
            if entry.token_id >= vocab_size:
                raise RemoteProtocolError(f"{name}: {entry.token_id} is outside the vocabulary of {vocab_size}")
            if math.isnan(entry.logprob):
                raise RemoteProtocolError(f"{name}: the log probability of {entry.token_id} is no number")


def _error_to_pb(number: int, error: PacelineError) -> verifier_pb2.SessionError:
    kind = next(each.__name__ for each in type(error).__mro__ if _KINDS.get(each.__name__) is each)
    message = verifier_pb2.SessionError(number=number, kind=kind)
    if isinstance(error, InvalidRequestError):
        message.field, message.problem = shortened(error.field, MAX_FIELD_CHARS), error.problem
    else:
        message.problem = shortened(str(error), MAX_PROBLEM_CHARS)
    if isinstance(error, OverloadedError):
        message.retry_after_ns = round(error.retry_after_s * NS_PER_S)
    return message


def _error_from_pb(message: verifier_pb2.SessionError) -> PacelineError:
    problem, kind = shortened(message.problem, MAX_PROBLEM_CHARS), _KINDS.get(message.kind, PacelineError)
    if kind is InvalidRequestError:
        return InvalidRequestError(shortened(message.field, MAX_FIELD_CHARS), problem)
    if kind is OverloadedError:
        return OverloadedError(problem, retry_after_s=min(message.retry_after_ns / NS_PER_S, MAX_RETRY_AFTER_S))
    return kind(problem)


def position_logprobs_to_pb(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=position.token_id, logprob=position.logprob),
        top=[common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in position.top],
        rank=position.rank,
    )


def _position_logprobs_from_pb(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        token_id=message.chosen.token_id,
        logprob=message.chosen.logprob,
        top=tuple((entry.token_id, entry.logprob) for entry in message.top),
        rank=message.rank,
    )


def _result_to_pb(number: int, result: GenerateResult) -> verifier_pb2.SessionResult:
    return verifier_pb2.SessionResult(
        number=number,
        finish_reason=_FINISH_REASON_TO_PB[result.finish_reason],
        num_prompt_tokens=result.num_prompt_tokens,
        num_cached_tokens=result.num_cached_tokens,
        num_generated_tokens=result.num_generated_tokens,
        speculation=speculation_record_to_pb(result.speculation),
        timings=timings_to_pb(result.timings),
    )


def _result_from_pb(message: verifier_pb2.SessionResult) -> GenerateResult:
    reason = _FINISH_REASON_FROM_PB.get(message.finish_reason)
    if reason is None:
        raise RemoteProtocolError(f"SessionResult.finish_reason: got {message.finish_reason}")
    return GenerateResult(
        finish_reason=reason,
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_generated_tokens=message.num_generated_tokens,
        speculation=speculation_record_from_pb(message.speculation),
        timings=timings_from_pb(message.timings),
    )

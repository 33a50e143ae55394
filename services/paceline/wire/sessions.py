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
    NS_PER_S,
    CommittedTokens,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PositionLogprobs,
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
# Bytes of a session in a message, and of a token or a log probability.
_SESSION_BYTES, _ENTRY_BYTES = 64, 16

# A session's number, and what has become of it.
Outcome = tuple[int, CommittedTokens | PacelineError]
# A session's number, and what it asks for, or why that cannot be served.
Start = tuple[int, GenerateRequest | InvalidRequestError]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """Messages that a verifier sends a gateway at once.

    Attributes:
        outcomes: Committed tokens of sessions, each named once, then how sessions ended early.
        taken: Numbers of sessions that it has accepted.
        alive: The engine makes progress, or is inside a step for less than the time after which it counts as hung.
        step_s: Seconds for which it has been inside that step; 0: it has made progress.
    """

    outcomes: Sequence[Outcome] = ()
    taken: Sequence[int] = ()
    alive: bool = False
    step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRead:
    """Messages from a verifier, as its gateway reads them.

    Attributes:
        outcomes: As of `LogPart`, each decoded when it is asked for; of a long prompt's log probabilities several.
        taken: As of `LogPart`.
        alive: As of `LogPart`.
        step_s: As of `LogPart`.
    """

    outcomes: Iterator[Outcome]
    taken: Sequence[int]
    alive: bool
    step_s: float


@dataclass(slots=True, kw_only=True)
class AskedSession:
    """A gateway's request, and the tokens that have come.

    Attributes:
        vocab_size: Tokens of the verifier's model.
        num_generated: Generated tokens of the session so far, including those that it began with.
        num_judged: Tokens of the prompt whose log probabilities have come.
    """

    request: GenerateRequest
    vocab_size: int
    num_generated: int = field(init=False)
    num_judged: int = 0

    def __post_init__(self) -> None:
        self.num_generated = len(self.request.committed_token_ids)

    def check(self, offset: int, token_ids: Sequence[int]) -> None:
        """Refuses tokens that were not asked for, that are none, or that do not join onto those before.

        Raises:
            RemoteProtocolError: Names what is wrong.
        """
        check_count("VerifyResponse.token_ids", len(token_ids), self.request.sampling.max_tokens - self.num_generated)
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
        check_count(
            f"{kind}.prompt_logprobs", len(message.prompt_logprobs), self.request.num_to_judge - self.num_judged
        )
        if message.prompt_logprobs and message.prompt_offset != self.num_judged + 1:
            raise RemoteProtocolError(
                f"{kind}.prompt_offset: must be {self.num_judged + 1}, got {message.prompt_offset}"
            )
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

    def take(self, committed: CommittedTokens) -> None:
        """Counts what has come.

        Raises:
            RemoteProtocolError: Tokens come before all log probabilities of the prompt.
        """
        self.num_judged += len(committed.prompt_logprobs)
        self.num_generated += len(committed.token_ids)
        due = self.request.num_to_judge
        if committed.token_ids and self.num_judged < due:
            raise RemoteProtocolError(f"SessionLogprobs.prompt_logprobs: {self.num_judged} came of {due} tokens")


def size_of_committed(committed: CommittedTokens) -> int:
    """An upper bound of its bytes on the wire."""
    judged = 0
    if committed.logprobs or committed.prompt_logprobs:
        judged = sum(1 + len(each.top) for each in (*committed.logprobs, *committed.prompt_logprobs))
    return _SESSION_BYTES + _ENTRY_BYTES * (len(committed.token_ids) + judged)


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
    message = verifier_pb2.VerifyResponse(alive=part.alive, taken=part.taken, step_ns=round(part.step_s * NS_PER_S))
    numbers: list[int] = []
    offsets: list[int] = []
    ends: list[int] = []
    tokens: list[int] = []
    origins = bytearray()
    for number, each in part.outcomes:
        if isinstance(each, PacelineError):
            message.errors.append(_error_to_pb(number, each))
            continue
        numbers.append(number)
        offsets.append(each.offset)
        tokens += each.token_ids
        ends.append(len(tokens))
        origins += each.origins or bytes(len(each.token_ids))
        _add_rare(message, number, each)
    message.sessions, message.offsets, message.ends, message.token_ids = map(_column, (numbers, offsets, ends, tokens))
    message.origins = bytes(origins)
    return message


def _column(values: Sequence[int]) -> bytes:
    return np.array(values, WORD).tobytes()


def log_from_pb(
    message: verifier_pb2.VerifyResponse, sessions: Mapping[int, AskedSession], last_number: int
) -> LogRead:
    """Decodes a verifier's messages, and counts them; other sessions' are passed over.

    Unrequested tokens, or tokens that do not join onto earlier ones, are an error of their session alone.

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
    listed, token_list, origins = numbers.tolist(), tokens.tolist(), message.origins
    rare = _Rare(message, frozenset(listed))

    def outcomes() -> Iterator[Outcome]:
        start = 0
        for number, offset, end in zip(listed, offsets.tolist(), ends.tolist(), strict=True):
            asked = sessions.get(number)
            if asked is not None:
                try:
                    asked.check(offset, token_ids := tuple(token_list[start:end]))
                    committed = _committed(offset, token_ids, origins[start:end])
                    for each in rare.completed(number, asked, committed) if rare.any else (committed,):
                        asked.take(each)
                        yield number, each
                except RemoteProtocolError as error:
                    yield number, error
            start = end
        yield from ((each.number, _error_from_pb(each)) for each in message.errors if each.number in sessions)

    return LogRead(outcomes=outcomes(), taken=[*message.taken], alive=message.alive, step_s=message.step_ns / NS_PER_S)


def _committed(offset: int, token_ids: tuple[int, ...], origins: bytes) -> CommittedTokens:
    if strange := origins.translate(None, _ORIGINS):
        if any(origins):
            raise RemoteProtocolError(f"VerifyResponse.origins: got {strange[0]}")
        origins = b""
    return CommittedTokens(token_ids, origins, offset=offset)


def _add_rare(message: verifier_pb2.VerifyResponse, number: int, committed: CommittedTokens) -> None:
    """Adds what few messages have."""
    if committed.running:
        message.running.append(number)
    if committed.lossy:
        message.lossy.append(number)
    if committed.logprobs or committed.prompt_logprobs:
        message.logprobs.add(
            number=number,
            logprobs=map(position_logprobs_to_pb, committed.logprobs),
            prompt_logprobs=map(position_logprobs_to_pb, committed.prompt_logprobs),
            prompt_offset=committed.prompt_offset,
        )
    if committed.result is not None:
        message.results.append(_result_to_pb(number, committed.result))
    elif committed.speculation is not None:
        message.records.add(number=number, speculation=speculation_record_to_pb(committed.speculation))


class _Rare:
    """Rare fields of messages, by session number."""

    def __init__(self, message: verifier_pb2.VerifyResponse, numbers: frozenset[int]) -> None:
        self._numbers = numbers
        self._running, self._lossy = (self._of("running", message.running), self._of("lossy", message.lossy))
        self._logprobs = self._named("logprobs", message.logprobs)
        self._records = self._named("records", message.records)
        self._results = self._named("results", message.results)
        self.any = bool(self._running or self._lossy or self._logprobs or self._records or self._results)

    def completed(self, number: int, asked: AskedSession, committed: CommittedTokens) -> Iterator[CommittedTokens]:
        """Adds what there is of a session to its tokens; parts of a long prompt's log probabilities come before them.

        Raises:
            RemoteProtocolError: It cannot be right, or was not asked for.
        """
        judged, record, result = (each.get(number) for each in (self._logprobs, self._records, self._results))
        if judged is not None:
            asked.check_judged(judged, len(committed.token_ids))
            start, count = 0, len(judged.prompt_logprobs)
            for start in range(JUDGED_AT_ONCE, count, JUDGED_AT_ONCE):
                some = judged.prompt_logprobs[start - JUDGED_AT_ONCE : start]
                yield CommittedTokens(
                    token_ids=(),
                    offset=committed.offset,
                    prompt_logprobs=asked.judged("prompt_logprobs", some),
                    prompt_offset=judged.prompt_offset + start - JUDGED_AT_ONCE,
                )
            committed = committed._replace(
                logprobs=asked.judged("logprobs", judged.logprobs),
                prompt_logprobs=asked.judged("prompt_logprobs", judged.prompt_logprobs[start:]),
                prompt_offset=judged.prompt_offset and judged.prompt_offset + start,
            )
        ended = None if result is None else _result_from_pb(result)
        known = None if record is None else speculation_record_from_pb(record.speculation)
        yield committed._replace(
            running=number in self._running,
            lossy=number in self._lossy,
            result=ended,
            speculation=known if ended is None else ended.speculation,
        )

    def _named(self, field: str, entries: Sequence[Any]) -> dict[int, Any]:
        numbers = self._of(field, [each.number for each in entries])
        return dict(zip(numbers, entries, strict=True)) if numbers else {}

    def _of(self, field: str, numbers: Sequence[int]) -> Sequence[int]:
        if numbers and not (len(numbers) == len(found := set(numbers)) and found <= self._numbers):
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

"""Messages between gateway and verifier, on the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.errors import InvalidRequestError, RemoteProtocolError
from paceline.core.messages import (
    NS_PER_S,
    CommittedTokens,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PositionLogprobs,
    TokenFate,
)
from paceline.core.params import SpeculationParams, check_priority
from paceline.rpc.v1 import common_pb2, verifier_pb2
from paceline.wire.columns import check_count
from paceline.wire.common import (
    MAX_SESSION_ID_CHARS,
    MAX_UINT32,
    check_uint32,
    sampling_from_pb,
    sampling_to_pb,
    speculation_from_pb,
    speculation_record_from_pb,
    speculation_record_to_pb,
    speculation_to_pb,
    timings_from_pb,
    timings_to_pb,
)

_FINISH_REASON_TO_PB = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_REASON_FROM_PB = {value: reason for reason, value in _FINISH_REASON_TO_PB.items()}
_FATE_TO_PB = {
    TokenFate.ACCEPTED: verifier_pb2.TOKEN_FATE_ACCEPTED,
    TokenFate.RECOVERED: verifier_pb2.TOKEN_FATE_RECOVERED,
    TokenFate.BONUS: verifier_pb2.TOKEN_FATE_BONUS,
    TokenFate.PLAIN: verifier_pb2.TOKEN_FATE_PLAIN,
}
_FATE_FROM_PB = {int(value): fate for fate, value in _FATE_TO_PB.items()}


def generate_request_to_pb(request: GenerateRequest) -> verifier_pb2.VerifierGenerateRequest:
    """Encodes one session for a verifier.

    Raises:
        InvalidRequestError: A whole number does not fit into 32 bits.
    """
    check_uint32("prompt_token_ids", request.prompt_token_ids)
    check_priority(request.priority)
    return verifier_pb2.VerifierGenerateRequest(
        session_id=request.session_id,
        epoch=request.epoch,
        prompt_token_ids=request.prompt_token_ids,
        committed_token_ids=request.committed_token_ids,
        sampling=sampling_to_pb(request.sampling),
        speculation=speculation_to_pb(request.speculation),
        max_wait_ns=None if request.max_wait_s is None else round(max(0.0, request.max_wait_s) * NS_PER_S),
        whole=request.whole,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        priority=request.priority,
    )


def generate_request_from_pb(
    message: verifier_pb2.VerifierGenerateRequest, traceparent: str = "", *, context_len: int = MAX_UINT32
) -> GenerateRequest:
    """Decodes one session for a verifier; absent `speculation` means its defaults.

    Args:
        traceparent: Of its metadata.
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
    if not message.HasField("sampling"):
        raise InvalidRequestError("sampling", "is missing")
    speculation = SpeculationParams()
    if message.HasField("speculation"):
        speculation = speculation_from_pb(message.speculation)
    return GenerateRequest(
        session_id=message.session_id,
        epoch=message.epoch,
        prompt_token_ids=tuple(message.prompt_token_ids),
        committed_token_ids=tuple(message.committed_token_ids),
        sampling=sampling_from_pb(message.sampling),
        speculation=speculation,
        max_wait_s=message.max_wait_ns / NS_PER_S if message.HasField("max_wait_ns") else None,
        whole=message.whole,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        priority=message.priority,
        traceparent=traceparent,
    )


def committed_to_pb(committed: CommittedTokens) -> verifier_pb2.VerifierGenerateResponse:
    """Encodes the tokens one step committed."""
    return verifier_pb2.VerifierGenerateResponse(
        token_ids=committed.token_ids,
        logprobs=[position_logprobs_to_pb(position) for position in committed.logprobs],
        result=None if committed.result is None else _result_to_pb(committed.result),
        lossy=committed.lossy,
        token_fates=[_FATE_TO_PB[fate] for fate in committed.fates],
        offset=committed.offset,
        running=committed.running,
        prompt_logprobs=[position_logprobs_to_pb(position) for position in committed.prompt_logprobs],
        prompt_offset=committed.prompt_offset,
        speculation=None if committed.speculation is None else speculation_record_to_pb(committed.speculation),
    )


def check_asked(
    message: verifier_pb2.VerifierGenerateResponse,
    request: GenerateRequest,
    *,
    num_generated: int,
    num_judged: int,
    vocab_size: int,
) -> None:
    """Refuses what a verifier was not asked for, or what is no token, before anything is made of it.

    Args:
        message: Of the verifier.
        num_generated: Generated tokens of the session before this message.
        num_judged: Log probabilities of its prompt before it.
        vocab_size: Tokens of its model.

    Raises:
        RemoteProtocolError: There are more tokens than may still come, or more log probabilities; or one is not of the
            vocabulary, or is no number.
    """
    kind, sampling = "VerifierGenerateResponse", request.sampling
    check_count(f"{kind}.token_ids", len(message.token_ids), sampling.max_tokens - num_generated)
    check_count(f"{kind}.prompt_logprobs", len(message.prompt_logprobs), request.num_to_judge - num_judged)
    highest = max(message.token_ids, default=0)
    if highest >= vocab_size:
        raise RemoteProtocolError(f"{kind}.token_ids: {highest} is outside the vocabulary of {vocab_size}")
    _check_judged(f"{kind}.logprobs", message.logprobs, sampling.logprobs, vocab_size)
    _check_judged(f"{kind}.prompt_logprobs", message.prompt_logprobs, sampling.prompt_logprobs, vocab_size)


def _check_judged(
    name: str, positions: Sequence[common_pb2.PositionLogprobs], num_asked: int | None, vocab_size: int
) -> None:
    if positions and num_asked is None:
        raise RemoteProtocolError(f"{name}: were not asked for")
    for position in positions:
        check_count(f"{name}.top", len(position.top), num_asked or 0)
        for entry in (position.chosen, *position.top):
            if entry.token_id >= vocab_size:
                raise RemoteProtocolError(f"{name}: {entry.token_id} is outside the vocabulary of {vocab_size}")
            if math.isnan(entry.logprob):
                raise RemoteProtocolError(f"{name}: the log probability of {entry.token_id} is no number")


def committed_from_pb(message: verifier_pb2.VerifierGenerateResponse) -> CommittedTokens:
    """Decodes the tokens one step committed.

    Raises:
        RemoteProtocolError: Log probabilities or fates and tokens differ in number, or a fate or the finish reason is
            unknown.
    """
    num_tokens = len(message.token_ids)
    for name, entries in (("logprobs", message.logprobs), ("token_fates", message.token_fates)):
        if entries and len(entries) != num_tokens:
            raise RemoteProtocolError(
                f"VerifierGenerateResponse.{name}: has {len(entries)} entries for {num_tokens} tokens"
            )
    return CommittedTokens(
        token_ids=tuple(message.token_ids),
        fates=tuple(_fate_from_pb(value) for value in message.token_fates),
        logprobs=tuple(_position_logprobs_from_pb(position) for position in message.logprobs),
        result=_result_from_pb(message.result) if message.HasField("result") else None,
        lossy=message.lossy,
        offset=message.offset,
        running=message.running,
        prompt_logprobs=tuple(_position_logprobs_from_pb(position) for position in message.prompt_logprobs),
        prompt_offset=message.prompt_offset,
        speculation=speculation_record_from_pb(message.speculation) if message.HasField("speculation") else None,
    )


def _fate_from_pb(value: int) -> TokenFate:
    fate = _FATE_FROM_PB.get(value)
    if fate is None:
        raise RemoteProtocolError(f"VerifierGenerateResponse.token_fates: got {value}")
    return fate


def position_logprobs_to_pb(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    """Encodes the log probabilities of a position."""
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


def _result_to_pb(result: GenerateResult) -> verifier_pb2.VerifierGenerateResult:
    return verifier_pb2.VerifierGenerateResult(
        finish_reason=_FINISH_REASON_TO_PB[result.finish_reason],
        num_prompt_tokens=result.num_prompt_tokens,
        num_cached_tokens=result.num_cached_tokens,
        num_generated_tokens=result.num_generated_tokens,
        speculation=speculation_record_to_pb(result.speculation),
        timings=timings_to_pb(result.timings),
    )


def _result_from_pb(message: verifier_pb2.VerifierGenerateResult) -> GenerateResult:
    reason = _FINISH_REASON_FROM_PB.get(message.finish_reason)
    if reason is None:
        raise RemoteProtocolError(f"VerifierGenerateResult.finish_reason: got {message.finish_reason}")
    return GenerateResult(
        finish_reason=reason,
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_generated_tokens=message.num_generated_tokens,
        speculation=speculation_record_from_pb(message.speculation),
        timings=timings_from_pb(message.timings),
    )

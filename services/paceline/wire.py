"""Gives the values of `core` their bytes and takes them back; nobody else builds messages between services.

It checks shape and range of what a peer sends, never its meaning: whether a commit fits the session is the
business of the session state machines. It knows no sockets, clocks or models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.core.errors import InvalidRequestError, RemoteProtocolError
from paceline.core.messages import (
    CloseSession,
    Commit,
    CommittedTokens,
    DraftNodes,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    LaggingSession,
    ModelIdentity,
    NodeGuess,
    OpenSession,
    PositionLogprobs,
    SpeculationRecord,
    Timings,
    ToDrafter,
    ToVerifier,
)
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.rpc.v1 import common_pb2, drafter_pb2, verifier_pb2

MAX_UINT32 = 2**32 - 1
MAX_CONFIDENCE = 255
# A positive value below this one would arrive as 0, which stands for "not set" on the wire.
SMALLEST_FLOAT32 = 2.0**-126

_FINISH_REASON_TO_PB = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_REASON_FROM_PB = {value: reason for reason, value in _FINISH_REASON_TO_PB.items()}


def sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    """Encodes sampling parameters.

    Raises:
        InvalidRequestError: A whole number does not fit into 32 bits.
    """
    _check_uint32("max_tokens", (params.max_tokens,))
    _check_uint32("top_k", (params.top_k,))
    _check_uint32("logit_bias", (token_id for token_id, _ in params.logit_bias))
    _check_uint32("stop_token_ids", params.stop_token_ids)
    return common_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=max(params.top_p, SMALLEST_FLOAT32),
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=[
            common_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias
        ],
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        seed=params.seed,
    )


def sampling_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    """Decodes sampling parameters; `top_p` and `repetition_penalty` 0 count as not set, which is off.

    Raises:
        InvalidRequestError: A field is outside its limits.
    """
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=_decimal(message.temperature),
        top_p=_decimal(message.top_p) or 1.0,
        top_k=message.top_k,
        min_p=_decimal(message.min_p),
        repetition_penalty=_decimal(message.repetition_penalty) or 1.0,
        presence_penalty=_decimal(message.presence_penalty),
        frequency_penalty=_decimal(message.frequency_penalty),
        logit_bias=tuple((entry.token_id, _decimal(entry.bias)) for entry in message.logit_bias),
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        seed=message.seed,
    )


def speculation_to_pb(params: SpeculationParams) -> common_pb2.SpeculationParams:
    """Encodes what a request asks of speculation."""
    return common_pb2.SpeculationParams(
        enabled=params.enabled, max_draft_tokens=params.max_draft_tokens, acceptance=params.acceptance
    )


def speculation_from_pb(message: common_pb2.SpeculationParams) -> SpeculationParams:
    """Decodes what a request asks of speculation; an empty acceptance rule is the default one.

    Raises:
        InvalidRequestError: A field is outside its limits.
    """
    return SpeculationParams(
        enabled=message.enabled,
        max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
        acceptance=message.acceptance or "coupled",
    )


def identity_to_pb(identity: ModelIdentity) -> common_pb2.ModelIdentity:
    """Encodes a model identity."""
    return common_pb2.ModelIdentity(
        name=identity.name,
        vocab_hash=identity.vocab_hash,
        vocab_size=identity.vocab_size,
        context_len=identity.context_len,
        eos_token_ids=identity.eos_token_ids,
    )


def identity_from_pb(message: common_pb2.ModelIdentity) -> ModelIdentity:
    """Decodes a model identity.

    Raises:
        RemoteProtocolError: The peer does not say which vocabulary its model has.
    """
    if not message.vocab_hash:
        raise RemoteProtocolError("ModelIdentity.vocab_hash: must not be empty")
    if message.vocab_size == 0:
        raise RemoteProtocolError("ModelIdentity.vocab_size: must be at least 1, got 0")
    return ModelIdentity(
        name=message.name,
        vocab_hash=message.vocab_hash,
        vocab_size=message.vocab_size,
        context_len=message.context_len,
        eos_token_ids=tuple(message.eos_token_ids),
    )


def generate_request_to_pb(request: GenerateRequest) -> verifier_pb2.VerifierGenerateRequest:
    """Encodes one session for a verifier.

    Raises:
        InvalidRequestError: A whole number does not fit into 32 bits.
    """
    _check_uint32("prompt_token_ids", request.prompt_token_ids)
    return verifier_pb2.VerifierGenerateRequest(
        session_id=request.session_id,
        epoch=request.epoch,
        prompt_token_ids=request.prompt_token_ids,
        committed_token_ids=request.committed_token_ids,
        sampling=sampling_to_pb(request.sampling),
        speculation=speculation_to_pb(request.speculation),
        drafter_address=request.drafter_address,
    )


def generate_request_from_pb(message: verifier_pb2.VerifierGenerateRequest) -> GenerateRequest:
    """Decodes one session for a verifier; absent `speculation` means its defaults.

    Raises:
        InvalidRequestError: A field is missing or outside its limits; token ids are not compared with a vocabulary.
    """
    if not message.session_id:
        raise InvalidRequestError("session_id", "must not be empty")
    if not message.prompt_token_ids:
        raise InvalidRequestError("prompt_token_ids", "must hold at least one token")
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
        drafter_address=message.drafter_address,
    )


def committed_to_pb(committed: CommittedTokens) -> verifier_pb2.VerifierGenerateResponse:
    """Encodes the tokens one step committed."""
    return verifier_pb2.VerifierGenerateResponse(
        token_ids=committed.token_ids,
        logprobs=[_position_logprobs_to_pb(position) for position in committed.logprobs],
        result=None if committed.result is None else _result_to_pb(committed.result),
    )


def committed_from_pb(message: verifier_pb2.VerifierGenerateResponse) -> CommittedTokens:
    """Decodes the tokens one step committed.

    Raises:
        RemoteProtocolError: Log probabilities and tokens differ in number, or the finish reason is unknown.
    """
    if message.logprobs and len(message.logprobs) != len(message.token_ids):
        raise RemoteProtocolError(
            f"VerifierGenerateResponse.logprobs: has {len(message.logprobs)} entries "
            f"for {len(message.token_ids)} tokens"
        )
    return CommittedTokens(
        token_ids=tuple(message.token_ids),
        logprobs=tuple(_position_logprobs_from_pb(position) for position in message.logprobs),
        result=_result_from_pb(message.result) if message.HasField("result") else None,
    )


def speculation_record_to_pb(record: SpeculationRecord) -> common_pb2.SpeculationRecord:
    """Encodes what speculation did."""
    return common_pb2.SpeculationRecord(
        num_steps=record.num_steps,
        num_spec_steps=record.num_spec_steps,
        num_draft_tokens=record.num_draft_tokens,
        num_accepted_draft_tokens=record.num_accepted_draft_tokens,
        acceptance_histogram=record.acceptance_histogram,
        mean_batch_size=record.mean_batch_size,
        num_hits=record.num_hits,
        num_misses=record.num_misses,
    )


def speculation_record_from_pb(message: common_pb2.SpeculationRecord) -> SpeculationRecord:
    """Decodes what speculation did."""
    return SpeculationRecord(
        num_steps=message.num_steps,
        num_spec_steps=message.num_spec_steps,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_draft_tokens=message.num_accepted_draft_tokens,
        acceptance_histogram=tuple(message.acceptance_histogram),
        mean_batch_size=message.mean_batch_size,
        num_hits=message.num_hits,
        num_misses=message.num_misses,
    )


def timings_to_pb(timings: Timings) -> common_pb2.Timings:
    """Encodes where the time went."""
    return common_pb2.Timings(
        queue_ns=timings.queue_ns, prefill_ns=timings.prefill_ns, decode_ns=timings.decode_ns
    )


def timings_from_pb(message: common_pb2.Timings) -> Timings:
    """Decodes where the time went."""
    return Timings(queue_ns=message.queue_ns, prefill_ns=message.prefill_ns, decode_ns=message.decode_ns)


def draft_request_to_pb(
    messages: Sequence[ToDrafter], target: ModelIdentity | None = None
) -> drafter_pb2.DraftRequest:
    """Encodes everything a verifier has to say after one step; `target` goes into a stream's first message."""
    return drafter_pb2.DraftRequest(
        target=None if target is None else identity_to_pb(target),
        opens=[_open_to_pb(message) for message in messages if isinstance(message, OpenSession)],
        commits=[_commit_to_pb(message) for message in messages if isinstance(message, Commit)],
        closes=[
            drafter_pb2.CloseSession(session_id=message.session_id, epoch=message.epoch)
            for message in messages
            if isinstance(message, CloseSession)
        ],
    )


def draft_request_from_pb(
    message: drafter_pb2.DraftRequest,
) -> tuple[ModelIdentity | None, list[ToDrafter]]:
    """Decodes what a verifier says: who dials, then opens, commits and closes in that order.

    Raises:
        RemoteProtocolError: A field is missing or outside its limits.
    """
    target = identity_from_pb(message.target) if message.HasField("target") else None
    decoded: list[ToDrafter] = [_open_from_pb(entry) for entry in message.opens]
    decoded.extend(_commit_from_pb(entry) for entry in message.commits)
    decoded.extend(
        CloseSession(
            session_id=_session_id("CloseSession", entry.session_id),
            epoch=entry.epoch,
        )
        for entry in message.closes
    )
    return target, decoded


def draft_response_to_pb(
    messages: Sequence[ToVerifier], draft: ModelIdentity | None = None
) -> drafter_pb2.DraftResponse:
    """Encodes everything a drafter has to say after one step; `draft` goes into a stream's first message."""
    return drafter_pb2.DraftResponse(
        draft=None if draft is None else identity_to_pb(draft),
        nodes=[_nodes_to_pb(message) for message in messages if isinstance(message, DraftNodes)],
        lagging=[
            drafter_pb2.LaggingSession(
                session_id=message.session_id, epoch=message.epoch, have_len=message.have_len
            )
            for message in messages
            if isinstance(message, LaggingSession)
        ],
    )


def draft_response_from_pb(
    message: drafter_pb2.DraftResponse,
) -> tuple[ModelIdentity | None, list[ToVerifier]]:
    """Decodes what a drafter says: its model, then new nodes and lagging sessions in that order.

    Raises:
        RemoteProtocolError: Lists of a tree differ in length, or a field is outside its limits.
    """
    draft = identity_from_pb(message.draft) if message.HasField("draft") else None
    decoded: list[ToVerifier] = [_nodes_from_pb(entry) for entry in message.nodes]
    decoded.extend(
        LaggingSession(
            session_id=_session_id("LaggingSession", entry.session_id),
            epoch=entry.epoch,
            have_len=entry.have_len,
        )
        for entry in message.lagging
    )
    return draft, decoded


def _decimal(value: float) -> float:
    """Returns the shortest decimal number that has this float32, so that 0.8 arrives as 0.8."""
    return float(str(np.float32(value)))


def _check_uint32(field: str, values: Iterable[int]) -> None:
    for value in values:
        if not 0 <= value <= MAX_UINT32:
            raise InvalidRequestError(field, f"must be from 0 to {MAX_UINT32}, got {value}")


def _session_id(message_name: str, session_id: str) -> str:
    if not session_id:
        raise RemoteProtocolError(f"{message_name}.session_id: must not be empty")
    return session_id


def _price(message_name: str, value: float) -> float:
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise RemoteProtocolError(f"{message_name}.price: must be a number from 0 to 1, got {value!r}")
    return _decimal(value)


def _open_to_pb(message: OpenSession) -> drafter_pb2.OpenSession:
    return drafter_pb2.OpenSession(
        session_id=message.session_id,
        epoch=message.epoch,
        token_ids=message.token_ids,
        prompt_len=message.prompt_len,
        sampling=sampling_to_pb(message.sampling),
        price=message.price,
        room=message.room,
    )


def _open_from_pb(entry: drafter_pb2.OpenSession) -> OpenSession:
    if not entry.HasField("sampling"):
        raise RemoteProtocolError("OpenSession.sampling: is missing")
    if not 1 <= entry.prompt_len <= len(entry.token_ids):
        raise RemoteProtocolError(
            f"OpenSession.prompt_len: must be from 1 to the {len(entry.token_ids)} tokens sent, "
            f"got {entry.prompt_len}"
        )
    try:
        sampling = sampling_from_pb(entry.sampling)
    except InvalidRequestError as error:
        raise RemoteProtocolError(f"OpenSession.sampling.{error}") from error
    return OpenSession(
        session_id=_session_id("OpenSession", entry.session_id),
        epoch=entry.epoch,
        token_ids=tuple(entry.token_ids),
        prompt_len=entry.prompt_len,
        sampling=sampling,
        price=_price("OpenSession", entry.price),
        room=entry.room,
    )


def _commit_to_pb(message: Commit) -> drafter_pb2.Commit:
    return drafter_pb2.Commit(
        session_id=message.session_id,
        epoch=message.epoch,
        base_len=message.base_len,
        token_ids=message.token_ids,
        price=message.price,
        room=message.room,
    )


def _commit_from_pb(entry: drafter_pb2.Commit) -> Commit:
    return Commit(
        session_id=_session_id("Commit", entry.session_id),
        epoch=entry.epoch,
        base_len=entry.base_len,
        token_ids=tuple(entry.token_ids),
        price=_price("Commit", entry.price),
        room=entry.room,
    )


def _nodes_to_pb(message: DraftNodes) -> drafter_pb2.DraftNodes:
    return drafter_pb2.DraftNodes(
        session_id=message.session_id,
        epoch=message.epoch,
        base_len=message.base_len,
        node_ids=[node.node_id for node in message.nodes],
        parent_ids=[node.parent_id for node in message.nodes],
        token_ids=[node.token_id for node in message.nodes],
        confidences=[round(MAX_CONFIDENCE * node.confidence) for node in message.nodes],
    )


def _nodes_from_pb(entry: drafter_pb2.DraftNodes) -> DraftNodes:
    num_nodes = len(entry.node_ids)
    for name, values in (
        ("parent_ids", entry.parent_ids),
        ("token_ids", entry.token_ids),
        ("confidences", entry.confidences),
    ):
        if len(values) != num_nodes:
            raise RemoteProtocolError(
                f"DraftNodes.{name}: has {len(values)} entries, node_ids has {num_nodes}"
            )
    if num_nodes and min(entry.node_ids) == 0:
        raise RemoteProtocolError("DraftNodes.node_ids: must be at least 1, got 0")
    if num_nodes and max(entry.confidences) > MAX_CONFIDENCE:
        raise RemoteProtocolError(
            f"DraftNodes.confidences: must be from 0 to {MAX_CONFIDENCE}, got {max(entry.confidences)}"
        )
    lists = zip(entry.node_ids, entry.parent_ids, entry.token_ids, entry.confidences, strict=True)
    return DraftNodes(
        session_id=_session_id("DraftNodes", entry.session_id),
        epoch=entry.epoch,
        base_len=entry.base_len,
        nodes=tuple(
            NodeGuess(
                node_id=node_id,
                parent_id=parent_id,
                token_id=token_id,
                confidence=confidence / MAX_CONFIDENCE,
            )
            for node_id, parent_id, token_id, confidence in lists
        ),
    )


def _position_logprobs_to_pb(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=position.token_id, logprob=position.logprob),
        top=[
            common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in position.top
        ],
    )


def _position_logprobs_from_pb(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        token_id=message.chosen.token_id,
        logprob=message.chosen.logprob,
        top=tuple((entry.token_id, entry.logprob) for entry in message.top),
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

"""Messages between verifier and drafter, on the wire."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

from paceline.core.errors import InvalidRequestError, RemoteProtocolError
from paceline.core.messages import (
    CloseSession,
    Commit,
    CommittedStates,
    DraftNodes,
    LaggingSession,
    ModelIdentity,
    NodeGuess,
    OpenSession,
    ToDrafter,
    ToVerifier,
)
from paceline.core.params import ACCEPTANCE_RULES, COUPLED
from paceline.core.rejection_sampling import DEFAULT_KEEP, MAX_WEIGHT, SparseDraft
from paceline.rpc.v1 import drafter_pb2
from paceline.wire.common import (
    MAX_SESSION_ID_CHARS,
    decimal,
    fields_of,
    identity_from_pb,
    identity_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)

MAX_CONFIDENCE = 255
# Far more than any model's hidden states have.
MAX_STATE_WIDTH = 65_536
BFLOAT16_BYTES = 2
# Most bytes of a part, far below gRPC's limit; a single session may exceed it, and a million tokens still fit.
PART_BYTES = 1024 * 1024
# Most bytes of a token id on the wire, and of everything else in the opening of a session.
TOKEN_BYTES, HEAD_BYTES = 5, 16 * 1024
# Of a node: its ids, token, confidence and the head of its distribution; and of an entry in the distribution.
NODE_BYTES, GUESS_BYTES = 3 * TOKEN_BYTES + 2 + 16, TOKEN_BYTES + 3
_MessageT = TypeVar("_MessageT", ToDrafter, ToVerifier)
TRACE_CONTEXT = "00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"


def in_parts(messages: Sequence[_MessageT]) -> Iterator[list[_MessageT]]:
    """Splits messages into parts that are small enough for gRPC, in order.

    When a stream comes up, all its sessions are opened at once, with all their tokens.
    """
    part: list[_MessageT] = []
    num_bytes = 0
    for message in messages:
        size = _size(message)
        if part and num_bytes + size > PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(message)
        num_bytes += size
    if part:
        yield part


def _size(message: ToDrafter | ToVerifier) -> int:
    """An upper bound of a message's bytes on the wire; close for long messages only."""
    match message:
        case OpenSession():
            return HEAD_BYTES + TOKEN_BYTES * len(message.token_ids)
        case CommittedStates():
            return MAX_SESSION_ID_CHARS + len(message.values)
        case Commit():
            return MAX_SESSION_ID_CHARS + TOKEN_BYTES * len(message.token_ids)
        case DraftNodes():
            guesses = sum(0 if node.draft is None else len(node.draft.token_ids) for node in message.nodes)
            return MAX_SESSION_ID_CHARS + NODE_BYTES * len(message.nodes) + GUESS_BYTES * guesses
        case CloseSession() | LaggingSession():
            return MAX_SESSION_ID_CHARS


def draft_request_to_pb(messages: Sequence[ToDrafter], target: ModelIdentity | None = None) -> drafter_pb2.DraftRequest:
    """Encodes a verifier's messages after one step; a stream's first message has the `target`."""
    return drafter_pb2.DraftRequest(
        target=None if target is None else identity_to_pb(target),
        opens=[_open_to_pb(each) for each in messages if isinstance(each, OpenSession)],
        commits=[drafter_pb2.Commit(**fields_of(each)) for each in messages if isinstance(each, Commit)],
        closes=[drafter_pb2.CloseSession(**fields_of(each)) for each in messages if isinstance(each, CloseSession)],
        states=[
            drafter_pb2.CommittedStates(**fields_of(each)) for each in messages if isinstance(each, CommittedStates)
        ],
    )


def draft_request_from_pb(
    message: drafter_pb2.DraftRequest,
) -> tuple[ModelIdentity | None, list[ToDrafter]]:
    """Decodes a verifier's messages: the caller's model, then opens, states, commits and closes in that order.

    Raises:
        RemoteProtocolError: A field is missing or outside its limits.
    """
    target = identity_from_pb(message.target) if message.HasField("target") else None
    decoded: list[ToDrafter] = [_open_from_pb(entry) for entry in message.opens]
    decoded.extend(_states_from_pb(entry) for entry in message.states)
    decoded.extend(_commit_from_pb(entry) for entry in message.commits)
    decoded.extend(
        CloseSession(session_id=_named_session("CloseSession", entry.session_id), epoch=entry.epoch)
        for entry in message.closes
    )
    return target, decoded


def draft_response_to_pb(
    messages: Sequence[ToVerifier], draft: ModelIdentity | None = None
) -> drafter_pb2.DraftResponse:
    """Encodes a drafter's messages after one step; a stream's first message has the `draft` model."""
    return drafter_pb2.DraftResponse(
        draft=None if draft is None else identity_to_pb(draft),
        nodes=[_nodes_to_pb(message) for message in messages if isinstance(message, DraftNodes)],
        lagging=[
            drafter_pb2.LaggingSession(**fields_of(each)) for each in messages if isinstance(each, LaggingSession)
        ],
    )


def draft_response_from_pb(
    message: drafter_pb2.DraftResponse,
) -> tuple[ModelIdentity | None, list[ToVerifier]]:
    """Decodes a drafter's messages: its model, then new nodes and lagging sessions in that order.

    Raises:
        RemoteProtocolError: Lists of a tree differ in length, or a field is outside its limits.
    """
    draft = identity_from_pb(message.draft) if message.HasField("draft") else None
    decoded: list[ToVerifier] = [_nodes_from_pb(entry) for entry in message.nodes]
    decoded.extend(
        LaggingSession(
            session_id=_named_session("LaggingSession", entry.session_id),
            epoch=entry.epoch,
            have_len=entry.have_len,
        )
        for entry in message.lagging
    )
    return draft, decoded


def _open_to_pb(message: OpenSession) -> drafter_pb2.OpenSession:
    return drafter_pb2.OpenSession(**fields_of(message) | {"sampling": sampling_to_pb(message.sampling)})


def _open_from_pb(entry: drafter_pb2.OpenSession) -> OpenSession:
    if not entry.HasField("sampling"):
        raise RemoteProtocolError("OpenSession.sampling: is missing")
    if not 1 <= entry.prompt_len <= len(entry.token_ids):
        raise RemoteProtocolError(
            f"OpenSession.prompt_len: must be from 1 to the {len(entry.token_ids)} tokens sent, got {entry.prompt_len}"
        )
    acceptance = entry.acceptance or COUPLED
    if acceptance not in ACCEPTANCE_RULES:
        raise RemoteProtocolError(
            f"OpenSession.acceptance: must be one of {', '.join(ACCEPTANCE_RULES)}, got {acceptance!r}"
        )
    try:
        sampling = sampling_from_pb(entry.sampling)
    except InvalidRequestError as error:
        raise RemoteProtocolError(f"OpenSession.sampling.{error}") from error
    return OpenSession(
        session_id=_named_session("OpenSession", entry.session_id),
        epoch=entry.epoch,
        token_ids=tuple(entry.token_ids),
        prompt_len=entry.prompt_len,
        sampling=sampling,
        price=_price("OpenSession", entry.price),
        room=entry.room,
        acceptance=acceptance,
        cache_salt=entry.cache_salt,
        traceparent=_trace_context(entry.traceparent),
    )


def _trace_context(value: str) -> str:
    if value and not re.fullmatch(TRACE_CONTEXT, value):
        raise RemoteProtocolError(f"OpenSession.traceparent: must be a W3C trace context, got {value[:64]!r}")
    return value


def _commit_from_pb(entry: drafter_pb2.Commit) -> Commit:
    return Commit(
        session_id=_named_session("Commit", entry.session_id),
        epoch=entry.epoch,
        base_len=entry.base_len,
        token_ids=tuple(entry.token_ids),
        price=_price("Commit", entry.price),
        room=entry.room,
    )


def _states_from_pb(entry: drafter_pb2.CommittedStates) -> CommittedStates:
    if not 1 <= entry.width <= MAX_STATE_WIDTH:
        raise RemoteProtocolError(f"CommittedStates.width: must be from 1 to {MAX_STATE_WIDTH}, got {entry.width}")
    if not entry.values or len(entry.values) % (BFLOAT16_BYTES * entry.width):
        raise RemoteProtocolError(
            f"CommittedStates.values: must hold whole positions of {entry.width} bfloat16 numbers, got "
            f"{len(entry.values)} bytes"
        )
    return CommittedStates(
        session_id=_named_session("CommittedStates", entry.session_id),
        epoch=entry.epoch,
        start=entry.start,
        width=entry.width,
        values=entry.values,
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
        drafts=[
            drafter_pb2.SparseDraft(token_ids=node.draft.token_ids, weights=node.draft.weights)
            for node in message.nodes
            if node.draft is not None
        ],
    )


def _nodes_from_pb(entry: drafter_pb2.DraftNodes) -> DraftNodes:
    _check_lists(entry)
    confidences = [confidence / MAX_CONFIDENCE for confidence in entry.confidences]
    guesses = map(NodeGuess, entry.node_ids, entry.parent_ids, entry.token_ids, confidences, _drafts_from_pb(entry))
    return DraftNodes(
        session_id=_named_session("DraftNodes", entry.session_id),
        epoch=entry.epoch,
        base_len=entry.base_len,
        nodes=tuple(guesses),
    )


def _check_lists(entry: drafter_pb2.DraftNodes) -> None:
    num_nodes = len(entry.node_ids)
    for name, size in (
        ("parent_ids", len(entry.parent_ids)),
        ("token_ids", len(entry.token_ids)),
        ("confidences", len(entry.confidences)),
        ("drafts", len(entry.drafts) or num_nodes),
    ):
        if size != num_nodes:
            raise RemoteProtocolError(f"DraftNodes.{name}: has {size} entries, node_ids has {num_nodes}")
    if num_nodes and min(entry.node_ids) == 0:
        raise RemoteProtocolError("DraftNodes.node_ids: must be at least 1, got 0")
    if num_nodes and max(entry.confidences) > MAX_CONFIDENCE:
        raise RemoteProtocolError(
            f"DraftNodes.confidences: must be from 0 to {MAX_CONFIDENCE}, got {max(entry.confidences)}"
        )


def _drafts_from_pb(entry: drafter_pb2.DraftNodes) -> Sequence[SparseDraft | None]:
    if not entry.drafts:
        return [None] * len(entry.node_ids)
    return [_draft_from_pb(draft, token_id) for draft, token_id in zip(entry.drafts, entry.token_ids, strict=True)]


def _draft_from_pb(draft: drafter_pb2.SparseDraft, token_id: int) -> SparseDraft:
    size = len(draft.token_ids)
    if not 1 <= size <= DEFAULT_KEEP:
        raise RemoteProtocolError(f"SparseDraft.token_ids: must have from 1 to {DEFAULT_KEEP} entries, got {size}")
    if len(draft.weights) != size:
        raise RemoteProtocolError(f"SparseDraft.weights: has {len(draft.weights)} entries, token_ids has {size}")
    if len(set(draft.token_ids)) != size:
        raise RemoteProtocolError("SparseDraft.token_ids: names a token twice")
    if token_id not in draft.token_ids:
        raise RemoteProtocolError(f"SparseDraft.token_ids: the guess {token_id} is not among them")
    if not 1 <= min(draft.weights) <= max(draft.weights) <= MAX_WEIGHT:
        raise RemoteProtocolError(
            f"SparseDraft.weights: must be from 1 to {MAX_WEIGHT}, got {min(draft.weights)} to {max(draft.weights)}"
        )
    return SparseDraft(token_ids=tuple(draft.token_ids), weights=tuple(draft.weights))


def _named_session(message_name: str, session_id: str) -> str:
    if not session_id:
        raise RemoteProtocolError(f"{message_name}.session_id: must not be empty")
    if len(session_id) > MAX_SESSION_ID_CHARS:
        raise RemoteProtocolError(
            f"{message_name}.session_id: has {len(session_id)} characters, at most {MAX_SESSION_ID_CHARS} are allowed"
        )
    return session_id


def _price(message_name: str, value: float) -> float:
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise RemoteProtocolError(f"{message_name}.price: must be a number from 0 to 1, got {value!r}")
    return decimal(value)

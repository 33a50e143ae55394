"""Messages between verifier and drafter, on the wire."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np

from paceline.core.acceptance import DEFAULT_KEEP, MAX_WEIGHT, SparseDraft
from paceline.core.errors import InvalidRequestError, RemoteProtocolError
from paceline.core.messages import (
    CloseSession,
    Commits,
    CommittedStates,
    Drafts,
    LaggingSession,
    ModelIdentity,
    OpenSession,
    ToDrafter,
    ToVerifier,
)
from paceline.core.params import SessionParams
from paceline.rpc.v1 import common_pb2, drafter_pb2
from paceline.wire.columns import (
    FLOAT,
    MAX_NUMBER,
    WORD,
    check_count,
    check_size,
    read_columns,
    read_shares,
    to_bytes,
)
from paceline.wire.common import (
    MAX_SESSION_ID_CHARS,
    PROTOCOL,
    check_protocol,
    decimal,
    fields_of,
    identity_from_pb,
    identity_to_pb,
    session_params_from_pb,
    session_params_to_pb,
)

MAX_CONFIDENCE = 255
# Nodes of a session in a message; a tree has no place for more (`paceline.forest.records.SLOTS`).
MAX_NODES = 1024
# A host name has at most 253 characters, a port 5.
MAX_ADDRESS_CHARS = 259
# Far more than any model's hidden states have.
MAX_STATE_WIDTH = 65_536
BFLOAT16_BYTES = 2
# Most bytes of a part, far below gRPC's limit; a single session may exceed it, and a million tokens still fit.
PART_BYTES = 1024 * 1024
# Most bytes of what a drafter sends: a part, or the nodes of one session.
MAX_RESPONSE_BYTES = 2 * PART_BYTES
# Most messages of a part: its reader makes an object of each, in its event loop, however small they are.
PART_MESSAGES = 256
# Most bytes of a token id on the wire, and of everything else in the opening of a session.
TOKEN_BYTES, HEAD_BYTES = 5, 16 * 1024
# Bytes of other messages that are not counted by session, node or token.
REST_BYTES = 64
# Bytes of a session and a node, and at least those of a distribution: a part has at most `MAX_NODES`. Its reader takes
# some microseconds for each; 800,000 in a message kept an event loop busy for seconds.
SESSION_BYTES, NODE_BYTES = 5 * WORD.itemsize, 3 * WORD.itemsize + 1
DISTRIBUTION_BYTES = PART_BYTES // MAX_NODES
NODE_COLUMNS = ("node_ids", "parent_ids", "token_ids")
_MessageT = TypeVar("_MessageT", ToDrafter, ToVerifier)
TRACE_CONTEXT = "00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"


def in_parts(messages: Sequence[_MessageT]) -> Iterator[list[_MessageT]]:
    """Splits messages into parts that are small enough for gRPC, in order.

    When a stream comes up, all its sessions are opened at once, with all their tokens; and drafters that are called
    back get all that they have missed.
    """
    part: list[_MessageT] = []
    num_bytes = 0
    for message in chain.from_iterable(map(_pieces, messages)):
        size = size_of(message)
        if part and (num_bytes + size > PART_BYTES or len(part) == PART_MESSAGES):
            yield part
            part, num_bytes = [], 0
        part.append(message)
        num_bytes += size
    if part:
        yield part


def _pieces(message: _MessageT) -> Iterator[_MessageT]:
    """Halves a message too large for a part, as long as it is about several sessions."""
    if isinstance(message, Commits | Drafts) and message.num_sessions > 1 and size_of(message) > PART_BYTES:
        first = np.arange(message.num_sessions) < message.num_sessions // 2
        for half in (first, ~first):
            yield from _pieces(message.only(half))
    else:
        yield message


def size_of(*messages: ToDrafter | ToVerifier) -> int:
    """An upper bound of the bytes of messages on the wire; close for long ones only."""
    return sum(map(_size, messages))


def _size(message: ToDrafter | ToVerifier) -> int:
    match message:
        case OpenSession():
            return HEAD_BYTES + TOKEN_BYTES * len(message.token_ids)
        case CommittedStates():
            return REST_BYTES + len(message.values)
        case Commits():
            return REST_BYTES + SESSION_BYTES * message.num_sessions + WORD.itemsize * len(message.tokens)
        case Drafts():
            entries = DISTRIBUTION_BYTES * len(message.distributions)
            return REST_BYTES + SESSION_BYTES * message.num_sessions + NODE_BYTES * message.num_nodes + entries
        case CloseSession() | LaggingSession():
            return REST_BYTES


def draft_request_to_pb(
    messages: Sequence[ToDrafter], target: ModelIdentity | None = None, verifier: str = ""
) -> drafter_pb2.DraftRequest:
    """Encodes a verifier's messages after one step; a stream's first message has the `target`, and who dials."""
    return drafter_pb2.DraftRequest(
        target=None if target is None else identity_to_pb(target),
        opens=[_open_to_pb(each) for each in messages if isinstance(each, OpenSession)],
        commits=[_commits_to_pb(each) for each in messages if isinstance(each, Commits)],
        closes=[each.number for each in messages if isinstance(each, CloseSession)],
        states=[
            drafter_pb2.CommittedStates(**fields_of(each)) for each in messages if isinstance(each, CommittedStates)
        ],
        protocol=0 if target is None else PROTOCOL,
        verifier=verifier,
    )


def verifier_from_pb(message: drafter_pb2.DraftRequest) -> str:
    """Decodes the address of the verifier that begins a stream; empty: it has none.

    Raises:
        RemoteProtocolError: It is longer than any address.
    """
    check_count("DraftRequest.verifier", len(message.verifier), MAX_ADDRESS_CHARS)
    return message.verifier


def draft_request_from_pb(
    message: drafter_pb2.DraftRequest, *, context_len: int = MAX_NUMBER
) -> tuple[ModelIdentity | None, list[ToDrafter]]:
    """Decodes a verifier's messages: the caller's model, then opens, states, commits and closes in that order.

    Args:
        context_len: Tokens that the draft model takes; of a longer text one more than that is decoded.

    Raises:
        RemoteProtocolError: A field is missing or outside its limits, or the versions of the protocol differ.
    """
    num_messages = len(message.opens) + len(message.states) + len(message.commits) + len(message.closes)
    check_count("DraftRequest", num_messages, PART_MESSAGES)
    target = _greeting(message.target, "the verifier", message.protocol) if message.HasField("target") else None
    decoded: list[ToDrafter] = [_open_from_pb(entry, context_len) for entry in message.opens]
    decoded.extend(_states_from_pb(entry) for entry in message.states)
    decoded.extend(_commits_from_pb(entry) for entry in message.commits)
    decoded.extend(CloseSession(number=number) for number in message.closes)
    return target, decoded


def draft_response_to_pb(
    messages: Sequence[ToVerifier], draft: ModelIdentity | None = None
) -> drafter_pb2.DraftResponse:
    """Encodes a drafter's messages after one step; a stream's first message has the `draft` model."""
    return drafter_pb2.DraftResponse(
        draft=None if draft is None else identity_to_pb(draft),
        drafts=[_drafts_to_pb(message) for message in messages if isinstance(message, Drafts)],
        lagging=[
            drafter_pb2.LaggingSession(**fields_of(each)) for each in messages if isinstance(each, LaggingSession)
        ],
        protocol=0 if draft is None else PROTOCOL,
    )


def draft_response_from_pb(
    message: drafter_pb2.DraftResponse, last_number: int = MAX_NUMBER
) -> tuple[ModelIdentity | None, list[ToVerifier]]:
    """Decodes a drafter's messages: its model, then new nodes and lagging sessions in that order.

    Args:
        message: The drafter's message.
        last_number: The highest session number sent to it.

    Raises:
        RemoteProtocolError: Columns differ in length, a field is outside its limits, or the versions of the protocol
            differ.
    """
    check_count("DraftResponse", len(message.drafts) + len(message.lagging), PART_MESSAGES)
    check_count("DraftResponse: distributions", sum(len(each.distributions) for each in message.drafts), MAX_NODES)
    draft = _greeting(message.draft, "the drafter", message.protocol) if message.HasField("draft") else None
    decoded: list[ToVerifier] = [_drafts_from_pb(entry, last_number) for entry in message.drafts]
    decoded.extend(LaggingSession(number=entry.number, have_len=entry.have_len) for entry in message.lagging)
    return draft, decoded


def _greeting(model: common_pb2.ModelIdentity, peer: str, protocol: int) -> ModelIdentity:
    check_protocol(peer, protocol)
    return identity_from_pb(model)


def _open_to_pb(message: OpenSession) -> drafter_pb2.OpenSession:
    values = {name: value for name, value in fields_of(message).items() if name not in SessionParams.__slots__}
    return drafter_pb2.OpenSession(params=session_params_to_pb(message), **values)


def _open_from_pb(entry: drafter_pb2.OpenSession, context_len: int) -> OpenSession:
    if not 1 <= entry.prompt_len <= len(entry.token_ids):
        raise RemoteProtocolError(
            f"OpenSession.prompt_len: must be from 1 to the {len(entry.token_ids)} tokens sent, got {entry.prompt_len}"
        )
    if not 1 <= entry.number <= MAX_NUMBER:
        raise RemoteProtocolError(f"OpenSession.number: must be from 1 to {MAX_NUMBER}, got {entry.number}")
    try:
        return OpenSession(
            session_id=_session_id(entry.session_id),
            epoch=entry.epoch,
            number=entry.number,
            token_ids=tuple(entry.token_ids[: context_len + 1]),
            prompt_len=entry.prompt_len,
            price=_price(entry.price),
            room=entry.room,
            traceparent=_trace_context(entry.traceparent),
            **session_params_from_pb(entry.params),
        )
    except InvalidRequestError as error:
        raise RemoteProtocolError(f"OpenSession.params.{error}") from error


def _trace_context(value: str) -> str:
    if value and not re.fullmatch(TRACE_CONTEXT, value):
        raise RemoteProtocolError(f"OpenSession.traceparent: must be a W3C trace context, got {value[:64]!r}")
    return value


def _commits_to_pb(message: Commits) -> drafter_pb2.Commits:
    return drafter_pb2.Commits(
        sessions=to_bytes(message.numbers),
        base_lens=to_bytes(message.base_lens),
        ends=to_bytes(message.ends),
        token_ids=to_bytes(message.tokens),
        prices=message.prices.astype(FLOAT).tobytes(),
        rooms=to_bytes(message.rooms),
    )


def _commits_from_pb(entry: drafter_pb2.Commits) -> Commits:
    numbers, ends, base_lens, rooms, tokens = read_columns(entry, ("base_lens", "rooms"), ("token_ids",))
    prices = read_shares("Commits.prices", entry.prices, len(numbers))
    return Commits(numbers=numbers, base_lens=base_lens, ends=ends, tokens=tokens, prices=prices, rooms=rooms)


def _states_from_pb(entry: drafter_pb2.CommittedStates) -> CommittedStates:
    if not 1 <= entry.width <= MAX_STATE_WIDTH:
        raise RemoteProtocolError(f"CommittedStates.width: must be from 1 to {MAX_STATE_WIDTH}, got {entry.width}")
    if not entry.values or len(entry.values) % (BFLOAT16_BYTES * entry.width):
        raise RemoteProtocolError(
            f"CommittedStates.values: must hold whole positions of {entry.width} bfloat16 numbers, got "
            f"{len(entry.values)} bytes"
        )
    return CommittedStates(number=entry.number, start=entry.start, width=entry.width, values=entry.values)


def _drafts_to_pb(message: Drafts) -> drafter_pb2.Drafts:
    return drafter_pb2.Drafts(
        sessions=to_bytes(message.numbers),
        base_lens=to_bytes(message.base_lens),
        ends=to_bytes(message.ends),
        node_ids=to_bytes(message.ids),
        parent_ids=to_bytes(message.parent_ids),
        token_ids=to_bytes(message.tokens),
        confidences=np.rint(MAX_CONFIDENCE * message.confidences).astype(np.uint8).tobytes(),
        distributions=[
            drafter_pb2.SparseDraft(token_ids=each.token_ids, weights=each.weights) for each in message.distributions
        ],
    )


def _drafts_from_pb(entry: drafter_pb2.Drafts, last_number: int) -> Drafts:
    numbers, ends, base_lens, ids, parent_ids, tokens = read_columns(
        entry, ("base_lens",), NODE_COLUMNS, low=1, last_number=last_number, most_entries=MAX_NODES
    )
    check_size("Drafts.confidences", len(entry.confidences), len(ids))
    check_size("Drafts.distributions", len(entry.distributions) or len(ids), len(ids))
    return Drafts(
        numbers=numbers,
        base_lens=base_lens,
        ends=ends,
        ids=ids,
        parent_ids=parent_ids,
        tokens=tokens,
        confidences=np.frombuffer(entry.confidences, np.uint8) / MAX_CONFIDENCE,
        distributions=[*map(_draft_from_pb, entry.distributions, tokens.tolist())] if entry.distributions else (),
    )


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


def _session_id(session_id: str) -> str:
    if not session_id:
        raise RemoteProtocolError("OpenSession.session_id: must not be empty")
    if len(session_id) > MAX_SESSION_ID_CHARS:
        raise RemoteProtocolError(
            f"OpenSession.session_id: has {len(session_id)} characters, at most {MAX_SESSION_ID_CHARS} are allowed"
        )
    return session_id


def _price(value: float) -> float:
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise RemoteProtocolError(f"OpenSession.price: must be a number from 0 to 1, got {value!r}")
    return decimal(value)

"""Parameters, identities and records on the wire: the messages of more than one service."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableSequence, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf.message import Message

from paceline.core.errors import InvalidRequestError, RemoteProtocolError
from paceline.core.messages import ModelIdentity, SpeculationRecord, Timings
from paceline.core.params import (
    MAX_DRAFT_TOKENS,
    SAMPLING,
    SamplingParams,
    SessionParams,
    SpeculationParams,
    check_bad_word,
)
from paceline.core.prediction import MAX_PREDICTED_TOKENS
from paceline.rpc.v1 import common_pb2
from paceline.wire.columns import check_count

# Version of what gateways, verifiers and drafters say to each other; both ends of a stream must have the same.
PROTOCOL = 5
MAX_UINT32 = 2**32 - 1
# Ids are in every message of a session, and in its errors.
MAX_SESSION_ID_CHARS = 256
# Most entries of a model's lists: its end tokens, methods and rules.
MAX_NAMES = 64
# A smaller positive value would arrive as 0, which means "not set" on the wire.
SMALLEST_FLOAT32 = 2.0**-126


def check_protocol(peer: str, protocol: int) -> None:
    """Refuses a peer of another version by its first message."""
    if protocol != PROTOCOL:
        raise RemoteProtocolError(
            f"protocol: {peer} speaks version {protocol or 1} and we speak {PROTOCOL}: run the same release everywhere"
        )


def sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    """Encodes sampling parameters.

    Raises:
        InvalidRequestError: A whole number does not fit into 32 bits.
    """
    values = fields_of(params)
    for name, value in values.items():
        if isinstance(value, int) and SAMPLING[name].high is None:
            check_uint32(name, (value,))
    check_uint32("logit_bias", [token_id for token_id, _ in params.logit_bias])
    check_uint32("bad_words", [*chain.from_iterable(params.bad_words)])
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_uint32(name, values[name])
    nested = {
        "top_p": max(params.top_p, SMALLEST_FLOAT32),
        "logit_bias": [common_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        "bad_words": [common_pb2.BadWord(token_ids=word) for word in params.bad_words],
    }
    return common_pb2.SamplingParams(**values | nested)


def sampling_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    """Decodes sampling parameters; an absent temperature is 0.

    Raises:
        InvalidRequestError: A field is outside its limits; of lists, before anything is made of their entries.
    """
    for name, row in SAMPLING.items():
        if row.most is not None:
            row.check(name, getattr(message, name))
    for index, word in enumerate(message.bad_words):
        check_bad_word(index, len(word.token_ids))
    nested: dict[str, Any] = {
        "temperature": decimal(message.temperature),
        "logit_bias": tuple((entry.token_id, decimal(entry.bias)) for entry in message.logit_bias),
        "bad_words": tuple(tuple(word.token_ids) for word in message.bad_words),
    }
    return SamplingParams(**_values(message, nested))


def speculation_to_pb(params: SpeculationParams) -> common_pb2.SpeculationParams:
    return common_pb2.SpeculationParams(**fields_of(params))


def speculation_from_pb(message: common_pb2.SpeculationParams) -> SpeculationParams:
    """Decodes what a request asks of speculation.

    Raises:
        InvalidRequestError: A field is outside its limits.
    """
    predicted = tuple(message.predicted_token_ids[:MAX_PREDICTED_TOKENS])
    return SpeculationParams(**_values(message, {"predicted_token_ids": predicted}))


def session_params_to_pb(params: SessionParams) -> common_pb2.SessionParams:
    """Encodes what a session is run with, of whichever message it is.

    Raises:
        InvalidRequestError: As of `sampling_to_pb`.
    """
    nested = {"sampling": sampling_to_pb(params.sampling), "speculation": speculation_to_pb(params.speculation)}
    return common_pb2.SessionParams(**params.params() | nested)


def session_params_from_pb(message: common_pb2.SessionParams) -> dict[str, Any]:
    """Returns the fields of `SessionParams`; absent `speculation` means its defaults.

    Raises:
        InvalidRequestError: A field is missing or outside its limits.
    """
    if not message.HasField("sampling"):
        raise InvalidRequestError("sampling", "is missing")
    nested: dict[str, Any] = {"sampling": sampling_from_pb(message.sampling), "speculation": SpeculationParams()}
    if message.HasField("speculation"):
        nested["speculation"] = speculation_from_pb(message.speculation)
    return _values(message, nested)


def identity_to_pb(identity: ModelIdentity) -> common_pb2.ModelIdentity:
    return common_pb2.ModelIdentity(**fields_of(identity))


def identity_from_pb(message: common_pb2.ModelIdentity) -> ModelIdentity:
    """Decodes a model identity.

    Raises:
        RemoteProtocolError: The vocabulary of the model is missing, or it has too many end tokens, methods or rules.
    """
    for field in ("eos_token_ids", "methods", "acceptance_rules"):
        check_count(f"ModelIdentity.{field}", len(getattr(message, field)), MAX_NAMES)
    if not message.vocab_hash:
        raise RemoteProtocolError("ModelIdentity.vocab_hash: must not be empty")
    if message.vocab_size == 0:
        raise RemoteProtocolError("ModelIdentity.vocab_size: must be at least 1, got 0")
    return ModelIdentity(**_values(message))


def speculation_record_to_pb(record: SpeculationRecord) -> common_pb2.SpeculationRecord:
    return common_pb2.SpeculationRecord(**fields_of(record))


def speculation_record_from_pb(message: common_pb2.SpeculationRecord) -> SpeculationRecord:
    """Decodes what speculation did.

    Raises:
        RemoteProtocolError: It has more draft tokens in a round than there can be, or no number of sessions.
    """
    check_count("SpeculationRecord.acceptance_histogram", len(message.acceptance_histogram), MAX_DRAFT_TOKENS + 1)
    if not 0.0 <= message.mean_batch_size < math.inf:
        raise RemoteProtocolError(f"SpeculationRecord.mean_batch_size: got {message.mean_batch_size!r}")
    return SpeculationRecord(**_values(message, {"mean_batch_size": message.mean_batch_size}))


def timings_to_pb(timings: Timings) -> common_pb2.Timings:
    return common_pb2.Timings(**fields_of(timings))


def timings_from_pb(message: common_pb2.Timings) -> Timings:
    return Timings(**_values(message))


def check_uint32(field: str, values: Sequence[int]) -> None:
    """Refuses whole numbers that do not fit into 32 bits.

    Raises:
        InvalidRequestError: Names the field.
    """
    for value in (min(values, default=0), max(values, default=0)):
        if not 0 <= value <= MAX_UINT32:
            raise InvalidRequestError(field, f"must be from 0 to {MAX_UINT32}, got {value}")


def decimal(value: float) -> float:
    """Returns the shortest decimal number that has this float32, so that 0.8 arrives as 0.8."""
    return float(str(np.float32(value)))


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a named tuple or a slotted dataclass; unlike `asdict` it copies no tokens."""
    return {name: getattr(value, name) for name in getattr(value, "_fields", None) or value.__dataclass_fields__}


def _values(message: Message, nested: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Returns the values of a message by the names of its fields; lists become tuples, and absent ones are left out.

    Args:
        nested: Fields that are decoded already.
    """
    values = {**nested}
    for each in message.DESCRIPTOR.fields:
        if each.name not in nested and (not each.has_presence or message.HasField(each.name)):
            value = getattr(message, each.name)
            if isinstance(value, MutableSequence):
                value = tuple(value)
            elif isinstance(value, float):
                value = decimal(value)
            values[each.name] = value
    return values

"""Checks the bytes of a large message before it is parsed, as nothing can interrupt the parser.

A prompt costs next to nothing to parse, however long; millions of tiny fields hold the interpreter for 0.1 s. It knows
the numbers of the fields that may be long, nothing else of the message.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.errors import InvalidRequestError
from paceline.rpc.v1 import gateway_pb2

GENERATE = "/paceline.rpc.v1.Gateway/Generate"
# Whatever a message of this size holds, it is parsed within 2 ms.
SMALL_BYTES = 64 * 1024
# More ids than any context holds take 25 ms to parse.
MAX_TOKEN_IDS = 1 << 20
# A prompt behind more fields than these is not found.
MAX_FIELDS = 64
FIELD = "request"
_PROMPT = gateway_pb2.GatewayGenerateRequest.PROMPT_FIELD_NUMBER
_TOKEN_IDS = gateway_pb2.GatewayGenerateRequest.PROMPT_TOKEN_IDS_FIELD_NUMBER
_IDS = gateway_pb2.TokenIds.IDS_FIELD_NUMBER
_LENGTH_DELIMITED = 2
_BYTES_BEFORE_THE_LAST = bytes(range(0x80, 0x100))


def check_message(method: str, data: bytes) -> None:
    """Refuses a message that would take long to parse.

    Raises:
        InvalidRequestError: It holds much beside a prompt, too many token ids, or is cut short.
    """
    if len(data) <= SMALL_BYTES:
        return
    view = memoryview(data)
    long_bytes = num_ids = 0
    if method == GENERATE:
        for number, value in _long_fields(view):
            if number == _PROMPT:
                long_bytes += len(value)
            elif number == _TOKEN_IDS:
                for inner, ids in _long_fields(value):
                    if inner == _IDS:
                        long_bytes += len(ids)
                        # The last byte of each id, and no other, is below 0x80.
                        num_ids += len(bytes(ids).translate(None, _BYTES_BEFORE_THE_LAST))
    if num_ids > MAX_TOKEN_IDS:
        raise InvalidRequestError("prompt_token_ids", f"has {num_ids} ids, at most {MAX_TOKEN_IDS} are read")
    if len(data) - long_bytes > SMALL_BYTES:
        raise InvalidRequestError(
            FIELD, f"holds {len(data) - long_bytes} bytes beside its prompt, at most {SMALL_BYTES} are read"
        )


def _long_fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yields number and bytes of the fields with a length, as far as they are among the first."""
    at = 0
    for _ in range(MAX_FIELDS):
        if at >= len(data):
            return
        tag, at = _varint(data, at)
        if tag & 7 != _LENGTH_DELIMITED:
            # No message of ours has other fields here: what follows is not looked at.
            return
        length, at = _varint(data, at)
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise InvalidRequestError(FIELD, "is not a message of this method: a number is cut short")

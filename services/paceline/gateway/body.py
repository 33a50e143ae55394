"""Reads a request body within bounds of size and time, and makes a JSON object of it.

It knows no field of any request; its errors say what is wrong with the bytes.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.gateway.errors import BodyTimeoutError, BodyTooLargeError

FIELD = "body"
# Read and thrown away beyond the limit, since most clients look at an answer only after sending everything.
MAX_DISCARDED_BYTES = 64 * 1024 * 1024


async def read_body(chunks: AsyncIterator[bytes], declared: str | None, *, max_bytes: int, timeout_s: float) -> bytes:
    """Returns the body.

    Args:
        chunks: The body as it arrives.
        declared: The Content-Length header.
        max_bytes: Largest body accepted.
        timeout_s: Time for all of it, in seconds.

    Raises:
        BodyTooLargeError: It is larger than the limit.
        BodyTimeoutError: It did not arrive in time.
    """
    too_large = BodyTooLargeError(FIELD, f"is larger than the limit of {max_bytes} bytes")
    if declared is not None and declared.isdigit() and int(declared) > max_bytes + MAX_DISCARDED_BYTES:
        raise too_large
    received = bytearray()
    num_discarded = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in chunks:
                if len(received) + len(chunk) <= max_bytes and not num_discarded:
                    received += chunk
                    continue
                num_discarded += len(chunk)
                if num_discarded > MAX_DISCARDED_BYTES:
                    break
    except TimeoutError:
        raise BodyTimeoutError(FIELD, f"did not arrive within {timeout_s:g} s") from None
    if num_discarded:
        raise too_large
    return bytes(received)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a body.

    Raises:
        InvalidRequestError: It is not UTF-8, not JSON, not an object, or holds NaN or Infinity.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(FIELD, f"is not valid UTF-8: {error.reason} at byte {error.start}") from None
    constants: list[str] = []

    def take_constant(name: str) -> float:
        constants.append(name)
        return math.nan

    try:
        value = json.loads(text, parse_constant=take_constant, parse_float=_number)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            FIELD, f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise InvalidRequestError(FIELD, "is not usable JSON: nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(FIELD, f"is not usable JSON: {error}") from None
    if constants:
        path = (_path_of_nan(value) or "").removeprefix(".")
        raise InvalidRequestError(path or FIELD, f"{constants[0]} is not a JSON number")
    if not isinstance(value, dict):
        raise InvalidRequestError(FIELD, "must be a JSON object")
    return value


def _number(text: str) -> float | int:
    """Returns a number with a point or an exponent; to JSON, 5.0 is as whole as 5."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _path_of_nan(value: Any) -> str | None:
    """Returns where the first NaN stands, such as `.logit_bias.5`; None if an equal key has hidden it."""
    if isinstance(value, float):
        return "" if math.isnan(value) else None
    entries: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        entries = [(f".{key}", entry) for key, entry in value.items()]
    elif isinstance(value, list):
        entries = [(f"[{index}]", entry) for index, entry in enumerate(value)]
    for name, entry in entries:
        path = _path_of_nan(entry)
        if path is not None:
            return name + path
    return None

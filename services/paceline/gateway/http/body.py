"""Reads a request body within bounds of size and time, and makes a JSON object of it.

It knows no field of any request; its errors describe the bytes.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]  # not in the stubs, but as old as json
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.gateway.http.errors import BodyEncodingError, BodyTimeoutError, BodyTooLargeError

FIELD = "body"
# A larger body is scanned in Python, which lets the event loop in between: the compiled scanner keeps the interpreter
# for up to 0.3 s for the smallest values in 4 MiB. A text, however long, takes the same either way.
MAX_COMPILED_BYTES = 128 * 1024
# Lists, objects and members of objects in such a body; a chat of 30,000 messages has 90,000.
MAX_PARTS = 100_000


async def read_body(
    chunks: AsyncIterator[bytes],
    headers: Mapping[str, str],
    make_room: Callable[[int], None],
    *,
    max_bytes: int,
    timeout_s: float,
) -> bytearray:
    """Returns the body. The connection reads and discards the rest of a refused one.

    Args:
        chunks: The body as it arrives.
        headers: Headers of the request, with lower-case names.
        make_room: Called with the number of bytes before they are read; raises where there is no room.
        max_bytes: Largest body accepted.
        timeout_s: Time for all of it, in seconds.

    Raises:
        BodyEncodingError: It is compressed, and how large it is inside cannot be known before it is read.
        BodyTooLargeError: It is larger than the limit.
        BodyTimeoutError: It did not arrive in time.
        OverloadedError: There is no room to read it.
    """
    _check_encodings(headers)
    too_large = BodyTooLargeError(FIELD, f"is larger than the limit of {max_bytes} bytes")
    declared = headers.get("content-length", "")
    num_declared = int(declared) if declared.isascii() and declared.isdigit() else 0
    if num_declared > max_bytes:
        raise too_large
    make_room(num_declared)
    received = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in chunks:
                if len(received) + len(chunk) > max_bytes:
                    raise too_large
                make_room(max(num_declared, len(received) + len(chunk)))
                received += chunk
    except TimeoutError:
        raise BodyTimeoutError(FIELD, f"did not arrive within {timeout_s:g} s") from None
    return received


def _check_encodings(headers: Mapping[str, str]) -> None:
    for name, plain in (("content-encoding", "identity"), ("transfer-encoding", "chunked")):
        given = headers.get(name, "").strip().lower()
        if given not in ("", plain):
            raise BodyEncodingError(FIELD, f"must be sent as it is, without {name}: {given}")


def parse_json_object(body: bytes | bytearray) -> dict[str, Any]:
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
        kind = json.JSONDecoder if len(text) <= MAX_COMPILED_BYTES else _PatientDecoder
        value = kind(parse_constant=take_constant, parse_float=number).decode(text)
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


class _PatientDecoder(json.JSONDecoder):
    """The standard library's decoder without its compiled scanner, and with a bound on what has parts."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._num_parts = 0
        # The library's own functions in Python; its scanner calls what these names hold.
        self.parse_array = self._array
        self.parse_object = self._object
        self.scan_once = py_make_scanner(self)

    def _array(self, *arguments: Any) -> Any:
        self._count()
        return JSONArray(*arguments)

    def _object(self, at: Any, strict: bool, scan: Any, *arguments: Any) -> Any:
        def member(text: str, index: int) -> Any:
            self._count()
            return scan(text, index)

        self._count()
        return JSONObject(at, strict, member, *arguments)

    def _count(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ValueError(f"more than {MAX_PARTS} lists, objects and members")


def number(text: str) -> float | int:
    """Returns a number with a point or an exponent; to JSON, 5.0 is as whole as 5."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _path_of_nan(value: Any) -> str | None:
    """Returns the path of the first NaN, such as `.logit_bias.5`; None if an equal key has hidden it."""
    if isinstance(value, float):
        return "" if math.isnan(value) else None
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for name, entry in entries:
        path = _path_of_nan(entry)
        if path is not None:
            return (f".{name}" if isinstance(name, str) else f"[{name}]") + path
    return None

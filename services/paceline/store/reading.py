"""Reads entries of a store field by field; a bad entry never affects others.

Types come from the dataclasses themselves, so a new field is checked without a change here. Unknown fields are ignored:
newer replicas may have more.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

from paceline.core.addresses import is_address
from paceline.core.messages import REPLICA_ROLES
from paceline.store.base import MAX_EPOCH, Replica, SessionRecord, SessionState

MAX_CHARS = 1024
MAX_INTEGER = 2**64 - 1

ValueT = TypeVar("ValueT")


class EntryError(ValueError):
    """An entry of the store is malformed; names the field."""


def replica_from_json(replica_id: str, text: bytes, *, marked: bool) -> Replica:
    """Returns a replica as it described itself.

    Args:
        replica_id: The name under which the description is stored.
        text: JSON.
        marked: Whether it is marked as draining.

    Raises:
        EntryError: It is unreadable, has values of the wrong type or out of range, or describes another replica.
    """
    replica: Replica = _value("entry", _json(text), Replica)
    _demand(replica.replica_id == replica_id, "replica_id", f"must be {replica_id!r}", replica.replica_id)
    _demand(replica.role in REPLICA_ROLES, "role", f"must be one of {', '.join(REPLICA_ROLES)}", replica.role)
    _check_address("address", replica.address)
    if replica.metrics_address:
        _check_address("metrics_address", replica.metrics_address)
    return replace(replica, draining=marked or replica.draining)


def record_from_fields(session_id: str, values: Mapping[str, bytes | None], log_bytes: int) -> SessionRecord:
    """Returns a session record.

    Args:
        session_id: Session whose record it must be.
        values: By the names of its fields; None: missing.
        log_bytes: Length of its token log, four bytes a token.

    Raises:
        EntryError: A field is missing, of the wrong type or out of range, or the log lacks tokens.
    """
    hints = _hints(SessionRecord)
    there = {name: _from_text(name, value, hints[name]) for name, value in values.items() if value is not None}
    record = _object("record", there, SessionRecord)
    _demand(record.session_id == session_id, "session_id", f"must be {session_id!r}", record.session_id)
    _demand(isinstance(_json(record.params_json.encode()), dict), "params_json", "must be an object", "another value")
    _demand(record.epoch <= MAX_EPOCH, "epoch", f"must be at most {MAX_EPOCH}", record.epoch)
    _demand(log_bytes % 4 == 0, "log", "must have four bytes a token", log_bytes)
    least = record.prompt_len + record.committed_len
    _demand(log_bytes // 4 >= least, "log", f"must have at least {least} tokens", log_bytes // 4)
    return record


def number_from_text(name: str, value: bytes) -> int:
    """Returns a field that is a number.

    Raises:
        EntryError: It is none, or out of range.
    """
    number: int = _from_text(name, value, int)
    return number


def _from_text(name: str, value: bytes, hint: Any) -> Any:
    try:
        text = value.decode()
        if hint is int:
            _demand(text.isascii() and text.isdigit(), name, "must be digits", text)
            _check_range(name, int(text))
            return int(text)
        return SessionState(text) if hint is SessionState else text
    except ValueError as error:
        raise error if isinstance(error, EntryError) else EntryError(f"{name}: {error}") from None


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EntryError(f"it is no JSON that can be read ({type(error).__name__})") from None


def _value(name: str, value: Any, hint: Any) -> Any:
    """Returns a JSON value as the type of a field."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _value(name, value, typing.get_args(hint)[0])
    if origin is tuple:
        _demand(isinstance(value, list), name, "must be a list", value)
        return tuple(_value(name, item, typing.get_args(hint)[0]) for item in value)
    if is_dataclass(hint) and isinstance(hint, type):
        _demand(isinstance(value, dict), name, "must be an object", value)
        hints = _hints(hint)
        there = {key: _value(f"{name}.{key}", value[key], hints[key]) for key in hints if key in value}
        return _object(name, there, hint)
    # Exact, since a bool is an int to Python.
    _demand(type(value) is hint, name, f"must be of type {hint.__name__}", value)
    _check_range(name, value)
    return value


def _object(name: str, there: Mapping[str, Any], kind: type[ValueT]) -> ValueT:
    known = fields(kind)  # type: ignore[arg-type]  # only dataclasses come here
    lacking = [each.name for each in known if each.name not in there and each.default is MISSING]
    _demand(not lacking, name, f"must have {', '.join(lacking)}", "none")
    return kind(**there)


@cache
def _hints(kind: type) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name in names}


def _check_range(name: str, value: Any) -> None:
    if isinstance(value, int):
        _demand(0 <= value <= MAX_INTEGER, name, "must be from 0 to 2**64 - 1", value)
    if isinstance(value, str):
        # Names appear in addresses, labels, logs and pages.
        _demand(
            len(value) <= MAX_CHARS and value.isprintable(), name, f"must be {MAX_CHARS} printable characters", value
        )


def _check_address(name: str, value: str) -> None:
    _demand(is_address(value), name, "must be host:port", value)


def _demand(holds: bool, name: str, what: str, got: object) -> None:
    if not holds:
        raise EntryError(f"{name}: {what}, got {repr(got)[:80]}")

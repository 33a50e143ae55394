"""Whatever lies in a store is read field by field, or refused with the field's name."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.messages import ModelIdentity
from paceline.store import reading
from paceline.store.base import Replica
from paceline.store.reading import EntryError, record_from_fields, replica_from_json

IDENTITY = ModelIdentity(name="demo", vocab_hash="abc", vocab_size=4096, context_len=1024, eos_token_ids=(0, 3))
VERIFIER = Replica(replica_id="v1", role="verifier", address="[::1]:8101", identity=IDENTITY, max_sessions=16)
FIELDS: dict[str, bytes | None] = {
    "session_id": b"s1",
    "epoch": b"9007199254740991",
    "owner": b"g1",
    "model": b"demo",
    "verifier_id": b"v1",
    "prompt_len": b"3",
    "committed_len": b"2",
    "state": b"running",
    "params_json": b"{}",
}


def read(values: Any) -> Replica:
    return replica_from_json("v1", json.dumps(values).encode(), marked=False)


def test_a_replica_is_read_as_it_was_written() -> None:
    assert read(asdict(VERIFIER)) == VERIFIER
    assert read({**asdict(VERIFIER), "rack": ["7"], "identity": None}).identity is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("role", ["verifier"]),
        ("role", "Verifier"),
        ("role", None),
        ("replica_id", "v2"),
        ("replica_id", 1),
        ("address", "nowhere"),
        ("address", "host:0"),
        ("address", "host:65536"),
        ("address", ":80"),
        ("address", "unix:/x:80"),
        ("address", "host:٣"),
        ("address", {"host": 1}),
        ("metrics_address", "host"),
        ("max_sessions", -1),
        ("max_sessions", 1.5),
        ("max_sessions", True),
        ("num_sessions", "3"),
        ("num_sessions", 2**64),
        ("draining", 1),
        ("draining", "no"),
        ("identity", []),
        ("identity", "demo"),
        ("identity.name", 7),
        ("identity.name", "two\nlines"),
        ("identity.name", "\ud800"),
        ("identity.name", "x" * 1025),
        ("identity.vocab_size", "4096"),
        ("identity.eos_token_ids", 3),
        ("identity.eos_token_ids", [0, "3"]),
        ("identity.eos_token_ids", [-1]),
    ],
)
def test_a_field_of_a_wrong_type_or_out_of_range_is_named(field: str, value: Any) -> None:
    values = asdict(VERIFIER)
    outer, _, inner = field.partition(".")
    if inner:
        values[outer][inner] = value
    else:
        values[outer] = value
    with pytest.raises(EntryError, match=field):
        read(values)


@pytest.mark.parametrize("lacking", ["replica_id", "role", "address", "identity.vocab_size"])
def test_a_field_that_is_missing_is_named(lacking: str) -> None:
    values = asdict(VERIFIER)
    outer, _, inner = lacking.partition(".")
    del (values[outer] if inner else values)[inner or outer]
    with pytest.raises(EntryError, match=f"must have {inner or outer}"):
        read(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewerIdentity(ModelIdentity):
    """As a later version may know it."""

    speaks: tuple[str, ...] = ()


def test_fields_of_a_later_version_are_checked_by_their_types() -> None:
    older = json.loads(json.dumps(asdict(IDENTITY)))
    values = {**older, "speaks": ["a", "b"]}
    assert reading._value("identity", values, NewerIdentity).speaks == ("a", "b")
    assert reading._value("identity", older, NewerIdentity).speaks == ()
    with pytest.raises(EntryError, match=r"identity\.speaks"):
        reading._value("identity", {**values, "speaks": [1]}, NewerIdentity)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(field=st.sampled_from(sorted(asdict(VERIFIER))), value=JSON)
def test_no_value_of_a_field_does_more_than_refuse_the_entry(field: str, value: Any) -> None:
    try:
        found = read({**asdict(VERIFIER), field: value})
    except EntryError:
        return
    assert isinstance(getattr(found, field), type(getattr(VERIFIER, field)) | type(None))
    assert json.dumps(asdict(found)).encode()


@given(text=st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_do_more_than_refuse_the_entry(text: bytes) -> None:
    with pytest.raises(EntryError):
        replica_from_json("v1", text, marked=False)


def test_json_that_is_too_deep_is_refused() -> None:
    with pytest.raises(EntryError, match="JSON"):
        replica_from_json("v1", b"[" * 100_000, marked=False)


def test_a_record_is_read_as_it_was_written_and_what_an_older_gateway_left_out_has_its_default() -> None:
    record = record_from_fields("s1", {**FIELDS, "api_key": None, "weights_hash": None}, 20)
    assert (record.epoch, record.prompt_len, record.committed_len, record.api_key) == (2**53 - 1, 3, 2, "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session_id", b"s2"),
        ("epoch", b"-1"),
        ("epoch", b""),
        ("epoch", "٣".encode()),
        ("epoch", b"9007199254740992"),
        ("epoch", b"9" * 5000),
        ("epoch", None),
        ("state", b"asleep"),
        ("owner", b"\xff"),
        ("model", None),
        ("prompt_len", b"4"),
        ("committed_len", b"1e9"),
        ("params_json", b"[]"),
        ("params_json", b"{"),
        ("params_json", b"[" * 100_000),
    ],
)
def test_a_record_that_cannot_be_right_is_refused(field: str, value: bytes | None) -> None:
    with pytest.raises(EntryError):
        record_from_fields("s1", {**FIELDS, field: value}, 20)


@pytest.mark.parametrize("log_bytes", [0, 16, 21])
def test_a_log_that_lacks_tokens_or_parts_of_one_is_refused(log_bytes: int) -> None:
    with pytest.raises(EntryError, match="log"):
        record_from_fields("s1", FIELDS, log_bytes)


@given(field=st.sampled_from(sorted(FIELDS)), value=st.binary(max_size=40))
def test_no_bytes_of_a_field_do_more_than_refuse_the_record(field: str, value: bytes) -> None:
    try:
        record_from_fields("s1", {**FIELDS, field: value}, 20)
    except EntryError:
        return

"""Arbitrary messages of any protobuf type, raw gRPC calls that send any bytes, and properties of running services."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ANSWER_S = 30.0
Overrides = Mapping[str, st.SearchStrategy[Any]]

_BORDERS = (0, 1, 2, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
_UINT32 = st.one_of(st.integers(0, 300), st.sampled_from(_BORDERS))
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: st.one_of(st.integers(-2, 300), st.sampled_from((-(2**31), 2**31 - 1))),
    FieldDescriptor.TYPE_SINT32: st.one_of(st.integers(-2, 300), st.sampled_from((-(2**31), 2**31 - 1))),
    FieldDescriptor.TYPE_UINT32: _UINT32,
    FieldDescriptor.TYPE_UINT64: st.one_of(_UINT32, st.sampled_from((2**63, 2**64 - 1))),
    FieldDescriptor.TYPE_FLOAT: st.one_of(st.floats(0, 2, width=32), st.floats(width=32)),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=12),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=24),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 3),
}


def messages(kind: type[Message], overrides: Overrides | None = None) -> st.SearchStrategy[Message]:
    """Well-formed messages whose fields hold anything.

    Args:
        kind: The message's class.
        overrides: Strategies of fields by name, at any depth; of entries where a field is repeated.
    """
    overrides = overrides or {}
    fields = {field.name: _field(field, overrides) for field in kind.DESCRIPTOR.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: _built(kind, values))


def _built(kind: type[Message], values: Mapping[str, Any]) -> Message:
    message = kind()
    for name, value in values.items():
        # One by one: of a oneof the last value stays.
        message.MergeFrom(kind(**{name: value}))
    return message


def _field(field: FieldDescriptor, overrides: Overrides) -> st.SearchStrategy[Any]:
    one: st.SearchStrategy[Any]
    if field.name in overrides:
        one = overrides[field.name]
    elif field.message_type is not None:
        one = messages(field.message_type._concrete_class, overrides)
    else:
        one = _SCALARS[field.type]
    return st.lists(one, max_size=6) if field.is_repeated else one


def mangled(kind: type[Message], overrides: Overrides | None = None) -> st.SearchStrategy[bytes]:
    """Bytes near a message: cut short, with bytes changed or put in, or of no message at all."""
    whole = messages(kind, overrides).map(lambda message: message.SerializeToString())
    cut = st.tuples(whole, st.floats(0, 1)).map(lambda drawn: drawn[0][: int(len(drawn[0]) * drawn[1])])
    changed = st.tuples(whole, st.binary(min_size=1, max_size=4), st.floats(0, 1), st.booleans()).map(_changed)
    return st.one_of(st.binary(max_size=64), cut, changed)


def _changed(drawn: tuple[bytes, bytes, float, bool]) -> bytes:
    data, patch, where, insert = drawn
    at = int(len(data) * where)
    return data[:at] + patch + data[at if insert else at + len(patch) :]


async def holds_for_all(
    strategy: st.SearchStrategy[Any], check: Callable[[Any], Awaitable[None]], max_examples: int
) -> None:
    """Checks a property of services that run in this event loop; Hypothesis looks for a counterexample in a thread."""
    loop = asyncio.get_running_loop()

    async def bounded(value: Any) -> None:
        async with asyncio.timeout(2 * ANSWER_S):
            await check(value)

    @settings(max_examples=max_examples, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def law(value: Any) -> None:
        asyncio.run_coroutine_threadsafe(bounded(value), loop).result()

    await asyncio.to_thread(law)


async def status_of(channel: grpc.aio.Channel, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    """Sends bytes as the one message of a call, reads all answers, and returns status and details."""
    call = channel.unary_stream(method)(data, timeout=ANSWER_S)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return await call.code(), await call.details()


async def status_of_stream(address: str, method: str, sent: Sequence[bytes]) -> tuple[grpc.StatusCode, str]:
    """Sends bytes as the messages of a stream, ends its own side, and returns status and details.

    In a thread: where the service ends the call while there is still something to write, the asyncio client puts an
    error of its own in the place of the service's status.
    """

    def talk() -> tuple[grpc.StatusCode, str]:
        with grpc.insecure_channel(address) as channel:
            call = channel.stream_stream(method)(iter(sent), timeout=ANSWER_S)
            try:
                for _ in call:
                    pass
            except grpc.RpcError as error:
                return error.code(), error.details()
            return call.code(), call.details()

    return await asyncio.to_thread(talk)


async def until(condition: Callable[[], bool]) -> None:
    """Returns once a condition holds that nobody tells of."""
    async with asyncio.timeout(ANSWER_S):
        while not condition():  # noqa: ASYNC110 - it is looked at, not announced
            await asyncio.sleep(0.005)

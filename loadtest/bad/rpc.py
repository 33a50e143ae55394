"""Bad messages for the gRPC doors of gateway, verifier and drafter."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadtest.bad.kinds import Kind, Parts, Target, junk, unrefused
from paceline.core.messages import ModelIdentity
from paceline.core.params import SessionParams
from paceline.gateway.api.grpc.door import MAX_MESSAGE_BYTES as GATEWAY_MESSAGE_BYTES
from paceline.rpc.v1 import common_pb2, drafter_pb2, gateway_pb2, verifier_pb2
from paceline.service.process import MAX_MESSAGE_BYTES
from paceline.wire import identity_to_pb
from paceline.wire.common import PROTOCOL

GATEWAY = "/paceline.rpc.v1.Gateway/Generate"
LIST_MODELS = "/paceline.rpc.v1.Gateway/ListModels"
VERIFIER = "/paceline.rpc.v1.Verifier/Verify"
DRAFTER = "/paceline.rpc.v1.Drafter/Draft"
INVALID, NOT_FOUND, PRECONDITION, UNIMPLEMENTED, EXHAUSTED = (
    frozenset({status})
    for status in ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED")
)
# How a drafter ends the stream of a verifier that has sent its last message without breaking the protocol.
LEFT = frozenset({"UNAVAILABLE"})
# How a verifier refuses a session alone.
REFUSED = frozenset({"InvalidRequestError"})
# The changed bytes may be a good request.
ANY_BUT_A_FAULT = frozenset({"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}) | REFUSED
RARELY = 0.002
OUTSIDE = 2**31
Maker = Callable[[random.Random, Target], Parts]

_BAD_SAMPLING: Mapping[str, Sequence[Any]] = {
    "max_tokens": [0, 2**32 - 1],
    "temperature": [float("nan"), -1.0],
    "top_p": [2.0],
    "min_p": [float("inf")],
    "repetition_penalty": [1e30],
    "presence_penalty": [-3.0],
    "min_tokens": [5],
    "stop_token_ids": [[OUTSIDE], [1] * 65],
    "logit_bias": [[common_pb2.LogitBias(token_id=1, bias=1e9)], [common_pb2.LogitBias(token_id=OUTSIDE)]],
    "logprobs": [21],
}
_BAD_SPECULATION: Mapping[str, Sequence[Any]] = {
    "max_draft_tokens": [65],
    "acceptance": ["Lossy!", "x" * 100_000],
    "method": ["magic trick", "ngram+" * 100],
}


def _no_message(chance: random.Random, _: Target) -> Parts:
    # A tag of more than ten bytes is none.
    return (b"\xff" * 12 + junk(chance),)


def _cut(whole: bytes, chance: random.Random) -> bytes:
    """Ends a message within its last field, which is one with a length."""
    return whole[: -chance.randint(1, 8)]


def _changed(whole: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(whole))
    return whole[:at] + junk(chance, 4) + whole[at + chance.randint(0, 4) :]


def _longer_than(limit: int) -> Maker:
    return lambda chance, _: (bytes(limit + chance.randint(1, 100)),)


def _one_of(values: Mapping[str, Sequence[Any]], chance: random.Random) -> dict[str, Any]:
    """A field with one of its bad values."""
    name = chance.choice(list(values))
    return {name: chance.choice(values[name])}


def _sampling(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"max_tokens": 1, **fields})


def _gateway_good(chance: random.Random, **fields: Any) -> bytes:
    del chance
    values = {"prompt": "x", "sampling": _sampling(), "stop": ["a long stop string"]}
    return gateway_pb2.GatewayGenerateRequest(**{**values, **fields}).SerializeToString()


def _verifier_good(chance: random.Random, **fields: Any) -> bytes:
    values: dict[str, Any] = {
        "number": 1,
        "session_id": f"bad-{chance.randbytes(8).hex()}",
        "epoch": 1,
        "prompt_token_ids": [1, 2, 3],
    }
    params: dict[str, Any] = {"sampling": _sampling(), "cache_salt": "0123456789"}
    params |= {name: fields.pop(name) for name in SessionParams.__slots__ if name in fields}
    values["params"] = common_pb2.SessionParams(**params)
    message = verifier_pb2.VerifyRequest(starts=[verifier_pb2.StartSession(**{**values, **fields})])
    return message.SerializeToString()


def _refusal(answer: bytes) -> str:
    """How a verifier has refused a session."""
    errors = verifier_pb2.VerifyResponse.FromString(answer).errors
    return errors[0].kind if errors else ""


_GREETING = (verifier_pb2.VerifyRequest(protocol=PROTOCOL).SerializeToString(),)


def _of_both(
    good: Callable[..., bytes], method: str, most_bytes: int, first: Parts = (), refused: frozenset[str] = INVALID
) -> list[Kind]:
    """Kinds for both services that generate.

    Args:
        good: Makes a good request, with some of its fields replaced; its last field has a length.
        method: Method of the service.
        most_bytes: Most bytes of a message.
        first: Messages before it.
        refused: How one session is refused.
    """

    def sampled(chance: random.Random, _: Target) -> Parts:
        return (*first, good(chance, sampling=_sampling(**_one_of(_BAD_SAMPLING, chance))))

    def speculated(chance: random.Random, _: Target) -> Parts:
        params = common_pb2.SpeculationParams(enabled=True, **_one_of(_BAD_SPECULATION, chance))
        return (*first, good(chance, speculation=params))

    return [
        _kind("no message", _no_message, INVALID, method),
        _kind("cut message", lambda chance, _: (*first, _cut(good(chance), chance)), INVALID, method),
        _kind("changed bytes", lambda chance, _: (*first, _changed(good(chance), chance)), ANY_BUT_A_FAULT, method),
        _kind("bad sampling", sampled, refused, method),
        _kind("bad speculation", speculated, refused, method),
        _kind("unknown method", _no_message, UNIMPLEMENTED, f"{method.rpartition('/')[0]}/Nothing"),
        _kind("too large", _longer_than(most_bytes), EXHAUSTED, method, RARELY),
    ]


def _kind(name: str, make: Maker, right: frozenset[str], method: str, weight: float = 1.0) -> Kind:
    refusal = _refusal if method == VERIFIER else unrefused
    return Kind(name=name, make=make, right=right, method=method, weight=weight, refusal=refusal)


def _gateway(name: str, right: frozenset[str], make: Callable[[random.Random], dict[str, Any]]) -> Kind:
    return _kind(name, lambda chance, _: (_gateway_good(chance, **make(chance)),), right, GATEWAY)


def _verifier(name: str, make: Callable[[Target], dict[str, Any]]) -> Kind:
    return _kind(name, lambda chance, target: (*_GREETING, _verifier_good(chance, **make(target))), REFUSED, VERIFIER)


def _stream(name: str, right: frozenset[str], *messages: verifier_pb2.VerifyRequest) -> Kind:
    """A gateway that breaks the protocol of the stream."""
    parts = tuple(each.SerializeToString() for each in messages)
    return _kind(name, lambda chance, _: (*_GREETING, _verifier_good(chance), *parts), right, VERIFIER)


_OTHER_VERSION = verifier_pb2.VerifyRequest(protocol=PROTOCOL + 1).SerializeToString()
_BAD_STOPS = (["x"] * 17, [""], ["x" * 257])
_TOKEN_OUTSIDE = {"prompt": None, "prompt_token_ids": gateway_pb2.TokenIds(ids=[1, OUTSIDE]), "sampling": None}
GATEWAY_KINDS = (
    *_of_both(_gateway_good, GATEWAY, GATEWAY_MESSAGE_BYTES),
    _kind("no message, models", _no_message, INVALID, LIST_MODELS),
    _kind("no prompt", lambda *_: (b"",), INVALID, GATEWAY),
    _gateway("empty prompt", INVALID, lambda _: {"prompt": ""}),
    _gateway("unknown model", NOT_FOUND, lambda chance: {"model": junk(chance).hex() * 9}),
    _gateway("bad stop", INVALID, lambda chance: {"stop": chance.choice(_BAD_STOPS)}),
    _gateway("token outside", INVALID, lambda _: _TOKEN_OUTSIDE),
    _kind(
        "many small fields",
        lambda chance, _: (b"\x32\x00" * chance.randint(50_000, 99_999),),
        INVALID,
        GATEWAY,
        RARELY,
    ),
)
VERIFIER_KINDS = (
    *_of_both(_verifier_good, VERIFIER, MAX_MESSAGE_BYTES, _GREETING, REFUSED),
    _kind("nothing at all", lambda *_: (), INVALID, VERIFIER),
    _kind("no greeting", lambda chance, _: (_verifier_good(chance),), INVALID, VERIFIER),
    _kind("other version", lambda *_: (_OTHER_VERSION,), INVALID, VERIFIER),
    _stream("number twice", INVALID, verifier_pb2.VerifyRequest(starts=[verifier_pb2.StartSession(number=1)])),
    _stream("number 0", INVALID, verifier_pb2.VerifyRequest(starts=[verifier_pb2.StartSession()])),
    _stream("leaves unknown", frozenset({"OK"}), verifier_pb2.VerifyRequest(leaves=[0, 2, 2**32 - 1])),
    _verifier("no session", lambda _: {"session_id": ""}),
    _verifier("long session id", lambda _: {"session_id": "x" * 10_000}),
    _verifier("no prompt", lambda _: {"prompt_token_ids": []}),
    _verifier("no sampling", lambda _: {"sampling": None}),
    _verifier("token outside", lambda _: {"prompt_token_ids": [1, OUTSIDE]}),
    _verifier("all committed", lambda _: {"committed_token_ids": [1, 2]}),
    _verifier("beyond the context", lambda target: {"prompt_token_ids": [1] * (target.context_len + 1)}),
)


def _hello(target: Target, vocab_hash: str | None = None) -> drafter_pb2.DraftRequest:
    identity = ModelIdentity(
        name="bad",
        vocab_hash=target.vocab_hash if vocab_hash is None else vocab_hash,
        vocab_size=target.vocab_size,
        context_len=target.context_len,
    )
    return drafter_pb2.DraftRequest(target=identity_to_pb(identity), protocol=PROTOCOL)


def _open(**fields: Any) -> drafter_pb2.OpenSession:
    values: dict[str, Any] = {
        "session_id": "s",
        "epoch": 1,
        "number": 1,
        "token_ids": range(1, 9),
        "prompt_len": 8,
        "params": {"sampling": _sampling(max_tokens=64)},
    }
    return drafter_pb2.OpenSession(**{**values, **fields})


def _commit(number: int = 1, base_len: int = 8, token_id: int = 1, price: float = 0.0) -> drafter_pb2.Commits:
    return drafter_pb2.Commits(
        sessions=_word(number),
        base_lens=_word(base_len),
        ends=_word(1),
        token_ids=_word(token_id),
        prices=struct.pack("<f", price),
        rooms=_word(0),
    )


def _word(number: int) -> bytes:
    return struct.pack("<I", number)


def _sent(*sent: Any) -> Maker:
    """After a good greeting: opens, commits and the numbers of sessions that end, or bytes, one message each."""
    parts: list[bytes] = []
    for each in sent:
        match each:
            case drafter_pb2.OpenSession():
                each = drafter_pb2.DraftRequest(opens=[each])
            case drafter_pb2.Commits():
                each = drafter_pb2.DraftRequest(commits=[each])
            case int():
                each = drafter_pb2.DraftRequest(closes=[each])
        parts.append(each if isinstance(each, bytes) else each.SerializeToString())
    return lambda _, target: (_hello(target).SerializeToString(), *parts)


def _cut_open(chance: random.Random, target: Target) -> Parts:
    message = drafter_pb2.DraftRequest(opens=[_open()]).SerializeToString()
    return (_hello(target).SerializeToString(), _cut(message, chance))


def _draft(name: str, make: Maker, right: frozenset[str]) -> Kind:
    return Kind(name=name, make=make, right=right, method=DRAFTER, ends_call=right is not LEFT)


_NAN = float("nan")
DRAFTER_KINDS = (
    _draft("no message at first", _no_message, INVALID),
    _draft("no message later", _sent(b"\xff" * 12), INVALID),
    _draft("cut message", _cut_open, INVALID),
    _kind("nothing at all", lambda *_: (), INVALID, DRAFTER),
    _draft("no greeting", lambda *_: (drafter_pb2.DraftRequest(opens=[_open()]).SerializeToString(),), INVALID),
    _draft("no vocabulary", lambda _, target: (_hello(target, "").SerializeToString(),), INVALID),
    _draft("other vocabulary", lambda _, target: (_hello(target, "other").SerializeToString(),), PRECONDITION),
    _draft("open without tokens", _sent(_open(token_ids=[])), INVALID),
    _draft("open beyond its tokens", _sent(_open(prompt_len=9)), INVALID),
    _draft("open without a name", _sent(_open(session_id="")), INVALID),
    _draft("open without a number", _sent(_open(number=0)), INVALID),
    _draft("open at no price", _sent(_open(price=_NAN)), INVALID),
    _draft("open, bad sampling", _sent(_open(params={"sampling": _sampling(temperature=_NAN)})), INVALID),
    _draft("commit at no price", _sent(_open(), _commit(price=2.0)), INVALID),
    _draft("contradiction", _sent(_open(), _commit(base_len=4, token_id=99)), INVALID),
    _draft("commit before open", _sent(_commit()), LEFT),
    _draft("close unknown", _sent(9), LEFT),
    _draft("gap", _sent(_open(), _commit(base_len=2**31 - 1)), LEFT),
    _draft("other number", _sent(_open(), _commit(number=2**31 - 1)), LEFT),
    _draft("opened twice", _sent(_open(), _open(epoch=0), _open(epoch=5)), LEFT),
    _draft("token outside", _sent(_open(token_ids=[OUTSIDE] * 8), _commit(token_id=OUTSIDE - 1)), LEFT),
    _draft(
        "open beyond the context",
        lambda chance, target: _sent(_open(token_ids=[1] * (target.context_len + chance.randint(1, 9999))))(
            chance, target
        ),
        LEFT,
    ),
    _draft("after close", _sent(_open(), 1, _commit()), LEFT),
)

"""Bad messages for the gRPC doors of gateway, verifier and drafter."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from loadtest.bad.kinds import Kind, Target, junk
from paceline.core.messages import ModelIdentity
from paceline.gateway.api.grpc.door import MAX_MESSAGE_BYTES as GATEWAY_MESSAGE_BYTES
from paceline.rpc.v1 import common_pb2, drafter_pb2, gateway_pb2, verifier_pb2
from paceline.service.process import MAX_MESSAGE_BYTES
from paceline.wire import identity_to_pb

GATEWAY = "/paceline.rpc.v1.Gateway/Generate"
LIST_MODELS = "/paceline.rpc.v1.Gateway/ListModels"
VERIFIER = "/paceline.rpc.v1.Verifier/Generate"
DRAFTER = "/paceline.rpc.v1.Drafter/Draft"
INVALID = frozenset({"INVALID_ARGUMENT"})
NOT_FOUND = frozenset({"NOT_FOUND"})
PRECONDITION = frozenset({"FAILED_PRECONDITION"})
UNIMPLEMENTED = frozenset({"UNIMPLEMENTED"})
EXHAUSTED = frozenset({"RESOURCE_EXHAUSTED"})
# How a drafter ends the stream of a verifier that has said its last without breaking the protocol.
LEFT = frozenset({"UNAVAILABLE"})
# What became of the bytes may be a good request.
ANY_BUT_A_FAULT = frozenset({"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"})
SELDOM = 0.002
OUTSIDE = 2**31
Maker = Callable[[random.Random, Target], tuple[bytes, ...]]

_BAD_SAMPLING: tuple[dict[str, Any], ...] = (
    {"max_tokens": 0},
    {"max_tokens": 2**32 - 1},
    {"temperature": float("nan")},
    {"temperature": -1.0},
    {"top_p": 2.0},
    {"min_p": float("inf")},
    {"repetition_penalty": 1e30},
    {"presence_penalty": -3.0},
    {"min_tokens": 5},
    {"stop_token_ids": [OUTSIDE]},
    {"stop_token_ids": [1] * 65},
    {"logit_bias": [common_pb2.LogitBias(token_id=1, bias=1e9)]},
    {"logit_bias": [common_pb2.LogitBias(token_id=OUTSIDE)]},
    {"logprobs": 21},
)
_BAD_SPECULATION: tuple[dict[str, Any], ...] = (
    {"max_draft_tokens": 65},
    {"acceptance": "Lossy!"},
    {"acceptance": "x" * 100_000},
    {"method": "magic trick"},
    {"method": "ngram+" * 100},
)


def _no_message(chance: random.Random, target: Target) -> tuple[bytes, ...]:
    del target
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


def _sampling(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"max_tokens": 1, **fields})


def _gateway(**fields: Any) -> Maker:
    message = gateway_pb2.GatewayGenerateRequest(**{"prompt": "x", "sampling": _sampling(), **fields})
    return lambda chance, target: (message.SerializeToString(),)


def _gateway_good() -> bytes:
    message = gateway_pb2.GatewayGenerateRequest(prompt="x", sampling=_sampling(), stop=["a long stop string"])
    return message.SerializeToString()


def _verifier_message(chance: random.Random, **fields: Any) -> verifier_pb2.VerifierGenerateRequest:
    values: dict[str, Any] = {
        "session_id": f"bad-{chance.randbytes(8).hex()}",
        "epoch": 1,
        "prompt_token_ids": [1, 2, 3],
        "sampling": _sampling(),
    }
    return verifier_pb2.VerifierGenerateRequest(**{**values, **fields})


def _verifier(**fields: Any) -> Maker:
    return lambda chance, target: (_verifier_message(chance, **fields).SerializeToString(),)


def _sampled(make: Callable[[random.Random, common_pb2.SamplingParams], Message]) -> Maker:
    return lambda chance, _: (make(chance, _sampling(**chance.choice(_BAD_SAMPLING))).SerializeToString(),)


def _speculated(make: Callable[[random.Random, common_pb2.SpeculationParams], Message]) -> Maker:
    def one(chance: random.Random, target: Target) -> tuple[bytes, ...]:
        del target
        params = common_pb2.SpeculationParams(enabled=True, **chance.choice(_BAD_SPECULATION))
        return (make(chance, params).SerializeToString(),)

    return one


def _gateway_request(**fields: Any) -> gateway_pb2.GatewayGenerateRequest:
    return gateway_pb2.GatewayGenerateRequest(prompt="x", **fields)


def _kind(name: str, make: Maker, right: frozenset[str], method: str, weight: float = 1.0) -> Kind:
    return Kind(name=name, make=make, right=right, method=method, weight=weight)


GATEWAY_KINDS = (
    _kind("no message", _no_message, INVALID, GATEWAY),
    _kind("no message, models", _no_message, INVALID, LIST_MODELS),
    _kind("cut message", lambda chance, _: (_cut(_gateway_good(), chance),), INVALID, GATEWAY),
    _kind("changed bytes", lambda chance, _: (_changed(_gateway_good(), chance),), ANY_BUT_A_FAULT, GATEWAY),
    _kind("no prompt", lambda *_: (b"",), INVALID, GATEWAY),
    _kind("empty prompt", _gateway(prompt=""), INVALID, GATEWAY),
    _kind("unknown model", lambda chance, _: _gateway(model=junk(chance).hex() * 9)(chance, _), NOT_FOUND, GATEWAY),
    _kind("bad sampling", _sampled(lambda _, bad: _gateway_request(sampling=bad)), INVALID, GATEWAY),
    _kind("bad speculation", _speculated(lambda _, bad: _gateway_request(speculation=bad)), INVALID, GATEWAY),
    _kind(
        "bad stop",
        lambda chance, _: _gateway(stop=chance.choice((["x"] * 17, [""], ["x" * 257])))(chance, _),
        INVALID,
        GATEWAY,
    ),
    _kind(
        "token outside",
        lambda *_: (
            gateway_pb2.GatewayGenerateRequest(
                prompt_token_ids=gateway_pb2.TokenIds(ids=[1, OUTSIDE])
            ).SerializeToString(),
        ),
        INVALID,
        GATEWAY,
    ),
    _kind("unknown method", _no_message, UNIMPLEMENTED, "/paceline.rpc.v1.Gateway/Nothing"),
    _kind(
        "many small fields",
        lambda chance, _: (b"\x32\x00" * chance.randint(50_000, 99_999),),
        INVALID,
        GATEWAY,
        SELDOM,
    ),
    _kind("too large", _longer_than(GATEWAY_MESSAGE_BYTES), EXHAUSTED, GATEWAY, SELDOM),
)

VERIFIER_KINDS = (
    _kind("no message", _no_message, INVALID, VERIFIER),
    _kind(
        "cut message",
        lambda chance, _: (_cut(_verifier_message(chance, cache_salt="0123456789").SerializeToString(), chance),),
        INVALID,
        VERIFIER,
    ),
    _kind(
        "changed bytes",
        lambda chance, _: (_changed(_verifier_message(chance).SerializeToString(), chance),),
        ANY_BUT_A_FAULT,
        VERIFIER,
    ),
    _kind("no session", _verifier(session_id=""), INVALID, VERIFIER),
    _kind("long session id", _verifier(session_id="x" * 10_000), INVALID, VERIFIER),
    _kind("no prompt", _verifier(prompt_token_ids=[]), INVALID, VERIFIER),
    _kind("no sampling", _verifier(sampling=None), INVALID, VERIFIER),
    _kind("token outside", _verifier(prompt_token_ids=[1, OUTSIDE]), INVALID, VERIFIER),
    _kind("all committed", _verifier(committed_token_ids=[1, 2]), INVALID, VERIFIER),
    _kind(
        "beyond the context",
        lambda chance, target: _verifier(prompt_token_ids=[1] * (target.context_len + 1))(chance, target),
        INVALID,
        VERIFIER,
    ),
    _kind("bad sampling", _sampled(lambda chance, bad: _verifier_message(chance, sampling=bad)), INVALID, VERIFIER),
    _kind(
        "bad speculation",
        _speculated(lambda chance, bad: _verifier_message(chance, speculation=bad)),
        INVALID,
        VERIFIER,
    ),
    _kind("unknown method", _no_message, UNIMPLEMENTED, "/paceline.rpc.v1.Nobody/Nothing"),
    _kind("too large", _longer_than(MAX_MESSAGE_BYTES), EXHAUSTED, VERIFIER, SELDOM),
)


def _hello(target: Target, vocab_hash: str | None = None) -> drafter_pb2.DraftRequest:
    identity = ModelIdentity(
        name="bad",
        vocab_hash=target.vocab_hash if vocab_hash is None else vocab_hash,
        vocab_size=target.vocab_size,
        context_len=target.context_len,
    )
    return drafter_pb2.DraftRequest(target=identity_to_pb(identity))


def _open(**fields: Any) -> drafter_pb2.OpenSession:
    values: dict[str, Any] = {
        "session_id": "s",
        "epoch": 1,
        "token_ids": range(1, 9),
        "prompt_len": 8,
        "sampling": _sampling(max_tokens=64),
    }
    return drafter_pb2.OpenSession(**{**values, **fields})


def _commit(**fields: Any) -> drafter_pb2.Commit:
    return drafter_pb2.Commit(**{"session_id": "s", "epoch": 1, "base_len": 8, "token_ids": [1], **fields})


def _said(*said: Any) -> Maker:
    """After a good greeting: opens, commits and closes, or bytes, one message each."""
    parts: list[bytes] = []
    for each in said:
        match each:
            case drafter_pb2.OpenSession():
                each = drafter_pb2.DraftRequest(opens=[each])
            case drafter_pb2.Commit():
                each = drafter_pb2.DraftRequest(commits=[each])
            case drafter_pb2.CloseSession():
                each = drafter_pb2.DraftRequest(closes=[each])
        parts.append(each if isinstance(each, bytes) else each.SerializeToString())
    return lambda _, target: (_hello(target).SerializeToString(), *parts)


def _cut_open(chance: random.Random, target: Target) -> tuple[bytes, ...]:
    message = drafter_pb2.DraftRequest(opens=[_open()]).SerializeToString()
    return (_hello(target).SerializeToString(), _cut(message, chance))


def _draft(name: str, make: Maker, right: frozenset[str]) -> Kind:
    return Kind(name=name, make=make, right=right, method=DRAFTER, ends_call=right is not LEFT)


_NAN = float("nan")
DRAFTER_KINDS = (
    _draft("no message at first", _no_message, INVALID),
    _draft("no message later", _said(b"\xff" * 12), INVALID),
    _draft("cut message", _cut_open, INVALID),
    _kind("nothing at all", lambda *_: (), INVALID, DRAFTER),
    _draft("no greeting", lambda *_: (drafter_pb2.DraftRequest(opens=[_open()]).SerializeToString(),), INVALID),
    _draft("no vocabulary", lambda _, target: (_hello(target, "").SerializeToString(),), INVALID),
    _draft("other vocabulary", lambda _, target: (_hello(target, "other").SerializeToString(),), PRECONDITION),
    _draft("open without tokens", _said(_open(token_ids=[])), INVALID),
    _draft("open beyond its tokens", _said(_open(prompt_len=9)), INVALID),
    _draft("open without a name", _said(_open(session_id="")), INVALID),
    _draft("open at no price", _said(_open(price=_NAN)), INVALID),
    _draft(
        "open, bad sampling", lambda chance, _: _said(_open(sampling=_sampling(temperature=_NAN)))(chance, _), INVALID
    ),
    _draft("commit at no price", _said(_open(), _commit(price=2.0)), INVALID),
    _draft("contradiction", _said(_open(), _commit(base_len=4, token_ids=[99])), INVALID),
    _draft("commit before open", _said(_commit()), LEFT),
    _draft("close unknown", _said(drafter_pb2.CloseSession(session_id="u", epoch=3)), LEFT),
    _draft("gap", _said(_open(), _commit(base_len=2**32 - 1)), LEFT),
    _draft("other epoch", _said(_open(), _commit(epoch=2**63)), LEFT),
    _draft("opened twice", _said(_open(), _open(epoch=0), _open(epoch=5)), LEFT),
    _draft("token outside", _said(_open(token_ids=[OUTSIDE] * 8), _commit(token_ids=[OUTSIDE])), LEFT),
    _draft("after close", _said(_open(), drafter_pb2.CloseSession(session_id="s", epoch=1), _commit()), LEFT),
)

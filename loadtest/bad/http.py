"""Bad HTTP requests, as bytes on a connection."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from loadtest.bad.kinds import Kind, Target, junk, posted

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMIT_BYTES = 4 * 1024 * 1024
# A few MiB each: seldom, or nothing else would be measured.
SELDOM = 0.005
USER = {"role": "user", "content": "x"}
Json = dict[str, Any]

_WRONG_TYPES: tuple[Json, ...] = (
    {"max_tokens": "many"},
    {"temperature": [1]},
    {"stream": "yes"},
    {"stop": {"a": 1}},
    {"logit_bias": [1, 2]},
    {"prompt": {"text": "x"}},
    {"prompt": ["x", 5]},
    {"n": True},
    {"speculation": "on"},
    {"seed": 1.5},
    {"stop_token_ids": ["a"]},
)
_BEYOND: tuple[Json, ...] = (
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 10**9},
    {"temperature": -0.1},
    {"temperature": 1e300},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"top_k": 2**40},
    {"min_p": 2},
    {"presence_penalty": 3},
    {"frequency_penalty": -3},
    {"repetition_penalty": 0},
    {"n": 0},
    {"n": 1000},
    {"seed": 2**64},
    {"logprobs": 21},
    {"stop": ["x"] * 17},
    {"stop": "x" * 257},
    {"stop": ""},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"five": 1}},
    {"min_tokens": 10**6},
    {"speculation": {"max_draft_tokens": 65}},
    {"speculation": {"acceptance": "lossy" * 1000}},
    {"speculation": {"method": "magic"}},
)
_NOT_SERVED: tuple[Json, ...] = (
    {"echo": True},
    {"best_of": 2},
    {"suffix": "end"},
    {"tools": [{}]},
    {"use_beam_search": True},
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "multipleOf": 999983}}}},
    {"response_format": {"type": "json_object"}, "guided_regex": "a"},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "(" * 1000}},
    {"guided_grammar": "start: " + "a " * 50_000},
    {"guided_json": {"$ref": "http://127.0.0.1/schema.json"}},
    {"stream_options": {"include_usage": True}},
)
_BAD_CHATS: tuple[Any, ...] = (
    [],
    "x",
    [{"role": "nobody", "content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [USER, None],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
)


def _request(method: str, path: str, body: bytes = b"") -> tuple[bytes, ...]:
    return posted(path, body, method)


def _completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 1, **fields}).encode()


def _sent(make: Callable[[random.Random], bytes]) -> Callable[[random.Random, Target], tuple[bytes, ...]]:
    return lambda chance, _: _request("POST", chance.choice((COMPLETIONS, CHAT)), make(chance))


def _one_of(fields: tuple[Json, ...]) -> Callable[[random.Random, Target], tuple[bytes, ...]]:
    return lambda chance, _: _request("POST", COMPLETIONS, _completion(**chance.choice(fields)))


def _unknown(chance: random.Random) -> Json:
    name = junk(chance).decode("latin-1")
    return {name: 1, "speculation": {name: 1}}


def _cut(chance: random.Random) -> bytes:
    whole = _completion(stop=["a", "b"], user="x" * chance.randint(0, 50))
    return whole[: chance.randint(0, len(whole) - 1)]


def _huge_number(chance: random.Random) -> bytes:
    name = chance.choice(("max_tokens", "temperature", "logprobs", "seed", "n", "top_k", "min_tokens"))
    sign = chance.choice(("", "-"))
    return f'{{"prompt": "x", "{name}": {sign}{"9" * chance.randint(330, 5000)}}}'.encode()


def _nested(chance: random.Random) -> bytes:
    depth = chance.choice((100, 900, 990, 1000, 5000, 50_000))
    field = chance.choice(("prompt", "stop", "n", "colour"))
    return f'{{"{field}": {"[" * depth}{chance.choice(("", "1", "NaN"))}{"]" * depth}}}'.encode()


def _tokens(chance: random.Random, target: Target) -> tuple[bytes, ...]:
    outside = chance.choice((-1, target.vocab_size, 2**31, 2**32, 2**70))
    return _request("POST", COMPLETIONS, _completion(prompt=[1] * chance.randint(0, 5) + [outside]))


def _too_long(chance: random.Random, target: Target) -> tuple[bytes, ...]:
    return _request("POST", COMPLETIONS, _completion(prompt=[1] * (target.context_len + chance.randint(0, 9))))


def _unknown_path(chance: random.Random, target: Target) -> tuple[bytes, ...]:
    del target
    name = chance.randbytes(8).hex()
    method, path = chance.choice((("GET", f"/v1/models/{name}"), ("GET", f"/{name}"), ("POST", f"/v2%2f{name}")))
    return _request(method, path)


def _wrong_method(chance: random.Random, target: Target) -> tuple[bytes, ...]:
    del target
    method, path = chance.choice(
        (("GET", COMPLETIONS), ("PUT", CHAT), ("DELETE", "/v1/models"), ("POST", "/health"), ("PATCH", "/openapi.json"))
    )
    return _request(method, path)


def _no_http(chance: random.Random, target: Target) -> tuple[bytes, ...]:
    del target
    # The first line decides; an empty line would only be skipped.
    return (b"\x16\x03" + junk(chance).replace(b"\n", b"") + b"\r\n\r\n",)


def _refused(name: str, make: Callable[[random.Random, Target], tuple[bytes, ...]], status: int = 400) -> Kind:
    return Kind(name=name, make=make, right=frozenset({str(status)}))


KINDS = (
    _refused("random bytes", _sent(lambda chance: b"\0" + junk(chance))),
    _refused("cut JSON", _sent(_cut)),
    _refused("broken UTF-8", _sent(lambda chance: b'{"prompt": "' + junk(chance, 8).hex().encode() + b'\xff"}')),
    _refused("no object", _sent(lambda chance: json.dumps(chance.choice(([], "x", 5, None, True))).encode())),
    _refused("NaN", _sent(lambda _: b'{"prompt": "x", "temperature": NaN}')),
    _refused("half a surrogate pair", _sent(lambda _: b'{"prompt": "\\ud800", "messages": []}')),
    _refused("wrong type", _one_of(_WRONG_TYPES)),
    _refused("beyond a limit", _one_of(_BEYOND)),
    _refused("not served", _one_of(_NOT_SERVED)),
    Kind(
        # It is ignored, and named in a header.
        name="unknown field",
        make=lambda chance, _: _request("POST", COMPLETIONS, _completion(**_unknown(chance))),
        right=frozenset({"200"}),
    ),
    _refused("huge number", _sent(_huge_number)),
    _refused("nested deeply", _sent(_nested)),
    _refused("no prompt", _sent(lambda _: b'{"max_tokens": 1}')),
    _refused("token outside", _tokens),
    _refused("beyond the context", _too_long),
    _refused(
        "bad chat",
        lambda chance, _: _request("POST", CHAT, json.dumps({"messages": chance.choice(_BAD_CHATS)}).encode()),
    ),
    _refused("no HTTP", _no_http),
    _refused(
        "unknown model", lambda chance, _: _request("POST", COMPLETIONS, _completion(model=junk(chance).hex())), 404
    ),
    _refused("unknown path", _unknown_path, 404),
    _refused("wrong method", _wrong_method, 405),
    Kind(
        name="too large",
        make=lambda chance, _: _request("POST", COMPLETIONS, b" " * (LIMIT_BYTES + chance.randint(1, 9))),
        right=frozenset({"413"}),
        weight=SELDOM,
    ),
)

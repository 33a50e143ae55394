"""Bad HTTP requests, as bytes on a connection."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadtest.bad.kinds import Kind, Parts, Target, junk, posted

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMIT_BYTES = 4 * 1024 * 1024
# A few MiB each: rare, or nothing else would be measured.
RARELY = 0.005
USER = {"role": "user", "content": "x"}
Json = dict[str, Any]


def _each(values: Mapping[str, Sequence[Any]]) -> list[Json]:
    """Bodies with one of these values each."""
    return [{name: value} for name, those in values.items() for value in those]


_WRONG_TYPES = _each(
    {
        "max_tokens": ["many"],
        "temperature": [[1]],
        "stream": ["yes"],
        "stop": [{"a": 1}],
        "logit_bias": [[1, 2]],
        "prompt": [{"text": "x"}, ["x", 5]],
        "n": [True],
        "speculation": ["on"],
        "seed": [1.5],
        "stop_token_ids": [["a"]],
    }
)
_BEYOND = _each(
    {
        "max_tokens": [0, -1, 10**9],
        "temperature": [-0.1, 1e300],
        "top_p": [0, 1.1],
        "top_k": [-2, 2**40],
        "min_p": [2],
        "presence_penalty": [3],
        "frequency_penalty": [-3],
        "repetition_penalty": [0],
        "n": [0, 1000],
        "seed": [2**64],
        "logprobs": [21],
        "stop": [["x"] * 17, "x" * 257, ""],
        "logit_bias": [{"5": 101}, {"five": 1}],
        "min_tokens": [10**6],
        "speculation": [{"max_draft_tokens": 65}, {"acceptance": "lossy" * 1000}, {"method": "magic"}],
    }
)
_TOO_MANY = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "multipleOf": 999983}}}
_NOT_SERVED = [
    {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    *_each(
        {
            "best_of": [2],
            "suffix": ["end"],
            "tools": [[{}]],
            "use_beam_search": [True],
            "response_format": [{"type": "yaml"}, _TOO_MANY],
            "structured_outputs": [
                {"choice": []},
                {"regex": "(" * 1000},
                {"grammar": "start: " + "a " * 50_000},
                {"json": {"$ref": "http://127.0.0.1/schema.json"}},
            ],
            "guided_json": [{}],
            "stream_options": [{"include_usage": True}],
        }
    ),
]
_BAD_CHATS: Sequence[Any] = (
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


def _completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 1, **fields}).encode()


def _unknown(chance: random.Random) -> bytes:
    return _completion(**{junk(chance).decode("latin-1"): 1})


def _unknown_in_speculation(chance: random.Random) -> bytes:
    return _completion(speculation={junk(chance).decode("latin-1"): 1})


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


def _token_outside(chance: random.Random, target: Target) -> bytes:
    outside = chance.choice((-1, target.vocab_size, 2**31, 2**32, 2**70))
    return _completion(prompt=[1] * chance.randint(0, 5) + [outside])


def _too_long(chance: random.Random, target: Target) -> bytes:
    return _completion(prompt=[1] * (target.context_len + chance.randint(0, 9)))


def _unknown_path(chance: random.Random, _: Target) -> Parts:
    name = chance.randbytes(8).hex()
    method, path = chance.choice((("GET", f"/v1/models/{name}"), ("GET", f"/{name}"), ("POST", f"/v2%2f{name}")))
    return posted(path, b"", method)


def _wrong_method(chance: random.Random, _: Target) -> Parts:
    wrong = (
        ("GET", COMPLETIONS),
        ("PUT", CHAT),
        ("DELETE", "/v1/models"),
        ("POST", "/health"),
        ("PATCH", "/openapi.json"),
    )
    method, path = chance.choice(wrong)
    return posted(path, b"", method)


def _no_http(chance: random.Random, _: Target) -> Parts:
    # The first line decides; an empty line would only be skipped.
    return (b"\x16\x03" + junk(chance).replace(b"\n", b"") + b"\r\n\r\n",)


def _sent(name: str, make: Callable[[random.Random], bytes]) -> Kind:
    """A body that either endpoint refuses."""
    return Kind(
        name=name,
        make=lambda chance, _: posted(chance.choice((COMPLETIONS, CHAT)), make(chance)),
        right=frozenset({"400"}),
    )


def _to(
    path: str, name: str, make: Callable[[random.Random, Target], bytes], status: int = 400, weight: float = 1.0
) -> Kind:
    return Kind(
        name=name,
        make=lambda chance, target: posted(path, make(chance, target)),
        right=frozenset({str(status)}),
        weight=weight,
    )


def _one_of(name: str, bodies: Sequence[Json]) -> Kind:
    return _to(COMPLETIONS, name, lambda chance, _: _completion(**chance.choice(bodies)))


KINDS = (
    _sent("random bytes", lambda chance: b"\0" + junk(chance)),
    _sent("cut JSON", _cut),
    _sent("broken UTF-8", lambda chance: b'{"prompt": "' + junk(chance, 8).hex().encode() + b'\xff"}'),
    _sent("no object", lambda chance: json.dumps(chance.choice(([], "x", 5, None, True))).encode()),
    _sent("NaN", lambda _: b'{"prompt": "x", "temperature": NaN}'),
    _sent("half a surrogate pair", lambda _: b'{"prompt": "\\ud800", "messages": []}'),
    _sent("huge number", _huge_number),
    _sent("nested deeply", _nested),
    _sent("no prompt", lambda _: b'{"max_tokens": 1}'),
    _one_of("wrong type", _WRONG_TYPES),
    _one_of("beyond a limit", _BEYOND),
    _one_of("not served", _NOT_SERVED),
    # It is ignored, and named in a header.
    _to(COMPLETIONS, "unknown field", lambda chance, _: _unknown(chance), 200),
    _to(COMPLETIONS, "unknown field of speculation", lambda chance, _: _unknown_in_speculation(chance)),
    _to(COMPLETIONS, "token outside", _token_outside),
    _to(COMPLETIONS, "beyond the context", _too_long),
    _to(COMPLETIONS, "unknown model", lambda chance, _: _completion(model=junk(chance).hex()), 404),
    _to(COMPLETIONS, "too large", lambda chance, _: b" " * (LIMIT_BYTES + chance.randint(1, 9)), 413, RARELY),
    _to(CHAT, "bad chat", lambda chance, _: json.dumps({"messages": chance.choice(_BAD_CHATS)}).encode()),
    Kind(name="no HTTP", make=_no_http, right=frozenset({"400"})),
    Kind(name="unknown path", make=_unknown_path, right=frozenset({"404"})),
    Kind(name="wrong method", make=_wrong_method, right=frozenset({"405"})),
)

"""A verifier that dies within a text that is bound: the next one goes on with it, and no token is another."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema_rs
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.integration.test_enforced_calls import MOVE, NAMED, TOOLS, USER
from tests.support.demo_gateway import mortal_gateway

PEOPLE: Any = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 4, "maxItems": 6},
        "kind": {"enum": ["function", "method"]},
        "line": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["names", "kind", "line"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE, "strict": True}}


def said(chunk: Any) -> str:
    """What a chunk adds: text, or arguments of a call."""
    delta = chunk.choices[0].delta
    return (delta.content or "") + "".join(call.function.arguments or "" for call in delta.tool_calls or ())


@pytest.fixture
async def mortal() -> AsyncIterator[Any]:
    async with (
        mortal_gateway(failover_s=20.0) as (url, kill),
        AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(verify=False, trust_env=False),
        ) as client,
    ):
        yield client, kill


@pytest.mark.parametrize(
    ("fields", "schema"),
    [({"response_format": FORM}, PEOPLE), ({"tools": TOOLS, "tool_choice": NAMED}, MOVE)],
    ids=["a schema", "a call"],
)
@pytest.mark.parametrize("speculates", [True, False])
async def test_a_bound_text_outlives_its_verifier(mortal: Any, fields: Any, schema: Any, speculates: bool) -> None:
    client, kill = mortal
    asked: Any = {
        "model": "tiny",
        "messages": [USER],
        "max_tokens": 100,
        "seed": 5,
        "stream": True,
        **fields,
        "extra_body": {"speculation": {"enabled": speculates}},
    }
    undisturbed = "".join([said(chunk) async for chunk in await client.chat.completions.create(**asked)])
    pieces: list[str] = []
    async for chunk in await client.chat.completions.create(**asked):
        pieces.append(said(chunk))
        if "".join(pieces) and kill is not None:
            await kill()
            kill = None
    assert "".join(pieces) == undisturbed
    jsonschema_rs.Draft202012Validator(schema).validate(json.loads(undisturbed))

"""The gateway is what its OpenAPI description says: arbitrary requests, valid and not, to every operation."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from paceline.gateway.api.openapi import PATH, openapi_document
from tests.support.scripted_fleet import MODEL, SHARES_A_GATEWAY, ScriptedFleet

pytestmark = SHARES_A_GATEWAY

load_all_checks()
# Refusals of valid bodies are judged below: limits of the model and between fields are told in words only.
# Values that are not of the schema are taken where a text spells them: "3" for 3.
NOT_ASKED = {"positive_data_acceptance", "negative_data_rejection"}
OUTSIDE_SCHEMAS = (
    # A choice that requires a tool that is no function.
    "needs a function, and",
    "prompt_logprobs: is not available with stream",
    # What no schema of a body says: whether another schema, a pattern or a grammar in it can be compiled.
    '"param": "response_format',
    '"param": "structured_outputs',
    "the context",
    "max_tokens: must be at least 1, got 0",
    "must be from 0 to max_tokens",
    "is outside the vocabulary",
    "leave no token to choose",
    "exceed the limit of 128 choices",
    "is only allowed with",
    "the chat template refuses",
    "half of a surrogate pair",
    "tool_choice: needs tools",
    "is none of the tools",
    "tools: ",
    "is not allowed here",
    "must not be true with continue_final_message",
    "as continue_final_message is set",
    '"param": "text.format',
    "output_config.format",
    "must hold at least one message",
    # A call is of a function or of a custom tool, and an item of one of many kinds.
    "].function: is required",
    # The member that holds a text follows from the type of its part.
    "].text: is required",
    "].refusal: is required",
    "].thinking: is required",
    "]: is required",
)
OPERATIONS = {
    f"{method.upper()} {path}": operation
    for path, methods in openapi_document()["paths"].items()
    for method, operation in methods.items()
}
# There is no way to ask wrongly where nothing is asked.
WITH_BODY = [label for label, operation in OPERATIONS.items() if "requestBody" in operation]
STREAMED = [label for label in WITH_BODY if "text/event-stream" in OPERATIONS[label]["responses"]["200"]["content"]]
CASES = [
    *((label, GenerationMode.POSITIVE, False) for label in OPERATIONS),
    *((label, GenerationMode.POSITIVE, True) for label in STREAMED),
    *((label, GenerationMode.NEGATIVE, False) for label in WITH_BODY),
]
MAX_EXAMPLES = 25


def schema_for(vocab_size: int) -> Any:
    """The description, its token ids narrowed to those of the model, so that many valid requests are served."""
    document = json.dumps(openapi_document()).replace(str(2**32 - 1), str(vocab_size - 1))
    return schemathesis.openapi.from_dict(json.loads(document))


def narrowed(case: Any, streamed: bool) -> None:
    """Asks for the model that is there, for few tokens of it, of messages that say something, as a stream or not."""
    if isinstance(case.body, dict):
        for message in case.body.get("messages", ()):
            if message.get("role") == "tool":
                # The model's template has no place for results of tools.
                message["role"] = "user"
            if message.get("content") is None:
                message["content"] = "x"
            for part in message["content"] if isinstance(message["content"], list) else ():
                if isinstance(part, dict) and "type" in part:
                    # The member that holds a text follows from the type of its part.
                    part[part["type"] if part["type"] in ("refusal", "thinking") else "text"] = "x"
        if streamed:
            case.body["stream"] = True
        for name in ("model", "previous_response_id"):
            case.body.pop(name, None)
        for name in ("max_tokens", "max_output_tokens", "truncate_prompt_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 20)


@pytest.mark.full
@pytest.mark.parametrize(("label", "mode", "streamed"), CASES)
async def test_answers_are_those_of_the_description(
    fleet: ScriptedFleet, label: str, mode: GenerationMode, streamed: bool
) -> None:
    schema = schema_for(fleet.codec.vocab_size)
    method, path = label.split()
    operation = schema[path][method]
    url = f"http://{fleet.addresses.http}"
    checks = [CHECKS.get_one(name) for name in CHECKS.get_all_names() if name not in NOT_ASKED]
    statuses: set[int] = set()

    @settings(max_examples=MAX_EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def law(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            narrowed(case, streamed)
        response = case.call(base_url=url)
        statuses.add(response.status_code)
        case.validate_response(response, checks=checks)
        if mode is GenerationMode.POSITIVE and response.status_code == 400:
            assert any(reason in response.text for reason in OUTSIDE_SCHEMAS), response.text

    await asyncio.to_thread(law)
    if mode is GenerationMode.NEGATIVE:
        assert 400 in statuses
    else:
        assert 200 in statuses or "{" in path
    answer = await fleet.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "seed": 0})
    assert answer.status_code == 200


async def test_the_description_is_served(fleet: ScriptedFleet) -> None:
    assert (await fleet.http.get(PATH)).json() == openapi_document()


@pytest.mark.parametrize("label", WITH_BODY)
async def test_a_request_to_begin_with_is_served_as_it_stands(fleet: ScriptedFleet, label: str) -> None:
    method, path = label.split()
    example = OPERATIONS[label]["requestBody"]["content"]["application/json"]["example"]
    answer = await fleet.http.request(method, path, json=example)
    assert answer.status_code == 200, answer.text

"""What the OpenAPI description says of bodies, against the checks that bodies really meet."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema_rs
import pytest

from paceline.core.errors import InvalidRequestError
from paceline.gateway.api.openai.bodies import NO_EFFECT, NOT_SERVED, ChatBody, CompletionBody, parse_body
from paceline.gateway.api.openapi import openapi_document
from paceline.gateway.http.fields import UnknownFields

DOCUMENT = openapi_document()


@cache
def validator(model: str) -> jsonschema_rs.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{model}", "components": DOCUMENT["components"]}
    return jsonschema_rs.Draft202012Validator(schema)


def allowed(model: str, body: dict[str, Any]) -> bool:
    """What the description says of a body."""
    return validator(model).is_valid(body)


def accepted(model: type[CompletionBody] | type[ChatBody], body: dict[str, Any]) -> bool:
    """What the parser says of it."""
    try:
        parse_body(model, body, UnknownFields(strict=False))
    except InvalidRequestError:
        return False
    return True


def test_every_reference_leads_to_a_schema() -> None:
    names = set(DOCUMENT["components"]["schemas"])
    text = str(DOCUMENT)
    assert {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]} <= names


@pytest.mark.parametrize(("model", "needed"), [(CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": []})])
def test_every_field_of_a_body_is_described_and_may_be_null(
    model: type[CompletionBody] | type[ChatBody], needed: dict[str, Any]
) -> None:
    described = DOCUMENT["components"]["schemas"][model.__name__]["properties"]
    assert set(described) == set(model.model_fields) | NO_EFFECT | set(model.not_served)
    nulls = dict.fromkeys(set(described) - set(needed))
    body = {**needed, **nulls}
    assert accepted(model, body)
    assert allowed(
        model.__name__, {**body, "messages": [{"role": "user", "content": "x"}]} if model is ChatBody else body
    )


def test_neutral_values_are_the_described_ones() -> None:
    values = [0, 1, 1.0, True, False, "none", "medium", [], ["text"], {"type": "text"}, {}, ""]
    for body in ({"prompt": "x", name: value} for name in NOT_SERVED for value in values):
        assert allowed("CompletionBody", body) == accepted(CompletionBody, body), body


def test_a_field_that_nobody_knows_is_allowed_by_both() -> None:
    body = {"prompt": "x", "colour": 1}
    assert allowed("CompletionBody", body)
    assert accepted(CompletionBody, body)
    ours = {"prompt": "x", "speculation": {"colour": 1}}
    assert not allowed("CompletionBody", ours)
    assert not accepted(CompletionBody, ours)


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": "x", "n": "one"}])
def test_what_the_parser_refuses_the_description_refuses(body: dict[str, Any]) -> None:
    assert not allowed("CompletionBody", body)
    assert not accepted(CompletionBody, body)

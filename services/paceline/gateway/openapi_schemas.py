"""The JSON schemas of the OpenAPI description: request bodies from the models that check them, answers by hand.

Limits that depend on the served model or on other fields cannot stand in a schema; all others do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from paceline.core.messages import TokenFate
from paceline.core.params import (
    ACCEPTANCE_RULES,
    MAX_DRAFT_TOKENS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_METHOD_CHARS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    METHODS,
)
from paceline.gateway.api import IGNORED_FIELDS, NEUTRAL_VALUES, ChatBody, ChatMessage, CompletionBody
from paceline.gateway.choices import TEMPLATE_NAMES
from paceline.gateway.requests import MAX_CHOICES, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{model}"
_NULL: Json = {"type": "null"}
TEXT: Json = {"type": "string"}
_NUMBER: Json = {"type": "number"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_TOKEN_ID: Json = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
SOME_TEXT: Json = {"type": "string", "minLength": 1}
_TOKEN_IDS: Json = {"type": "array", "minItems": 1, "items": _TOKEN_ID}
_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_A_METHOD = f"({'|'.join(METHODS)})"
# What the models leave to the checks of `core` and of the sessions, by the field's name.
_LIMITS: Mapping[str, Json] = {
    "n": {"maximum": MAX_CHOICES},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**32 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "logit_bias": {
        "maxProperties": MAX_LOGIT_BIAS_ENTRIES,
        "propertyNames": {"pattern": "^[0-9]{1,20}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "min_tokens": {"minimum": 0},
    "stop": {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP}]},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS, "items": _TOKEN_ID},
    "seed": {"minimum": -(2**63), "maximum": MAX_SEED},
    "top_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "messages": {"minItems": 1, "items": {"$ref": _REFERENCE.format(model="ChatMessage")}},
    "chat_template_kwargs": {"propertyNames": {"not": {"enum": sorted(TEMPLATE_NAMES)}}},
    "max_draft_tokens": {"minimum": 0, "maximum": MAX_DRAFT_TOKENS},
    "acceptance": {"enum": ["", *ACCEPTANCE_RULES]},
    "method": {"maxLength": MAX_METHOD_CHARS, "pattern": rf"^({_A_METHOD}(\+{_A_METHOD})*)?$"},
    "prompt": {
        "anyOf": [
            SOME_TEXT,
            _TOKEN_IDS,
            *(
                {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": each}
                for each in (SOME_TEXT, _TOKEN_IDS)
            ),
        ]
    },
    "content": {
        "anyOf": [
            TEXT,
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["type", "text"],
                    "properties": {"type": {"enum": ["text"]}, "text": TEXT},
                },
            },
        ]
    },
}
_COMPLETION_LIMITS: Mapping[str, Json] = {**_LIMITS, "logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}}


def reference(name: str) -> Json:
    """Returns the reference to a schema."""
    return {"$ref": _REFERENCE.format(model=name)}


def event(chunk: str) -> Json:
    """Returns the schema of one server-sent event, as OpenAPI 3.1 describes streams: a chunk, an error, or the end."""
    payload = {"anyOf": [reference(chunk), reference("Error")]}
    chunk_data = {**TEXT, "contentMediaType": "application/json", "contentSchema": payload}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, chunk_data]}},
    }


def schemas() -> Json:
    """Returns all schemas by name."""
    named: Json = {}
    for model, limits in ((CompletionBody, _COMPLETION_LIMITS), (ChatBody, _LIMITS)):
        named |= _body_schemas(model, limits)
    return named | _answer_schemas()


def _body_schemas(model: type[BaseModel], limits: Mapping[str, Json]) -> Json:
    """Returns the schemas of a request body and of the objects in it, by name."""
    body = model.model_json_schema(ref_template=_REFERENCE)
    parts: Json = body.pop("$defs", {})
    if model is ChatBody:
        # Read one by one, so pydantic does not know that they belong to it.
        parts["ChatMessage"] = ChatMessage.model_json_schema()
    for schema in (body, *parts.values()):
        for name, field in schema["properties"].items():
            schema["properties"][name] = _limited(field, limits.get(name, {}))
    required = body.get("required", [])
    fields = body["properties"]
    for name, field in fields.items():
        if name not in required:
            fields[name] = field if _NULL in field.get("anyOf", ()) else _or_null(field)
    fields |= {name: {"description": "Changes nothing."} for name in sorted(IGNORED_FIELDS)}
    fields |= {
        name: {"enum": [*_distinct(values), None], "description": "Only with values that ask for nothing."}
        for name, values in NEUTRAL_VALUES.items()
    }
    return {**parts, model.__name__: body}


def _distinct(values: Sequence[object]) -> list[object]:
    """Returns each value once; to JSON, 1 and 1.0 are one."""
    return [value for index, value in enumerate(values) if value not in values[:index]]


def _limited(field: Json, limits: Json) -> Json:
    """Returns a field's schema with more limits, which bind what is not null."""
    if not limits or "anyOf" not in field:
        return {**field, **limits}
    return {**field, "anyOf": [each if each == _NULL else {**each, **limits} for each in field["anyOf"]]}


def _object(**fields: Json) -> Json:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, _NULL]}


def _answer_schemas() -> Json:
    token = {"token": TEXT, "logprob": _NUMBER, "bytes": _list(_COUNT)}
    choice = {"index": _COUNT, "finish_reason": {"enum": ["stop", "length"]}}
    answer = {"id": TEXT, "created": _COUNT, "model": TEXT}
    counts = {"usage": reference("Usage"), "metrics": reference("Metrics")}
    text_logprobs = _object(
        tokens=_list(TEXT),
        token_logprobs=_list(_NUMBER),
        top_logprobs=_list({"type": "object", "additionalProperties": _NUMBER}),
        text_offset=_list(_COUNT),
    )
    chat_logprobs = _object(content=_list(_object(**token, top_logprobs=_list(_object(**token)))))
    text_choice = _object(**choice, text=TEXT, logprobs=_or_null(text_logprobs))
    message = _object(role={"enum": ["assistant"]}, content=TEXT)
    chat_choice = _object(**choice, message=message, logprobs=_or_null(chat_logprobs))
    chunk_choice = {**choice, "finish_reason": _or_null(choice["finish_reason"])}
    text_chunk = _object(**chunk_choice, text=TEXT, logprobs=_or_null(text_logprobs))
    delta = {**_object(role={"enum": ["assistant"]}, content=TEXT), "required": []}
    chat_chunk = _object(**chunk_choice, delta=delta, logprobs=_or_null(chat_logprobs))
    for each in (text_choice, chat_choice, text_chunk, chat_chunk):
        each["properties"] |= {"token_fates": _token_fates()}
    return {
        "CompletionChunk": _chunk(**answer, object={"enum": ["text_completion"]}, choices=_list(text_chunk)),
        "ChatCompletionChunk": _chunk(**answer, object={"enum": ["chat.completion.chunk"]}, choices=_list(chat_chunk)),
        "Completion": _object(**answer, object={"enum": ["text_completion"]}, choices=_list(text_choice), **counts),
        "ChatCompletion": _object(**answer, object={"enum": ["chat.completion"]}, choices=_list(chat_choice), **counts),
        "Usage": _object(
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            total_tokens=_COUNT,
            prompt_tokens_details=_object(cached_tokens=_COUNT),
        ),
        "Metrics": _object(speculative_decoding=_or_null(_speculation_record())),
        "Model": _object(
            id=TEXT,
            object={"enum": ["model"]},
            created=_COUNT,
            owned_by=TEXT,
            max_model_len=_or_null({"type": "integer", "minimum": 1}),
        ),
        "ModelList": _object(object={"enum": ["list"]}, data=_list(reference("Model"))),
        "Health": _object(
            status={"enum": ["ok", "degraded", "draining", "no verifier"]},
            store=TEXT,
            tasks=TEXT,
            models={"anyOf": [TEXT, {"type": "object", "additionalProperties": TEXT}]},
            verifiers=_COUNT,
            drafters=_COUNT,
            sessions=_COUNT,
        ),
        "Life": _object(status={"enum": ["alive"]}),
        "Error": _object(error=_object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))),
    }


def _chunk(**fields: Json) -> Json:
    """Returns the schema of a chunk; usage comes as asked for, metrics at the end of a choice and of the stream."""
    chunk = _object(**fields)
    chunk["properties"] |= {"usage": _or_null(reference("Usage")), "metrics": reference("Metrics")}
    return chunk


def _token_fates() -> Json:
    """Returns the schema of what a choice says where `speculation.token_fates` asks for it."""
    fates = _list(_object(text=TEXT, fate={"enum": [*(fate.value for fate in TokenFate), None]}))
    fates["description"] = "Tokens behind the text, whose texts join to it; fate is null where it is not known."
    return fates


def _speculation_record() -> Json:
    counted = ("spec_steps", "accepted_draft_tokens", "draft_tokens", "steps", "hits", "misses")
    return _object(
        mean_acceptance_length=_NUMBER,
        draft_acceptance_rate=_NUMBER,
        acceptance_histogram=_list(_COUNT),
        mean_batch_size=_NUMBER,
        lossy={"type": "boolean"},
        **{f"num_{each}": _COUNT for each in counted},
    )

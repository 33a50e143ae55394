"""What a gateway takes and answers over HTTP, as docs/http-api.md: from the models that requests are read with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.gateway.api.anthropic.bodies import MessagesBody
from paceline.gateway.api.openai.bodies import ChatBody, ChatMessage, CompletionBody
from paceline.gateway.api.openapi import openapi_document
from paceline.gateway.api.responses.bodies import ResponsesBody
from paceline.gateway.http.fields import TextPart
from tests.support.references.tables import WRITTEN_BY

HEAD = f"""# The HTTP API

Paths, fields, answers and errors of a gateway. {WRITTEN_BY}
A gateway shows the same at `/docs`, with forms that send requests, and at `/openapi.json` for programs.

"""
# Bodies and the objects in them, in the order of the page.
BODIES = {
    "POST /v1/completions": "CompletionBody",
    "POST /v1/chat/completions": "ChatBody",
    "POST /v1/responses": "ResponsesBody",
    "POST /v1/messages": "MessagesBody",
    "POST /v1/messages/count_tokens": "CountBody",
    "POST /tokenize, of a text": "TokenizeTextBody",
    "POST /tokenize, of a chat": "TokenizeChatBody",
    "POST /detokenize": "DetokenizeBody",
    "Messages of a chat": "ChatMessage",
    "Parts of a message": "TextPart",
    "`stream_options`": "StreamOptions",
    "`speculation`": "SpeculationBody",
}
# Of vLLM 0.32; those of its development mode, and of training, are left out.
VLLM_PATHS = {
    "/v1/embeddings, /pooling, /classify, /score, /rerank": "models that generate nothing",
    "/v1/audio/transcriptions, /v1/audio/translations, /v1/realtime": "audio models",
    "/v1/chat/completions/batch, /v1/completions/render": "batches of chats; prompts without an answer",
    "/v1/load_lora_adapter, /v1/unload_lora_adapter": "adapters",
    "/tokenizer_info": "the tokenizer's settings",
    "/inference/v1/generate": "tokens in, tokens out: here over gRPC",
    "/invocations": "SageMaker's name for the other paths",
    "/sleep, /wake_up, /pause, /resume": "pausing a server",
}
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "minLength": "{} character or more",
    "maxLength": "at most {} characters",
    "minItems": "{} or more",
    "maxItems": "at most {}",
    "maxProperties": "at most {}",
    "pattern": "`{}`",
}


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_sections(openapi_document()))


def _sections(document: Mapping[str, Any]) -> Iterator[str]:
    yield document["info"]["description"]
    schemas = document["components"]["schemas"]
    for title, name in BODIES.items():
        schema = schemas.get(name) or {"ChatMessage": ChatMessage, "TextPart": TextPart}[name].model_json_schema()
        yield f"\n## {title}\n\n| field | takes | limits | default |\n| --- | --- | --- | --- |\n"
        required = schema.get("required", ())
        fields = schema["properties"].items()
        yield from (_row(field, each, field in required) for field, each in fields if not _is_remark(each))
        yield _without_effect(schema)
    yield from _answers(document["paths"])
    yield from _lacking(document["paths"])


def _is_remark(field: Mapping[str, Any]) -> bool:
    """Whether a field is described by a sentence alone: it has no effect, or is not served."""
    return "description" in field and "anyOf" not in field


def _row(name: str, field: Mapping[str, Any], required: bool) -> str:
    kinds = [each for each in field.get("anyOf", [field]) if each.get("type") != "null"]
    takes = " or ".join(dict.fromkeys(map(_kind, kinds)))
    limits = dict.fromkeys(limit for each in (field, *kinds) for limit in _limits(each))
    default = next((each["default"] for each in (field, *kinds) if each.get("default") is not None), None)
    shown = (
        "required" if required else "" if default is None or isinstance(default, dict) else f"`{json.dumps(default)}`"
    )
    return f"| `{name}` | {takes} | {', '.join(limits)} | {shown} |\n".replace("  |", " |")


def _kind(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_kind, schema["anyOf"])))
    if "$ref" in schema:
        return f"object `{schema['$ref'].rpartition('/')[2]}`"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return {"integer": "whole number", "boolean": "true or false"}.get(
        schema.get("type", "any"), schema.get("type", "any")
    )


def _limits(schema: Mapping[str, Any]) -> Iterator[str]:
    for key, form in _LIMITS.items():
        if key in schema:
            yield form.format(schema[key]).replace("|", "\\|")
    if "examples" in schema:
        yield "such as " + ", ".join(f"`{each}`" for each in schema["examples"])


def _without_effect(schema: Mapping[str, Any]) -> str:
    names = [name for name, each in schema["properties"].items() if each.get("description") == "Changes nothing."]
    return f"\nTaken and without effect: {', '.join(f'`{name}`' for name in names)}.\n" if names else ""


def _answers(paths: Mapping[str, Any]) -> Iterator[str]:
    yield "\n## Paths and answers\n\n| path | what it does |\n| --- | --- |\n"
    for path, operations in paths.items():
        for method, operation in operations.items():
            yield f"| {method.upper()} `{path}` | {operation['summary']} |\n"
    yield "\n| status | why |\n| --- | --- |\n"
    failures = paths["/v1/completions"]["post"]["responses"].items()
    yield from (f"| {status} | {each['description']} |\n" for status, each in failures if status != "200")


def _lacking(paths: Mapping[str, Any]) -> Iterator[str]:
    yield "\n## What vLLM has and we do not\n\nFields that are refused by name. null, an empty text and an empty list "
    yield "ask for nothing, and so do the values named here.\n"
    yield "\n| field | of | values taken |\n| --- | --- | --- |\n"
    bodies = {"both": CompletionBody.not_served, "chats": ChatBody.not_served}
    doors = {"`/v1/responses`": ResponsesBody.not_served, "`/v1/messages`": MessagesBody.not_served}
    objects = {"messages": ChatMessage.not_served, "parts of messages": TextPart.not_served}
    told: set[str] = set()
    for where, not_served in {**bodies, **objects, **doors}.items():
        for name, values in not_served.items():
            if where in bodies and name in told:
                continue
            told.add(name)
            yield f"| `{name}` | {where} | {', '.join(f'`{json.dumps(each)}`' for each in values)} |\n".replace(
                "|  |", "| |"
            )
    yield "\n| path | what it is |\n| --- | --- |\n"
    yield from (f"| {path} | {said} |\n" for path, said in VLLM_PATHS.items() if path not in paths)

"""The OpenAPI description of the HTTP API: every path, and every status that can come back from it.

It knows no sessions and no transport; `paceline.gateway.openapi_schemas` says what bodies look like.
"""

from __future__ import annotations

from typing import Any

import paceline
from paceline.gateway.openapi_schemas import SOME_TEXT, TEXT, event, reference, schemas
from paceline.gateway.requests import MAX_CHOICES

Json = dict[str, Any]

PATH = "/openapi.json"
ABOUT = """\
OpenAI's API with the usual extras, and `speculation`, which says what a request asks of speculative decoding.

* A field that is null counts as absent.
* Token ids must be in the model's vocabulary, and prompt and output together must fit its context: 400 names the
  field and the limit. So it is with limits between fields: `min_tokens` up to `max_tokens`, `stream_options` with
  `stream`, `top_logprobs` with `logprobs`, prompts times `n` up to {max_choices}.
* `speculation.token_fates` asks how each token came about: `accepted` is a draft token that matched; the target's own
  is `recovered` after a mismatch, `bonus` after all had matched, and `plain` in a step without drafts. Each token
  stands there once, also one without text of its own; text then waits for the end of its token.
* Special tokens spelled out in the messages of a chat stay text; a `prompt` is read as it stands, and may hold some.
* A stream that fails after its first byte ends with an event that holds the error object.
* Methods that a path does not have are answered with 405, unknown paths with 404, both with the error object.
"""


def openapi_document() -> Json:
    """Returns the description, OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Paceline gateway",
            "version": paceline.__version__,
            "description": ABOUT.format(max_choices=MAX_CHOICES),
        },
        "paths": _paths(),
        "components": {"schemas": schemas()},
    }


def _paths() -> Json:
    name = {"name": "name", "in": "path", "required": True, "schema": SOME_TEXT, "description": "May hold slashes."}
    return {
        "/v1/completions": {"post": _generation("createCompletion", "CompletionBody", "Completion")},
        "/v1/chat/completions": {"post": _generation("createChatCompletion", "ChatBody", "ChatCompletion")},
        "/v1/models": {"get": _reading("listModels", "Models that can be asked for", "ModelList")},
        "/v1/models/{name}": {
            "get": {
                **_reading("showModel", "One model", "Model", {"404": _failure("No such model")}),
                "parameters": [name],
            }
        },
        "/livez": {"get": _reading("livez", "Whether the process lives: it answers", "Life")},
        **{path: {"get": _readiness(operation)} for path, operation in (("/readyz", "readyz"), ("/health", "health"))},
        "/metrics": {
            "get": {
                "operationId": "metrics",
                "summary": "Prometheus metrics",
                "responses": {"200": {"description": "Text format", "content": {"text/plain": {"schema": TEXT}}}},
            }
        },
        PATH: {
            "get": {
                "operationId": "openapi",
                "summary": "This description",
                "responses": {
                    "200": {
                        "description": "OpenAPI 3.1",
                        "content": {"application/json": {"schema": {"type": "object"}}},
                    }
                },
            }
        },
    }


def _generation(operation: str, body: str, answer: str) -> Json:
    answers = _content(answer)["content"]
    answers["text/event-stream"] = {"schema": event(f"{answer}Chunk")}
    return {
        "operationId": operation,
        "summary": "Generates text, whole or as a stream",
        "requestBody": {"required": True, **_content(body)},
        "responses": {
            "200": {"description": "What was generated", "content": answers},
            "400": _failure("A field, or the body as a whole, is refused", from_server=True),
            "404": _failure("No such model"),
            "408": _failure("The body did not arrive in time"),
            "413": _failure("The body is too large"),
            "429": _failure("Too many requests under way", retry=True),
            "500": _failure("A fault of the gateway or of a verifier"),
            "502": _failure("A verifier broke the protocol"),
            "503": _failure("No verifier is there, or the gateway stops", retry=True, from_server=True),
        },
    }


def _reading(operation: str, summary: str, answer: str, failures: Json | None = None) -> Json:
    responses = {"200": {"description": summary, **_content(answer)}, **(failures or {})}
    return {"operationId": operation, "summary": summary, "responses": responses}


def _readiness(operation: str) -> Json:
    no = {"503": {"description": "No: draining, or no verifier for any of its models", **_content("Health")}}
    return _reading(operation, "Whether new requests can be served", "Health", no)


def _failure(description: str, *, retry: bool = False, from_server: bool = False) -> Json:
    """Returns a response with the error object.

    Args:
        description: When it comes.
        retry: It says when to come again.
        from_server: The HTTP server, too, answers so, with plain text: to what is no HTTP, or beyond its connections.
    """
    failure: Json = {"description": description, **_content("Error")}
    if from_server:
        failure["content"]["text/plain"] = {"schema": TEXT}
    if retry:
        failure["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}}
    return failure


def _content(name: str) -> Json:
    return {"content": {"application/json": {"schema": reference(name)}}}

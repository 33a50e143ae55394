"""The OpenAPI description of the HTTP API: every path, and every status that can come back from it.

It knows no sessions and no transport; the schemas in it are those of the models of bodies and answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import paceline
from paceline.gateway.api import openai_shapes as shapes
from paceline.gateway.api import translated_shapes as translated
from paceline.gateway.api.anthropic.bodies import CountBody, MessagesBody
from paceline.gateway.api.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from paceline.gateway.api.responses.bodies import MAX_REFERRED, ResponsesBody
from paceline.gateway.http.response import IGNORED_FIELDS, IGNORED_TOOLS, REQUEST_ID
from paceline.gateway.sessions.request import DEFAULT_MAX_TOKENS, MAX_CHOICES, MAX_PROMPT_LOGPROBS

Json = dict[str, Any]

PATH = "/openapi.json"
ABOUT = """\
OpenAI's API with the usual extras, and `speculation`, which controls speculative decoding of a request.

* A field that is null counts as absent.
* A field that is not described here is ignored, and named in the answer's header `{ignored_fields}`; `--strict-fields`
  makes a gateway refuse it with 400. A field that would change the answer and is not served is refused by name.
* Where `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` are absent, the model's own defaults apply,
  from its `generation_config.json`; where it has none, 1, 1, off, off and 1.
* Without `max_tokens` a text completion has up to {default_max_tokens} tokens; a chat has up to the model's own
  `max_new_tokens`, or up to the end of the context.
* `truncate_prompt_tokens` keeps the last tokens of a prompt or of a rendered chat: 1 up to less than the context, or -1
  for as many as fit into the context beside `max_tokens`.
* `echo` begins the text with the prompt, and with `logprobs` these with the prompt's; `prompt_logprobs` returns those
  of the prompt's tokens by themselves. With either, `max_tokens` of a text completion may be 0. Log probabilities are
  those of the model, before any of the sampling fields, and the first token of a prompt has none.
* `return_token_ids` adds `prompt_token_ids` and `token_ids`; in a stream, the first once, with the first tokens.
* `continue_final_message` ends a chat's prompt with the last message, which the answer continues; it excludes
  `add_generation_prompt`. `chat_template` needs a gateway with `--trust-request-chat-template`.
* Messages of the system and of developers may stand anywhere in a chat. They are
  [arranged as the model's template demands](bring-your-own-model.md#chat-templates).
* Images, audio and video in messages of a user are refused by the name of their field.
* `bad_words` are not generated, neither at the beginning of a text nor after a space, as the tokenizer writes them.
* `response_format`, `structured_outputs` (`json`, `regex`, `choice`, `grammar` or `json_object`, with
  `whitespace_pattern`) and vLLM's older `guided_*` ask for a text of a form; one of them at most. A grammar that cannot
  be compiled within a second is refused with its place.
* Token ids must be in the model's vocabulary, and prompt and output together must fit its context: 400 names the
  field and the limit. The same holds for limits between fields: `min_tokens` up to `max_tokens`, `stream_options` with
  `stream`, `top_logprobs` with `logprobs`, prompts times `n` up to {max_choices}. Tokens of all prompts, times `n`,
  times 1 + `prompt_logprobs` (or `logprobs` with `echo`) are up to {max_prompt_logprobs:,}.
* `speculation.token_fates` asks how each token came about: `accepted` is a draft token that matched; the target's own
  token is `recovered` after a mismatch, `bonus` after all had matched, and `plain` in a step without drafts. Each token
  is listed once, even without text of its own; text then waits for the end of its token.
* Agents may send back what models have written, at all doors. Served: arguments of calls as JSON text or as an object,
  broken ones as an empty object; calls and results without ids, a result then answering the oldest call that has none;
  results twice, or without a call, as far as the template takes them; no content of the assistant or of a tool;
  reasoning as `reasoning`, `reasoning_content` or `thinking`; the older `function_call` and role `function`. A
  user's or a system's message needs content. What a template refuses is a 400 that names the message and what to
  change.
* The model gets functions only. Tools of other kinds (`web_search`, `custom`, `mcp`, `local_shell`, `image_generation`,
  `bash_20250124`, `mcp_servers`...) are ignored, and named in the answer's header `{ignored_tools}`; a `tool_choice`
  that requires one is refused by name. Functions in a `namespace` are served under both names, joined by `__`.
* Items and blocks of such tools: a call with a `call_id`, and what it gave, are read as those of a function. What a
  server has run itself (`web_search_call`, `mcp_call`, `server_tool_use`...), and reasoning without text are left out.
  An `item_reference` stands for an item that a kept response of the same API key has answered with. One that is not
  known is left out. One request may refer to {max_referred} responses. In what a tool has answered, the text of a
  document is read, and an image is left out, with its kind in its place. What is left out is named in
  `{ignored_fields}`, but for reasoning. `--strict-fields` refuses all of it.
* With `parallel_tool_calls: false`, or Anthropic's `disable_parallel_tool_use`, a message ends with its first call, and
  generation with it.
* A message of a chat has content, calls or reasoning. `tool_choice` needs `tools`, and names one of them, or some with
  `allowed_tools`: the model sees these alone. Calls that have to be made are enforced by a grammar of the schemas
  of all tools, or of the one that is named. With a tool that is `strict`, a call that has begun is enforced as well.
  Some models write arguments one by one: Qwen3-Coder, and those that call in Python's notation. Theirs come in the
  schema's order, and a strict tool with a name that they cannot write is refused. Qwen3-Coder writes strings bare: of
  these, `enum` and `const` alone are enforced. Calls of gpt-oss are not enforced.
* A model that reasons may do so before what a grammar enforces.
* `/v1/responses` and `/v1/messages` are the same chats in the words of OpenAI's newer API and of Anthropic's: what
  this page says about fields holds for theirs, an error names theirs, and events of a stream have their types as names.
  A response with `store` (the default) is kept for a time (`--response-ttl-s`), for the same API key: to be retrieved,
  resumed after event `starting_after`, named as `previous_response_id`, cancelled, or deleted. It is `in_progress`
  while a gateway runs it, then `completed`, `failed`, `cancelled` or `incomplete`: by `max_output_tokens`, or
  `interrupted`, if its client or gateway left. One that failed or was interrupted can be streamed to its end while its
  session is known (`--record-ttl-s`). All kept responses share `--response-room-bytes`; where it ends, the key that
  keeps most loses its oldest. `metadata` have 16 members, keys of 64 and values of 512 characters at most.
* Special tokens spelled out in the messages of a chat stay text; a `prompt` is read as it is, and may hold some.
* A stream that fails after its first byte ends with an event that holds the error object.
* Methods that a path does not have are answered with 405, unknown paths with 404, both with the error object.
"""
_REFERENCE = "#/components/schemas/{model}"
_TEXT: Json = {"text/plain": {"schema": {"type": "string"}}}
_COMPLETION = (CompletionBody, shapes.COMPLETION, shapes.COMPLETION_CHUNK)
_CHAT = (ChatBody, shapes.CHAT_COMPLETION, shapes.CHAT_COMPLETION_CHUNK)
_TOKENIZE = (TokenizeTextBody, TokenizeChatBody)
_RESPONSES = (ResponsesBody, translated.RESPONSE, *translated.RESPONSE_EVENTS)
_MESSAGES = (MessagesBody, translated.MESSAGE, *translated.MESSAGE_EVENTS)
_MODELS = (
    *(*_COMPLETION, *_CHAT, *_TOKENIZE, DetokenizeBody, shapes.TOKENS, shapes.PROMPT),
    *(*_RESPONSES, translated.RESPONSE_ERROR, translated.DELETED),
    *(*_MESSAGES, translated.MESSAGE_ERROR, CountBody, translated.INPUT_TOKENS),
    *(shapes.MODEL, shapes.MODELS, shapes.HEALTH, shapes.LIFE, shapes.VERSION, shapes.LOAD, shapes.ERROR),
)
_FAILURES = {
    "400": "A field, or the body as a whole, is refused",
    "401": "A key is required, and the request has none that is known",
    "404": "No such model, or no such session to resume",
    "408": "The body did not arrive in time",
    "409": "The stream to resume is another one, or continues elsewhere",
    "413": "The body is too large",
    "422": "Engines died of this request",
    "429": "Too many requests under way",
    "500": "A fault of the gateway or of a verifier",
    "502": "A verifier broke the protocol",
    "503": "No verifier is there, or the gateway stops",
}
_RETRIED = ("429", "503")
_OF_TOKENIZER = ("400", "401", "404", "408", "413", "429", "500", "503")
_OF_KEPT = ("400", "401", "404", "429", "500", "503")
# Those that resume a session.
_OF_RUN = ("400", "401", "404", "409", "422", "429", "500", "502", "503")
# Answered before the API is known.
_AT_THE_DOOR = ("401", "429")
# The HTTP server, too, answers so, with plain text: to what is no HTTP, or beyond its connections.
_FROM_SERVER = ("400", "503")


def openapi_document() -> Json:
    """Returns the description, OpenAPI 3.1."""
    _, schemas = models_json_schema([(each, "validation") for each in _MODELS], ref_template=_REFERENCE)
    about = ABOUT.format(
        max_choices=MAX_CHOICES,
        max_prompt_logprobs=MAX_PROMPT_LOGPROBS,
        max_referred=MAX_REFERRED,
        ignored_fields=IGNORED_FIELDS,
        ignored_tools=IGNORED_TOOLS,
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )
    posts = {
        "/v1/completions": _generation("createCompletion", *_COMPLETION),
        "/v1/chat/completions": _generation("createChatCompletion", *_CHAT),
        "/v1/responses": _generation("createResponse", *_RESPONSES, error=translated.RESPONSE_ERROR),
        "/v1/messages": _generation("createMessage", *_MESSAGES, error=translated.MESSAGE_ERROR),
        "/v1/messages/count_tokens": _tokenizing(
            "countMessageTokens",
            "The tokens of a prompt",
            (CountBody,),
            translated.INPUT_TOKENS,
            translated.MESSAGE_ERROR,
        ),
        "/tokenize": _tokenizing("tokenize", "The tokens of a prompt or a chat", _TOKENIZE, shapes.TOKENS),
        "/detokenize": _tokenizing("detokenize", "The text of tokens", (DetokenizeBody,), shapes.PROMPT),
    }
    reads = _reads()
    ping = {"post": {**reads["/ping"], "operationId": "postPing"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline gateway", "version": paceline.__version__, "description": about},
        "paths": {
            **{path: {"post": operation} for path, operation in posts.items()},
            **{path: {"get": operation, **(ping if path == "/ping" else {})} for path, operation in reads.items()},
            **_kept(),
        },
        "components": {"schemas": schemas["$defs"]},
    }


def _reads() -> Json:
    """Returns the operations that only read, by path."""
    some_text = {"type": "string", "minLength": 1}
    name = {"name": "name", "in": "path", "required": True, "schema": some_text, "description": "May hold slashes."}
    not_found = {"404": _response("No such model", _json(shapes.ERROR))}
    health = _json(shapes.HEALTH)
    not_ready = {"503": _response("No: draining, or no verifier for any of its models", health)}
    ready = "Whether new requests can be served"
    itself = {"application/json": {"schema": {"type": "object"}}}
    one_model = _operation("showModel", "One model", _json(shapes.MODEL), not_found)
    return {
        "/v1/models": _operation("listModels", "Models that can be asked for", _json(shapes.MODELS)),
        "/v1/models/{name}": {**one_model, "parameters": [name]},
        "/livez": _operation("livez", "Whether the process lives: it answers", _json(shapes.LIFE)),
        "/readyz": _operation("readyz", ready, health, not_ready),
        "/health": _operation("health", ready, health, not_ready),
        "/ping": _operation("ping", ready, health, not_ready),
        "/load": _operation("load", "How many sessions are under way", _json(shapes.LOAD)),
        "/version": _operation("version", "What serves", _json(shapes.VERSION)),
        "/metrics": _operation("metrics", "Prometheus metrics", _TEXT),
        PATH: _operation("openapi", "This description", itself),
    }


def _kept() -> Json:
    """Returns the operations on responses that are kept, by path."""
    name = {
        "name": "response_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": "^resp_[0-9a-f]{32}$"},
    }
    number = {"type": "integer", "minimum": 0, "maximum": 10**12 - 1}
    query = [
        {"name": "stream", "in": "query", "schema": {"type": "boolean"}, "description": "Whether as a stream."},
        {"name": "starting_after", "in": "query", "schema": number, "description": "Its last event that is there."},
    ]
    error = translated.RESPONSE_ERROR
    streamed = {**_json(translated.RESPONSE), **_stream(translated.RESPONSE_EVENTS, error, named=True)}
    failures = {status: _failures(each, error) for status, each in {"run": _OF_RUN, "kept": _OF_KEPT}.items()}
    show = _operation("showResponse", "A response that is kept", streamed, failures["run"])
    delete = _operation("deleteResponse", "Forgets a response", _json(translated.DELETED), failures["kept"])
    cancel = _operation("cancelResponse", "Ends a response in progress", _json(translated.RESPONSE), failures["run"])
    one = "/v1/responses/{response_id}"
    return {
        one: {"get": {**show, "parameters": [name, *query]}, "delete": {**delete, "parameters": [name]}},
        f"{one}/cancel": {"post": {**cancel, "parameters": [name]}},
    }


def _generation(
    name: str,
    body: type[BaseModel],
    answer: type[BaseModel],
    *events: type[BaseModel],
    error: type[BaseModel] = shapes.ERROR,
) -> Json:
    answers = {**_json(answer), **_stream(events, error, named=error is not shapes.ERROR)}
    operation = _operation(name, "Generates text, whole or as a stream", answers, _failures(_FAILURES, error))
    return _with_body(operation, _json(body))


def _tokenizing(
    name: str,
    summary: str,
    bodies: Sequence[type[BaseModel]],
    answer: type[BaseModel],
    error: type[BaseModel] = shapes.ERROR,
) -> Json:
    failures = _failures(_OF_TOKENIZER, error)
    return _with_body(_operation(name, summary, _json(answer), failures), _json(*bodies))


def _with_body(operation: Json, content: Json) -> Json:
    """Adds the body of an operation, and the headers that refer to it."""
    text = {"type": "string"}
    operation["responses"]["200"]["headers"] = {
        IGNORED_FIELDS: {"schema": text, "description": "Unknown fields of the body, if there are any."},
        IGNORED_TOOLS: {"schema": text, "description": "Kinds of tools that are no functions, if there are any."},
        REQUEST_ID: {"schema": text, "description": "As the request has it; otherwise one of ours."},
    }
    return {**operation, "requestBody": {"required": True, "content": content}}


def _stream(events: Sequence[type[BaseModel]], error: type[BaseModel], *, named: bool) -> Json:
    """Returns the schema of one server-sent event, as OpenAPI 3.1 describes streams: data, an error, or the end.

    Args:
        events: What the data of one may hold.
        error: What it holds when the stream fails.
        named: Whether events have names; otherwise the last one is `[DONE]`.
    """
    payload = {"anyOf": [_reference(each) for each in (*events, error)]}
    data: Json = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    named_data = {"event": {"type": "string"}, "data": data}
    properties = named_data if named else {"data": {"anyOf": [{"const": "[DONE]"}, data]}}
    schema = {"type": "object", "required": list(properties), "properties": properties}
    return {"text/event-stream": {"schema": schema}}


def _operation(name: str, summary: str, answer: Json, failures: Mapping[str, Json] | None = None) -> Json:
    responses = {"200": _response(summary, answer), **(failures or {})}
    return {"operationId": name, "summary": summary, "responses": responses}


def _failures(statuses: Iterable[str], error: type[BaseModel]) -> Json:
    return {status: _failure(status, error) for status in statuses}


def _failure(status: str, error: type[BaseModel]) -> Json:
    models = dict.fromkeys((error, shapes.ERROR) if status in _AT_THE_DOOR else (error,))
    content = _json(*models) | (_TEXT if status in _FROM_SERVER else {})
    failure = _response(_FAILURES[status], content)
    if status in _RETRIED:
        failure["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}}
    return failure


def _response(description: str, content: Json) -> Json:
    return {"description": description, "content": content}


def _json(*models: type[BaseModel]) -> Json:
    schemas = [_reference(each) for each in models]
    return {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}


def _reference(model: type[BaseModel]) -> Json:
    return {"$ref": _REFERENCE.format(model=model.__name__)}

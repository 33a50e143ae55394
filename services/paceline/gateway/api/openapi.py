"""The OpenAPI description of the HTTP API: every path, and the statuses that can come back.

It knows no sessions and no transport; bodies are described by the models that read them, answers by their kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import paceline
from paceline.gateway.api.anthropic.bodies import CountBody, MessagesBody
from paceline.gateway.api.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from paceline.gateway.api.responses.bodies import MAX_REFERRED, ResponsesBody
from paceline.gateway.http.response import IGNORED_FIELDS, IGNORED_TOOLS
from paceline.gateway.sessions.request import DEFAULT_MAX_TOKENS, MAX_CHOICES, MAX_LOGPROBS

Json = dict[str, Any]

PATH = "/openapi.json"
ABOUT = """\
OpenAI's API with the usual extras, and `speculation`, which controls speculative decoding of a request.

* A field that is null counts as absent. A number, true or false may come as a text that spells it in JSON, such as
  `"3"` or `"true"`. Nothing else is converted: `1` is not true, and true is not 1.
* A field that is not described here is ignored, and named in the answer's header `{ignored_fields}`; `--strict-fields`
  makes a gateway refuse it with 400. A field that would change the answer and is not served is refused by name,
  and so is an unknown field of `speculation`, which is ours alone.
* Where `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` are absent, the model's own defaults apply,
  from its `generation_config.json`; where it has none, 1, 1, off, off and 1.
* Without `max_tokens` a text completion has up to {default_max_tokens} tokens; a chat has up to the model's own
  `max_new_tokens`, or up to the end of the context.
* `truncate_prompt_tokens` keeps the last tokens of a prompt or of a rendered chat: 1 up to less than the context, or -1
  for as many as fit into the context beside `max_tokens`.
* `echo` puts the prompt in front of the text, and with `logprobs` its log probabilities in front of the answer's;
  `prompt_logprobs` returns the prompt's alone. With either, `max_tokens` of a text completion may be 0. Log
  probabilities are the model's own, before all sampling fields; the first token of a prompt has none.
* `return_token_ids` adds `prompt_token_ids` and `token_ids`; a stream has the first once, with its first tokens.
* `continue_final_message` ends a chat's prompt with the last message, which the answer continues; it excludes
  `add_generation_prompt`. `chat_template` needs a gateway with `--trust-request-chat-template`.
* Messages of the system and of developers may stand anywhere in a chat. They are
  [arranged as the model's template demands](bring-your-own-model.md#chat-templates).
* Content is a text, or a list of texts and of parts that are text: `text`, `input_text`, `output_text`,
  `reasoning_text`, `refusal` and `thinking`. An assistant's `refusal` stands for its content where that is null.
* Images, audio and video in messages of a user are refused by the name of their field.
* `bad_words` are not generated, neither at the beginning of a text nor after a space, as the tokenizer writes them.
* `response_format` and `structured_outputs` (`json`, `regex`, `choice`, `grammar` or `json_object`, with
  `whitespace_pattern`) ask for a text of a form; one of them at most. A verifier compiles the grammar before the first
  token; one that it cannot compile within a second is refused by the name of the field, in streams, too.
* Token ids must be in the model's vocabulary, and prompt and output together must fit its context: 400 names the
  field and the limit. The same holds for limits between fields: `min_tokens` up to `max_tokens`, `stream_options` with
  `stream` and `top_logprobs` with `logprobs` (where they ask for something), prompts times `n` up to {max_choices}.
  A request has up to {max_logprobs:,} log probabilities: 1 + alternatives for each token of a prompt, times `n`, and,
  unless it is a stream, for each of `max_tokens` of all choices. Without `max_tokens`, answers end where these do.
* `speculation.token_origins` returns the origin of each token: `accepted` is a draft token that matched; the target's
  own token is `recovered` after a mismatch, `bonus` after all had matched, and `plain` in a step without drafts. Each
  token is listed once, even without text of its own; text then waits for the end of its token.
* Agents may send back what models have written, at all doors. Served: arguments of calls as JSON text or as an object,
  broken ones as an empty object; calls and results without ids, a result then answering the oldest call that has none;
  results twice, or without a call, as far as the template takes them; no content of the assistant or of a tool;
  reasoning as `reasoning`, `reasoning_content` or `thinking`; the older `function_call` and role `function`. A
  user's or a system's message needs content. Template refusals are a 400 that names the message and what to
  change.
* The model gets functions only. Tools of other kinds (`web_search`, `custom`, `mcp`, `local_shell`, `image_generation`,
  `bash_20250124`, `mcp_servers`...) are ignored, and named in the answer's header `{ignored_tools}`; a `tool_choice`
  that requires one is refused by name. Functions in a `namespace` are served under both names, joined by `__`.
* Items and blocks of such tools: a call with a `call_id`, and what it gave, are read as those of a function. Calls run
  by a server (`web_search_call`, `mcp_call`, `server_tool_use`...), and reasoning without text are left out.
  An `item_reference` stands for an item that a kept response of the same API key has answered with. An item that is not
  known is left out. A request may refer to {max_referred} responses. In a tool's answer, the text of a
  document is read, and an image is left out, with its kind in its place. Omitted parts are named in
  `{ignored_fields}`, but for reasoning. `--strict-fields` refuses all of it.
* With `parallel_tool_calls: false`, or Anthropic's `disable_parallel_tool_use`, a message ends with its first call, and
  generation with it.
* A message of a chat has content, calls or reasoning. `tool_choice` needs `tools`, and names one of them, or some with
  `allowed_tools`: the model sees these alone. Required calls are enforced by a grammar of the schemas of all tools, or
  of the named one. With a tool that is `strict`, a call that has begun is enforced as well.
  Some models write arguments one by one: Qwen3-Coder, and those that call in Python's notation. Theirs come in the
  schema's order, and a strict tool with a name that they cannot write is refused. Qwen3-Coder writes strings bare: of
  these, `enum` and `const` alone are enforced. Calls of gpt-oss, DeepSeek, GLM, Kimi and Gemma 4 are
  read, not enforced.
* A reasoning model may reason before the text that a grammar enforces.
* `/v1/responses` and `/v1/messages` are the same chats in the words of OpenAI's newer API and of Anthropic's: what
  this page says about fields holds for theirs, an error names theirs, and events of a stream have their types as names.
  A response with `store` (the default) is kept for a time (`--response-ttl-s`), for the same API key: to be retrieved,
  resumed after event `starting_after`, named as `previous_response_id`, cancelled, or deleted. It is `in_progress`
  while a gateway runs it, then `completed`, `failed`, `cancelled` or `incomplete`: by `max_output_tokens`, or
  `interrupted`, if its client or gateway left. A failed or interrupted response can be streamed to its end while its
  session is known (`--record-ttl-s`). All kept responses share `--response-room-bytes`; where it ends, the key that
  keeps most loses its oldest. `metadata` have 16 members, keys of 64 and values of 512 characters at most.
* Special tokens spelled out in the messages of a chat stay text; a `prompt` is read as it is, and may hold some.
* `prediction` is the text that the client expects, such as the file to be changed. It can only make the answer faster:
  look-up searches it, too. `usage.completion_tokens_details` says how many of its tokens the answer
  followed and how many it did not (`accepted_prediction_tokens`, `rejected_prediction_tokens`).
* A stream without output for `--stream-ping-s` (15 s) sends the comment `: ping`, and `/v1/messages` its event `ping`.
  An error before the first output or ping has its own status.
* A stream that fails after its first byte ends with an event that holds the error object.
* Methods that a path does not have are answered with 405, unknown paths with 404, both with the error object.
"""
_REFERENCE = "#/components/schemas/{model}"
_JSON: Json = {"application/json": {"schema": {"type": "object"}}}
_TEXT: Json = {"text/plain": {"schema": {"type": "string"}}}
_JSON_OR_STREAM: Json = {**_JSON, "text/event-stream": {}}
_FAILURES = {
    "400": "A field, or the body as a whole, is refused",
    "401": "A key is required, and the request has none that is known",
    "404": "No such model, response, or session to resume",
    "408": "The body did not arrive in time",
    "409": "The stream to resume is another one, or continues elsewhere",
    "413": "The body is too large",
    "415": "The body is compressed",
    "422": "Engines died of this request",
    "429": "Too many requests under way",
    "500": "A fault of the gateway or of a verifier",
    "502": "A verifier broke the protocol",
    "503": "No verifier is available, or the gateway is stopping",
}
_ASKED: Json = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
# Requests to begin with, of the bodies that an operation takes first.
_EXAMPLES: Mapping[type[BaseModel], Json] = {
    CompletionBody: {"prompt": "class Stack:", "max_tokens": 40, "temperature": 0},
    ChatBody: {**_ASKED, "max_tokens": 64, "temperature": 0},
    ResponsesBody: {"input": "What is the capital of France?", "max_output_tokens": 64, "temperature": 0},
    MessagesBody: {**_ASKED, "max_tokens": 64, "temperature": 0},
    CountBody: _ASKED,
    TokenizeTextBody: {"prompt": "class Stack:"},
    DetokenizeBody: {"tokens": [10, 20, 30]},
}
_GENERATES, _HEALTH = "Generates text, whole or as a stream", "Whether new requests can be served"
_KEPT = "/v1/responses/{response_id}"
# Operations by path and method: name, summary, answer, and the bodies that they take.
_OPERATIONS: Mapping[tuple[str, str], tuple[str, str, Json, tuple[type[BaseModel], ...]]] = {
    ("/v1/completions", "post"): ("createCompletion", _GENERATES, _JSON_OR_STREAM, (CompletionBody,)),
    ("/v1/chat/completions", "post"): ("createChatCompletion", _GENERATES, _JSON_OR_STREAM, (ChatBody,)),
    ("/v1/responses", "post"): ("createResponse", _GENERATES, _JSON_OR_STREAM, (ResponsesBody,)),
    ("/v1/messages", "post"): ("createMessage", _GENERATES, _JSON_OR_STREAM, (MessagesBody,)),
    ("/v1/messages/count_tokens", "post"): ("countMessageTokens", "The tokens of a prompt", _JSON, (CountBody,)),
    ("/tokenize", "post"): (
        "tokenize",
        "The tokens of a prompt or a chat",
        _JSON,
        (TokenizeTextBody, TokenizeChatBody),
    ),
    ("/detokenize", "post"): ("detokenize", "The text of tokens", _JSON, (DetokenizeBody,)),
    ("/v1/models", "get"): ("listModels", "Models that can be asked for", _JSON, ()),
    ("/v1/models/{name}", "get"): ("showModel", "A model", _JSON, ()),
    ("/livez", "get"): ("livez", "Whether the process lives: it answers", _JSON, ()),
    ("/readyz", "get"): ("readyz", _HEALTH, _JSON, ()),
    ("/health", "get"): ("health", _HEALTH, _JSON, ()),
    ("/ping", "get"): ("ping", _HEALTH, _JSON, ()),
    ("/ping", "post"): ("postPing", _HEALTH, _JSON, ()),
    ("/load", "get"): ("load", "How many sessions are under way", _JSON, ()),
    ("/version", "get"): ("version", "Version of the server", _JSON, ()),
    ("/metrics", "get"): ("metrics", "Prometheus metrics", _TEXT, ()),
    (PATH, "get"): ("openapi", "This description", _JSON, ()),
    (_KEPT, "get"): ("showResponse", "A response that is kept", _JSON_OR_STREAM, ()),
    (_KEPT, "delete"): ("deleteResponse", "Forgets a response", _JSON, ()),
    (f"{_KEPT}/cancel", "post"): ("cancelResponse", "Ends a response in progress", _JSON, ()),
}


def _parameter(name: str, schema: Json, place: str = "path") -> Json:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


_PATH_PARAMETERS = (
    _parameter("name", {"type": "string", "minLength": 1}),
    _parameter("response_id", {"type": "string", "pattern": "^resp_[0-9a-f]{32}$"}),
)
_QUERIES = {
    "showResponse": [
        _parameter("stream", {"type": "boolean"}, place="query"),
        _parameter("starting_after", {"type": "integer", "minimum": 0, "maximum": 10**12 - 1}, place="query"),
    ]
}


def openapi_document() -> Json:
    """Returns the description, OpenAPI 3.1."""
    taken: list[Any] = [(each, "validation") for *_, bodies in _OPERATIONS.values() for each in bodies]
    _, schemas = models_json_schema(taken, ref_template=_REFERENCE)
    about = ABOUT.format(
        max_choices=MAX_CHOICES,
        max_logprobs=MAX_LOGPROBS,
        max_referred=MAX_REFERRED,
        ignored_fields=IGNORED_FIELDS,
        ignored_tools=IGNORED_TOOLS,
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )
    paths: Json = {}
    for path, method in _OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline gateway", "version": paceline.__version__, "description": about},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def _operation(path: str, method: str) -> Json:
    name, summary, content, bodies = _OPERATIONS[path, method]
    failures = {status: {"description": why, "content": _JSON} for status, why in _FAILURES.items()}
    operation: Json = {
        "operationId": name,
        "summary": summary,
        "parameters": [each for each in _PATH_PARAMETERS if f"{{{each['name']}}}" in path] + _QUERIES.get(name, []),
        "responses": {"200": {"description": summary, "content": content}, **failures},
    }
    if bodies:
        schemas = [{"$ref": _REFERENCE.format(model=each.__name__)} for each in bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        content = {"application/json": {"schema": schema, "example": _EXAMPLES[bodies[0]]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation

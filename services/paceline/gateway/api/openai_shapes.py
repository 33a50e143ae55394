"""What answers look like, as models that the OpenAPI description is made of.

Answers themselves are built as plain objects, in `paceline.gateway.api.openai.answer`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, conlist, create_model

from paceline.core.messages import FinishReason, TokenFate

Fields = dict[str, Any]
Count = Annotated[int, Field(ge=0)]


def shape(name: str, /, **fields: Any) -> type[BaseModel]:
    """Returns the model of a JSON object that has these fields and no others."""
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def maybe(kind: Any, description: str) -> Any:
    """Returns a field that may be missing; a factory, unlike a default, does not appear in the schema."""
    return kind, Field(default_factory=lambda: None, description=description)


ERROR = shape("Error", error=shape("ErrorObject", message=str, type=str, param=str | None, code=str | None))
LIFE = shape("Life", status=Literal["alive"])
HEALTH = shape(
    "Health",
    status=Literal["ok", "degraded", "draining", "no verifier"],
    **dict.fromkeys(("store", "tasks", "keys"), str),
    models=str | dict[str, str],
    **dict.fromkeys(("verifiers", "drafters", "sessions"), Count),
)
_CONTEXT_LEN = Annotated[int, Field(ge=1)] | None
MODEL = shape(
    "Model",
    id=str,
    object=Literal["model"],
    created=Count,
    owned_by=str,
    max_model_len=_CONTEXT_LEN,
    exact=bool | None,
)
MODELS = shape("ModelList", object=Literal["list"], data=conlist(MODEL))
VERSION = shape("Version", version=str)
LOAD = shape("Load", server_load=Count)
TOKENS = shape("Tokens", count=Count, max_model_len=Count, tokens=list[Count], token_strs=None)
PROMPT = shape("Prompt", prompt=str)

_USAGE = shape(
    "Usage",
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), Count),
    prompt_tokens_details=shape("PromptTokensDetails", cached_tokens=Count),
    completion_tokens_details=shape("CompletionTokensDetails", reasoning_tokens=Count),
)
_COUNTED = ("spec_steps", "accepted_draft_tokens", "draft_tokens", "steps", "hits", "misses")
_SPECULATION = shape(
    "Speculation",
    **dict.fromkeys(("mean_acceptance_length", "draft_acceptance_rate", "mean_batch_size"), float),
    acceptance_histogram=list[Count],
    **{f"num_{each}": Count for each in _COUNTED},
    **dict.fromkeys(("lossy", "exact"), bool),
)
METRICS = shape("Metrics", speculative_decoding=_SPECULATION | None)

_TOKEN: Fields = {"token": str, "logprob": float, "bytes": list[Count]}
_POSITION = shape("TokenLogprobs", **_TOKEN, top_logprobs=conlist(shape("TopLogprob", **_TOKEN)))
_CHAT_LOGPROBS = shape("ChatLogprobs", content=conlist(_POSITION))
_TEXT_LOGPROBS = shape(
    "CompletionLogprobs",
    tokens=list[str],
    token_logprobs=list[float | None],
    top_logprobs=list[dict[str, float] | None],
    text_offset=list[Count],
)
_TOKEN_FATES = maybe(
    conlist(shape("TokenText", text=str, fate=TokenFate | None)),
    "Tokens behind the text, whose texts join to it; fate is null where it is not known.",
)
_TOKEN_IDS = maybe(list[Count], "Generated tokens, as `return_token_ids` asks for.")
_PROMPT_LOGPROB = shape("PromptLogprob", logprob=float, rank=Annotated[int, Field(ge=1)], decoded_token=str)
_OF_PROMPT: Fields = {
    "prompt_token_ids": maybe(list[Count], "The prompt's tokens, as `return_token_ids` asks for."),
    "prompt_logprobs": maybe(
        list[dict[str, _PROMPT_LOGPROB] | None],  # type: ignore[valid-type]
        "By token ids, at each position of the prompt: null at the first, which has none before it.",
    ),
}
_TEXT: Fields = {"text": str, "logprobs": _TEXT_LOGPROBS | None, **_OF_PROMPT}
_CHAT: Fields = {"logprobs": _CHAT_LOGPROBS | None}
_FUNCTION = shape("CalledFunctionTold", name=str, arguments=str)
_CALL = shape("ToolCallTold", id=str, type=Literal["function"], function=_FUNCTION)
_REASONING = dict.fromkeys(
    ("reasoning_content", "reasoning"), maybe(str, "Reasoning, where it is set apart; twice the same.")
)
_MESSAGE = shape(
    "Message",
    role=Literal["assistant"],
    content=str | None,
    tool_calls=maybe(conlist(_CALL), "Tools that are to be called."),
    **_REASONING,
)
_FUNCTION_DELTA = shape(
    "CalledFunctionDelta", name=maybe(str, "At the beginning of a call."), arguments=maybe(str, "Further text.")
)
_CALL_DELTA = shape(
    "ToolCallDelta",
    index=Count,
    id=maybe(str, "At the beginning of a call."),
    type=maybe(Literal["function"], "At the beginning of a call."),
    function=_FUNCTION_DELTA,
)
_DELTA = shape(
    "Delta",
    role=maybe(Literal["assistant"], "The role."),
    content=maybe(str, "Further text."),
    tool_calls=maybe(conlist(_CALL_DELTA), "Further text of calls, or new ones."),
    **_REASONING,
)
_MAYBE_USAGE = maybe(_USAGE | None, "As `stream_options` asks for.")
_MAYBE_METRICS = maybe(METRICS, "At the end of a choice, and of a stream with usage.")


_ENDS = FinishReason | Literal["tool_calls"]


def _whole(name: str, kind: Any, more: Fields, **body: Any) -> type[BaseModel]:
    return _answer(name, kind, {"finish_reason": _ENDS, **body}, usage=_USAGE, metrics=METRICS, **more)


def _chunk(name: str, kind: Any, more: Fields, **body: Any) -> type[BaseModel]:
    counts = {"usage": _MAYBE_USAGE, "metrics": _MAYBE_METRICS}
    return _answer(name, kind, {"finish_reason": _ENDS | None, **body}, **counts, **more)


def _answer(name: str, kind: Any, choice: Fields, **counts: Any) -> type[BaseModel]:
    fields: Fields = {"token_fates": _TOKEN_FATES, "token_ids": _TOKEN_IDS, **choice}
    choices = conlist(shape(f"{name}Choice", index=Count, **fields))
    return shape(name, id=str, object=kind, created=Count, model=str, choices=choices, **counts)


COMPLETION = _whole("Completion", Literal["text_completion"], {}, **_TEXT)
COMPLETION_CHUNK = _chunk("CompletionChunk", Literal["text_completion"], {}, **_TEXT)
CHAT_COMPLETION = _whole("ChatCompletion", Literal["chat.completion"], _OF_PROMPT, message=_MESSAGE, **_CHAT)
CHAT_COMPLETION_CHUNK = _chunk(
    "ChatCompletionChunk", Literal["chat.completion.chunk"], _OF_PROMPT, delta=_DELTA, **_CHAT
)

"""What answers look like, as models that the OpenAPI description is made of.

Answers themselves are built as plain objects, in `paceline.gateway.answers`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, conlist, create_model

from paceline.core.messages import FinishReason, TokenFate

Fields = dict[str, Any]
_Count = Annotated[int, Field(ge=0)]


def _shape(name: str, /, **fields: Any) -> type[BaseModel]:
    """Returns the model of a JSON object that has these fields and no others."""
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def _maybe(kind: Any, description: str) -> Any:
    """Returns a field that may be missing; a factory, unlike a default, is not shown."""
    return kind, Field(default_factory=lambda: None, description=description)


ERROR = _shape("Error", error=_shape("ErrorObject", message=str, type=str, param=str | None, code=str | None))
LIFE = _shape("Life", status=Literal["alive"])
HEALTH = _shape(
    "Health",
    status=Literal["ok", "degraded", "draining", "no verifier"],
    **dict.fromkeys(("store", "tasks"), str),
    models=str | dict[str, str],
    **dict.fromkeys(("verifiers", "drafters", "sessions"), _Count),
)
_CONTEXT_LEN = Annotated[int, Field(ge=1)] | None
MODEL = _shape(
    "Model",
    id=str,
    object=Literal["model"],
    created=_Count,
    owned_by=str,
    max_model_len=_CONTEXT_LEN,
    exact=bool | None,
)
MODELS = _shape("ModelList", object=Literal["list"], data=conlist(MODEL))
VERSION = _shape("Version", version=str)
LOAD = _shape("Load", server_load=_Count)
TOKENS = _shape("Tokens", count=_Count, max_model_len=_Count, tokens=list[_Count], token_strs=None)
PROMPT = _shape("Prompt", prompt=str)

_USAGE = _shape(
    "Usage",
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _Count),
    prompt_tokens_details=_shape("PromptTokensDetails", cached_tokens=_Count),
)
_COUNTED = ("spec_steps", "accepted_draft_tokens", "draft_tokens", "steps", "hits", "misses")
_SPECULATION = _shape(
    "Speculation",
    **dict.fromkeys(("mean_acceptance_length", "draft_acceptance_rate", "mean_batch_size"), float),
    acceptance_histogram=list[_Count],
    **{f"num_{each}": _Count for each in _COUNTED},
    **dict.fromkeys(("lossy", "exact"), bool),
)
_METRICS = _shape("Metrics", speculative_decoding=_SPECULATION | None)

_TOKEN: Fields = {"token": str, "logprob": float, "bytes": list[_Count]}
_POSITION = _shape("TokenLogprobs", **_TOKEN, top_logprobs=conlist(_shape("TopLogprob", **_TOKEN)))
_CHAT_LOGPROBS = _shape("ChatLogprobs", content=conlist(_POSITION))
_TEXT_LOGPROBS = _shape(
    "CompletionLogprobs",
    tokens=list[str],
    token_logprobs=list[float | None],
    top_logprobs=list[dict[str, float] | None],
    text_offset=list[_Count],
)
_TOKEN_FATES = _maybe(
    conlist(_shape("TokenText", text=str, fate=TokenFate | None)),
    "Tokens behind the text, whose texts join to it; fate is null where it is not known.",
)
_TOKEN_IDS = _maybe(list[_Count], "Generated tokens, as `return_token_ids` asks for.")
_PROMPT_LOGPROB = _shape("PromptLogprob", logprob=float, rank=Annotated[int, Field(ge=1)], decoded_token=str)
_OF_PROMPT: Fields = {
    "prompt_token_ids": _maybe(list[_Count], "The prompt's tokens, as `return_token_ids` asks for."),
    "prompt_logprobs": _maybe(
        list[dict[str, _PROMPT_LOGPROB] | None],  # type: ignore[valid-type]
        "By token ids, at each position of the prompt: null at the first, which nothing stands before.",
    ),
}
_TEXT: Fields = {"text": str, "logprobs": _TEXT_LOGPROBS | None, **_OF_PROMPT}
_CHAT: Fields = {"logprobs": _CHAT_LOGPROBS | None}
_FUNCTION = _shape("CalledFunctionTold", name=str, arguments=str)
_CALL = _shape("ToolCallTold", id=str, type=Literal["function"], function=_FUNCTION)
_REASONING = dict.fromkeys(
    ("reasoning_content", "reasoning"), _maybe(str, "What led up to the answer, where it is set apart; the same twice.")
)
_MESSAGE = _shape(
    "Message",
    role=Literal["assistant"],
    content=str | None,
    tool_calls=_maybe(conlist(_CALL), "Tools that are to be called."),
    **_REASONING,
)
_FUNCTION_DELTA = _shape(
    "CalledFunctionDelta", name=_maybe(str, "At the beginning of a call."), arguments=_maybe(str, "Further text.")
)
_CALL_DELTA = _shape(
    "ToolCallDelta",
    index=_Count,
    id=_maybe(str, "At the beginning of a call."),
    type=_maybe(Literal["function"], "At the beginning of a call."),
    function=_FUNCTION_DELTA,
)
_DELTA = _shape(
    "Delta",
    role=_maybe(Literal["assistant"], "Who speaks."),
    content=_maybe(str, "Further text."),
    tool_calls=_maybe(conlist(_CALL_DELTA), "Further text of calls, or new ones."),
    **_REASONING,
)
_MAYBE_USAGE = _maybe(_USAGE | None, "As asked for in `stream_options`.")
_MAYBE_METRICS = _maybe(_METRICS, "At the end of a choice, and of a stream with usage.")


_ENDS = FinishReason | Literal["tool_calls"]


def _whole(name: str, kind: Any, more: Fields, **body: Any) -> type[BaseModel]:
    return _answer(name, kind, {"finish_reason": _ENDS, **body}, usage=_USAGE, metrics=_METRICS, **more)


def _chunk(name: str, kind: Any, more: Fields, **body: Any) -> type[BaseModel]:
    counts = {"usage": _MAYBE_USAGE, "metrics": _MAYBE_METRICS}
    return _answer(name, kind, {"finish_reason": _ENDS | None, **body}, **counts, **more)


def _answer(name: str, kind: Any, choice: Fields, **counts: Any) -> type[BaseModel]:
    fields: Fields = {"token_fates": _TOKEN_FATES, "token_ids": _TOKEN_IDS, **choice}
    choices = conlist(_shape(f"{name}Choice", index=_Count, **fields))
    return _shape(name, id=str, object=kind, created=_Count, model=str, choices=choices, **counts)


COMPLETION = _whole("Completion", Literal["text_completion"], {}, **_TEXT)
COMPLETION_CHUNK = _chunk("CompletionChunk", Literal["text_completion"], {}, **_TEXT)
CHAT_COMPLETION = _whole("ChatCompletion", Literal["chat.completion"], _OF_PROMPT, message=_MESSAGE, **_CHAT)
CHAT_COMPLETION_CHUNK = _chunk(
    "ChatCompletionChunk", Literal["chat.completion.chunk"], _OF_PROMPT, delta=_DELTA, **_CHAT
)

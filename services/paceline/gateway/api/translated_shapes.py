"""What /v1/responses and /v1/messages answer, as models that the OpenAPI description is made of."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, conlist

from paceline.gateway.api.openai_shapes import METRICS, Count, maybe, shape
from paceline.gateway.api.openai_shapes import Fields as Shown

_ERROR = shape("ResponseErrorObject", message=str, type=str, param=str | None, code=str | None)
RESPONSE_ERROR = shape(
    "ResponseError", type=Literal["error"], code=str | None, message=str, param=str | None, error=_ERROR
)
_Progress = Literal["in_progress", "completed", "incomplete"]
_OUTPUT_TEXT = shape("OutputText", type=Literal["output_text"], text=str, annotations=list[Any], logprobs=list[Any])
_REASONING_TEXT = shape("ReasoningTextTold", type=Literal["reasoning_text"], text=str)
_ITEM: Shown = {"id": str, "status": _Progress}
_MESSAGE = shape(
    "MessageItem", type=Literal["message"], role=Literal["assistant"], content=conlist(_OUTPUT_TEXT), **_ITEM
)
_REASONING = shape(
    "ReasoningItemTold", type=Literal["reasoning"], summary=list[Any], content=conlist(_REASONING_TEXT), **_ITEM
)
_CALL = shape(
    "FunctionCallItem",
    type=Literal["function_call"],
    **dict.fromkeys(("call_id", "name", "arguments"), str),
    namespace=maybe(str, "That of the function, where `tools` has it in one."),
    **_ITEM,
)
_Item: Any = _MESSAGE | _REASONING | _CALL
_RESPONSE_USAGE = shape(
    "ResponseUsage",
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), Count),
    input_tokens_details=shape("InputTokensDetails", cached_tokens=Count, cache_write_tokens=Count),
    output_tokens_details=shape("OutputTokensDetails", reasoning_tokens=Count),
)
RESPONSE = shape(
    "Response",
    id=str,
    object=Literal["response"],
    created_at=Count,
    status=Literal["in_progress", "completed", "incomplete", "failed", "cancelled"],
    error=shape("ResponseFailure", code=Literal["server_error"], message=str) | None,
    incomplete_details=shape("IncompleteDetails", reason=Literal["max_output_tokens", "interrupted"]) | None,
    **dict.fromkeys(("instructions", "previous_response_id"), str | None),
    max_output_tokens=int | None,
    metadata=dict[str, str],
    model=str,
    output=conlist(_Item),
    **dict.fromkeys(("parallel_tool_calls", "store"), bool),
    reasoning=shape("ReasoningTold", effort=str | None, summary=None),
    **dict.fromkeys(("temperature", "top_p"), float),
    text=shape("TextTold", format=dict[str, Any]),
    tool_choice=str | dict[str, Any],
    tools=list[dict[str, Any]],
    truncation=Literal["disabled"],
    usage=_RESPONSE_USAGE | None,
    metrics=maybe(METRICS, "At the end."),
)
DELETED = shape("DeletedResponse", id=str, object=Literal["response"], deleted=Literal[True])


def _event(name: str, kind: Any, /, **more: Any) -> type[BaseModel]:
    return shape(name, type=kind, sequence_number=Count, **more)


_PLACE: Shown = {"item_id": str, "output_index": Count}
_IN_PART: Shown = {**_PLACE, "content_index": Count}
_TOLD = ("created", "in_progress", "completed", "incomplete", "failed")
RESPONSE_EVENTS = (
    _event("ResponseEvent", Literal[tuple(f"response.{each}" for each in _TOLD)], response=RESPONSE),
    _event(
        "OutputItemEvent",
        Literal["response.output_item.added", "response.output_item.done"],
        output_index=Count,
        item=_Item,
    ),
    _event(
        "ContentPartEvent",
        Literal["response.content_part.added", "response.content_part.done"],
        part=_OUTPUT_TEXT | _REASONING_TEXT,
        **_IN_PART,
    ),
    _event("OutputTextDelta", Literal["response.output_text.delta"], delta=str, logprobs=list[Any], **_IN_PART),
    _event("OutputTextDone", Literal["response.output_text.done"], text=str, logprobs=list[Any], **_IN_PART),
    _event("ReasoningTextDelta", Literal["response.reasoning_text.delta"], delta=str, **_IN_PART),
    _event("ReasoningTextDone", Literal["response.reasoning_text.done"], text=str, **_IN_PART),
    _event("ArgumentsDelta", Literal["response.function_call_arguments.delta"], delta=str, **_PLACE),
    _event("ArgumentsDone", Literal["response.function_call_arguments.done"], name=str, arguments=str, **_PLACE),
)

MESSAGE_ERROR = shape(
    "MessageError",
    type=Literal["error"],
    error=shape(
        "MessageErrorObject",
        type=str,
        message=str,
        details=maybe(
            shape("MessageErrorDetails", error_code=str), "For the official client, where it knows the error."
        ),
    ),
    request_id=str | None,
)
_BLOCKS = (
    shape("TextBlockTold", type=Literal["text"], text=str),
    shape("ThinkingBlockTold", type=Literal["thinking"], thinking=str, signature=str),
    shape("ToolUseBlockTold", type=Literal["tool_use"], id=str, name=str, input=dict[str, Any]),
)
_Block: Any = _BLOCKS[0] | _BLOCKS[1] | _BLOCKS[2]
_MESSAGE_USAGE = shape(
    "MessageUsage",
    **dict.fromkeys(("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"), Count),
)
_STOP: Shown = {
    "stop_reason": Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None,
    "stop_sequence": str | None,
}
MESSAGE = shape(
    "MessageTold",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    model=str,
    content=conlist(_Block),
    usage=_MESSAGE_USAGE,
    metrics=maybe(METRICS, "At the end."),
    **_STOP,
)
INPUT_TOKENS = shape("InputTokens", input_tokens=Count)
_Delta: Any = (
    shape("TextDelta", type=Literal["text_delta"], text=str)
    | shape("ThinkingDelta", type=Literal["thinking_delta"], thinking=str)
    | shape("InputJsonDelta", type=Literal["input_json_delta"], partial_json=str)
)
MESSAGE_EVENTS = (
    shape("MessageStart", type=Literal["message_start"], message=MESSAGE),
    shape("PingEvent", type=Literal["ping"]),
    shape("BlockStart", type=Literal["content_block_start"], index=Count, content_block=_Block),
    shape("BlockDelta", type=Literal["content_block_delta"], index=Count, delta=_Delta),
    shape("BlockStop", type=Literal["content_block_stop"], index=Count),
    shape("MessageDelta", type=Literal["message_delta"], delta=shape("StopTold", **_STOP), usage=_MESSAGE_USAGE),
    shape("MessageStop", type=Literal["message_stop"]),
)

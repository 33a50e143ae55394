"""The request body of /v1/responses: which fields there are.

It knows JSON values only: no models, no tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SkipValidation

from paceline.gateway.api.openai.bodies import (
    MAX_EFFORT_CHARACTERS,
    TEMPLATE_LIMITS,
    SharedBody,
    SpeculationBody,
    Stop,
    Stops,
)
from paceline.gateway.api.openai.tools import MAX_NAME_CHARACTERS
from paceline.gateway.http.fields import Fields, TextPart
from paceline.gateway.message.tools import MAX_TOOLS

# Responses whose items one request may refer to.
MAX_REFERRED = 100
# OpenAI's bounds, as in its documentation.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class InputMessage(Fields):
    """A message."""

    no_effect = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: SkipValidation[str | list[TextPart] | None] = None


class FunctionCall(Fields):
    """A call of an earlier answer."""

    no_effect = frozenset({"id", "status"})

    type: Literal["function_call"]
    call_id: str = ""
    name: str
    namespace: str | None = None
    arguments: SkipValidation[str | dict[str, Any]] = ""


class FunctionCallOutput(Fields):
    """A tool's answer."""

    no_effect = frozenset({"id", "status"})

    type: Literal["function_call_output"]
    call_id: str = ""
    output: SkipValidation[str | list[TextPart]] = ""


class ReasoningItem(Fields):
    """Reasoning of an earlier answer."""

    no_effect = frozenset({"id", "status", "summary", "encrypted_content"})

    type: Literal["reasoning"]
    content: list[SkipValidation[TextPart]] = []  # noqa: RUF012 - pydantic copies it


class ResponsesTool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ChosenFunction(Fields):
    """The choice of one tool."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Fields):
    """The choice of some tools; the model sees no others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[SkipValidation[ChosenFunction]]


class ReasoningOptions(Fields):
    """How much the model reasons."""

    no_effect = frozenset({"summary", "generate_summary"})

    effort: str | None = Field(default=None, json_schema_extra={"maxLength": MAX_EFFORT_CHARACTERS})


class TextOptions(Fields):
    """Text format options."""

    no_effect = frozenset({"verbosity"})

    format: dict[str, Any] | None = Field(
        default=None,
        json_schema_extra={
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            "required": ["type"],
        },
    )


class ResponsesBody(SharedBody):
    """Body of /v1/responses."""

    no_effect = frozenset(
        {
            *("client_metadata", "include", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
            *("service_tier", "stream_options", "user"),
        }
    )
    not_served = {  # noqa: RUF012
        "background": (False,),
        "context_management": (),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled", "auto"),
    }
    objects = {  # noqa: RUF012 - a class variable
        "reasoning": ReasoningOptions,
        "speculation": SpeculationBody,
        "text": TextOptions,
    }

    input: SkipValidation[str | list[InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem]]
    instructions: str | None = None
    tools: list[SkipValidation[ResponsesTool]] = Field(default=[], json_schema_extra={"maxItems": MAX_TOOLS})
    tool_choice: SkipValidation[Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions | None] = None
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    stop: SkipValidation[Stop | Stops | None] = None
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    store: bool = True
    previous_response_id: str | None = None
    metadata: Metadata = {}  # noqa: RUF012 - pydantic copies it
    chat_template_kwargs: dict[str, Any] = Field(default={}, json_schema_extra=dict(TEMPLATE_LIMITS))

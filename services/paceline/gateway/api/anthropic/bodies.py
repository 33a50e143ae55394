"""The request bodies of Anthropic's API: which fields there are.

It knows JSON values only: no models, no tokens.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SkipValidation

from paceline.gateway.api.openai.bodies import (
    MAX_EFFORT_CHARACTERS,
    TEMPLATE_LIMITS,
    SharedBody,
    SpeculationBody,
    Stops,
)
from paceline.gateway.api.openai.tools import MAX_NAME_CHARACTERS
from paceline.gateway.http.fields import Fields, TextPart
from paceline.gateway.message.tools import MAX_TOOLS

# Asks the server to keep the conversation, and for all messages but the newest then.
THREAD = "thread"


class ThinkingBlock(Fields):
    """Reasoning of an earlier answer."""

    no_effect = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Fields):
    """Reasoning that only its author can read: passed over."""

    no_effect = frozenset({"data"})

    type: Literal["redacted_thinking"]


class ToolUseBlock(Fields):
    """A call of an earlier answer."""

    no_effect = frozenset({"cache_control", "caller"})

    type: Literal["tool_use"]
    id: str = ""
    name: str
    input: SkipValidation[dict[str, Any]] = {}  # noqa: RUF012 - pydantic copies it


class ToolResultBlock(Fields):
    """A tool's answer."""

    no_effect = frozenset({"cache_control", "is_error"})

    type: Literal["tool_result"]
    tool_use_id: str = ""
    content: SkipValidation[str | list[TextPart]] = ""


class MessageTurn(Fields):
    """A message; `content` is text or a list of blocks, each read by itself."""

    role: Literal["user", "assistant", "system"]
    content: SkipValidation[
        str | list[TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock] | None
    ] = None


class MessagesTool(Fields):
    """A function that the model may call."""

    no_effect = frozenset({"cache_control", "eager_input_streaming", "defer_loading", "allowed_callers"})

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False


class MessagesToolChoice(Fields):
    """Whether a tool is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Fields):
    """Whether the model reasons first."""

    no_effect = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]


class OutputConfig(Fields):
    """Output options of an answer."""

    no_effect = frozenset({"task_budget"})

    effort: str | None = Field(default=None, max_length=MAX_EFFORT_CHARACTERS)
    format: dict[str, Any] | None = Field(
        default=None,
        json_schema_extra={
            "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
            "required": ["type", "schema"],
        },
    )


class CountBody(Fields):
    """Body of /v1/messages/count_tokens."""

    no_effect = frozenset({"cache_control", "context_management", "metadata", "service_tier", "speed"})
    not_served = {"container": (), "output_format": (), THREAD: ()}  # noqa: RUF012
    objects = {  # noqa: RUF012 - a class variable
        "output_config": OutputConfig,
        "tool_choice": MessagesToolChoice,
        "thinking": Thinking,
    }

    model: str = ""
    messages: list[SkipValidation[MessageTurn]] = Field(json_schema_extra={"minItems": 1})
    system: SkipValidation[str | list[TextPart]] = ""
    tools: list[SkipValidation[MessagesTool]] = Field(default=[], json_schema_extra={"maxItems": MAX_TOOLS})
    mcp_servers: list[Any] = []  # noqa: RUF012 - pydantic copies it
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()


class MessagesBody(SharedBody, CountBody):
    """Body of /v1/messages."""

    objects = {**CountBody.objects, "speculation": SpeculationBody}  # noqa: RUF012 - a class variable

    max_tokens: int = Field(json_schema_extra={"minimum": 1})
    stop_sequences: Stops = []  # noqa: RUF012 - pydantic copies it
    chat_template_kwargs: dict[str, Any] = Field(default={}, json_schema_extra=dict(TEMPLATE_LIMITS))

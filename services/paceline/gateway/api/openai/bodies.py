"""The request bodies of the OpenAI API, and of vLLM's tokenizer: which fields there are.

It knows JSON values only: no models, no tokens. `paceline.gateway.api.openai.choices` makes sessions of them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import BeforeValidator, Field, SkipValidation, create_model

from paceline.core.errors import InvalidRequestError
from paceline.core.params import (
    ACCEPTANCE_RULES,
    MAX_BAD_WORDS,
    MAX_DRAFT_TOKENS,
    MAX_SEED,
    MAX_TOP_LOGPROBS,
    METHODS,
    SAMPLING,
    SESSION,
    Parameter,
    SamplingParams,
    SessionParams,
)
from paceline.gateway.api.openai.tools import AllowedChoice, CalledFunction, NamedTool, Tool, ToolCall
from paceline.gateway.http.fields import Fields, TextPart, UnknownFields, read_fields
from paceline.gateway.message.tools import MAX_TOOLS
from paceline.gateway.sessions.request import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_CHOICES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_TEMPLATE_CHARACTERS,
)

BodyT = TypeVar("BodyT", bound="CommonBody")

# Fields that change nothing about the tokens; clients send them for bookkeeping.
NO_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Fields that would change the answer in ways not served here; with these values they ask for nothing.
NOT_SERVED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "documents": (),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": (),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "regex": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Replacements for them.
INSTEAD: Mapping[str, str] = {
    "functions": "tools",
    "json_schema": "response_format",
    **{name: f"structured_outputs.{name}" for name in ("grammar", "regex")},
    **{f"guided_{name}": f"structured_outputs.{name}" for name in ("choice", "grammar", "json", "regex")},
}
# Fields of chats among them.
OF_CHATS = frozenset({"parallel_tool_calls", "reasoning_effort", "tool_choice", "tools"})
MAX_EFFORT_CHARACTERS = 32
# More than these are refused before they are looked at one by one.
_LIMITS = {name: row.most for name, row in SAMPLING.items() if row.most and row.default == ()} | {
    "bad_words": MAX_BAD_WORDS
}
# Variables of a chat template that only the server sets.
TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_Text = Annotated[str, Field(min_length=1)]
_TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
_TokenIds = Annotated[list[_TokenId], Field(min_length=1)]
_SOME = Field(min_length=1, max_length=MAX_CHOICES)
_Prompt = _Text | _TokenIds | Annotated[list[_Text], _SOME] | Annotated[list[_TokenIds], _SOME]
_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)]
# Limits of the variables of a chat template that a request brings.
TEMPLATE_LIMITS: Mapping[str, Any] = {"propertyNames": {"not": {"enum": sorted(TEMPLATE_NAMES)}}}


_METHOD = "|".join(METHODS)


def _described(default: Any = ..., **limits: Any) -> Any:
    """Returns a field whose limits are described here and checked, for both doors, where sessions are made."""
    return Field(default, json_schema_extra=limits)


def _limits(row: Parameter) -> dict[str, Any]:
    size = "maxLength" if isinstance(row.default, str) else "maxItems"
    low = {"minimum": row.low} if row.above is None else {"exclusiveMinimum": row.above}
    limits = {**low, "maximum": row.high, size: row.most}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _numbers(kind: type, rows: Mapping[str, Parameter], but: Container[str]) -> dict[str, Any]:
    """Returns a field for each number, switch or text of a table, but for those that bodies have in another form."""
    types = get_type_hints(kind)
    return {
        name: (
            types[name] | None if row.own else types[name],
            _described(None if row.own else row.default, **_limits(row)),
        )
        for name, row in rows.items()
        if types[name] in (int, float, bool, str) and row.default is not None and name not in but
    }


class StreamOptions(Fields):
    """Options of a stream besides text.

    Places are asked for, as widely used clients take every line of a stream for data.
    """

    include_usage: bool = False
    include_event_ids: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class PredictionBody(Fields):
    """Output expected by the client; it can only change how fast the output comes."""

    type: Literal["content"] = "content"
    content: SkipValidation[str | list[TextPart] | None] = None


class SpeculationBody(Fields):
    """Speculation options of a request; our own field."""

    ours = True

    enabled: bool = True
    max_draft_tokens: int | None = _described(None, minimum=0, maximum=MAX_DRAFT_TOKENS)
    acceptance: str = _described("", enum=["", *ACCEPTANCE_RULES])
    method: str = _described(
        "", pattern=rf"^(({_METHOD})(\+({_METHOD})){{0,{len(METHODS) - 1}}})?$", examples=[*METHODS]
    )
    token_origins: bool = False


if TYPE_CHECKING:
    SharedNumbers = Fields
else:
    SharedNumbers = create_model("SharedNumbers", __base__=Fields, **_numbers(SessionParams, SESSION, but=("tenant",)))


class SharedBody(SharedNumbers):
    """Fields that bodies of all APIs have."""

    model: str = ""
    # Where these are absent, the model's own apply: see `paceline.gateway.fleet.generation_config`.
    temperature: float | None = _described(None, **_limits(SAMPLING["temperature"]))
    top_p: float | None = _described(None, **_limits(SAMPLING["top_p"]))
    top_k: int | None = _described(None, **_limits(SAMPLING["top_k"]) | {"minimum": -1, "maximum": 2**32 - 1})
    seed: int | None = _described(None, minimum=-(2**63), maximum=MAX_SEED)
    stream: bool = False
    speculation: SpeculationBody = SpeculationBody()


if TYPE_CHECKING:
    CommonNumbers = SharedBody
else:
    CommonNumbers = create_model(
        "CommonNumbers",
        __base__=SharedBody,
        **_numbers(SamplingParams, SAMPLING, but=(*SharedBody.model_fields, "grammar")),
    )


class CommonBody(CommonNumbers):
    """Fields of both completion endpoints."""

    no_effect = NO_EFFECT
    not_served = NOT_SERVED
    instead = INSTEAD
    objects = {  # noqa: RUF012 - a class variable
        "stream_options": StreamOptions,
        "speculation": SpeculationBody,
        "prediction": PredictionBody,
    }

    n: int = Field(default=1, ge=1, json_schema_extra={"maximum": MAX_CHOICES})
    max_tokens: int | None = _described(None, minimum=1)
    logit_bias: dict[str, float] = _described(
        {},
        maxProperties=SAMPLING["logit_bias"].most,
        propertyNames={"pattern": "^[0-9]{1,20}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
    )
    stop: SkipValidation[Stop | Stops | None] = None
    stop_token_ids: list[_TokenId] = _described([], maxItems=SAMPLING["stop_token_ids"].most)
    allowed_token_ids: _TokenIds | None = _described(None, maxItems=SAMPLING["allowed_token_ids"].most)
    bad_words: list[_BadWord] = _described([], maxItems=MAX_BAD_WORDS)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    response_format: dict[str, Any] | None = _described(
        None, properties={"type": {"enum": ["text", "json_object", "json_schema"]}}, required=["type"]
    )
    structured_outputs: dict[str, Any] | None = None
    prediction: PredictionBody | None = None
    truncate_prompt_tokens: int | None = _described(
        None, anyOf=[{"const": -1}, {"type": "integer", "minimum": 1}, {"type": "null"}]
    )
    prompt_logprobs: int | None = _described(None, minimum=0, maximum=MAX_TOP_LOGPROBS)
    return_token_ids: bool = False
    stream_options: StreamOptions | None = None


def _count(value: Any) -> Any:
    """Returns how many alternatives a boolean stands for, as clients of chats give one."""
    return (1 if value else None) if isinstance(value, bool) else value


class CompletionBody(CommonBody):
    """Body of /v1/completions."""

    prompt: SkipValidation[_Prompt]
    max_tokens: int | None = _described(None, minimum=0)
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: Annotated[int | None, BeforeValidator(_count)] = _described(None, minimum=0, maximum=MAX_TOP_LOGPROBS)


class ChatMessage(Fields):
    """A message of a chat; `content` is text or a list of text parts, each read by itself."""

    no_effect = frozenset({"annotations"})
    not_served = {"audio": ()}  # noqa: RUF012
    objects = {"function_call": CalledFunction}  # noqa: RUF012 - a class variable

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: SkipValidation[str | list[TextPart] | None] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    tool_calls: list[SkipValidation[ToolCall]] = []  # noqa: RUF012 - pydantic copies it
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None


class ChatFields(Fields):
    """Fields that become the prompt of a chat; each of `messages` is read by itself."""

    messages: list[SkipValidation[ChatMessage]] = _described(minItems=1)
    tools: list[SkipValidation[Tool]] = _described([], maxItems=MAX_TOOLS)
    # Absent: yes, unless the last message is to be continued.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = _described(None, maxLength=MAX_TEMPLATE_CHARACTERS)
    chat_template_kwargs: dict[str, Any] = _described({}, **TEMPLATE_LIMITS)


class ChatBody(CommonBody, ChatFields):
    """Body of /v1/chat/completions."""

    not_served: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **{name: values for name, values in NOT_SERVED.items() if name not in OF_CHATS},
        "add_special_tokens": (False,),
        "echo": (False,),
    }

    tool_choice: SkipValidation[Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None] = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = _described(None, maxLength=MAX_EFFORT_CHARACTERS)
    max_completion_tokens: int | None = _described(None, minimum=1)
    logprobs: bool = False
    top_logprobs: int | None = _described(None, minimum=0, maximum=MAX_TOP_LOGPROBS)


class TokenizeTextBody(Fields):
    """Body of /tokenize with a prompt."""

    model: str = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatFields):
    """Body of /tokenize with messages."""

    not_served = {"add_special_tokens": (False,)}  # noqa: RUF012

    model: str = ""
    return_token_strs: bool = False


class DetokenizeBody(Fields):
    """Body of /detokenize."""

    model: str = ""
    tokens: SkipValidation[list[_TokenId]]


def parse_body(body_class: type[BodyT], fields: Mapping[str, Any], unknown: UnknownFields) -> BodyT:
    """Returns the request.

    Raises:
        InvalidRequestError: Names the first field that is missing, not served or of the wrong type.
    """
    for name, limit in _LIMITS.items():
        value = fields.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise InvalidRequestError(name, f"has {len(value)} entries, at most {limit} are allowed")
    body = read_fields(body_class, fields, unknown)
    if body.stream_options not in (None, StreamOptions()) and not body.stream:
        raise InvalidRequestError("stream_options", "is only allowed with stream: true")
    if body.prompt_logprobs and body.stream:
        raise InvalidRequestError("prompt_logprobs", "is not available with stream: true")
    return body

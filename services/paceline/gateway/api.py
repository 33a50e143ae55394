"""The request bodies of the OpenAI API: which fields there are, and what is wrong with a body.

It knows JSON values only: no models, no tokens. `paceline.gateway.choices` makes sessions of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from reprlib import Repr
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from paceline.core.errors import InvalidRequestError, shortened
from paceline.core.params import (
    ACCEPTANCE_RULES,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_DRAFT_TOKENS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_METHOD_CHARS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    METHODS,
)
from paceline.gateway.requests import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_CHOICES,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
)

BodyT = TypeVar("BodyT", bound="CommonBody")
ModelT = TypeVar("ModelT", bound=BaseModel)

# Fields that change nothing about the tokens; clients send them for book-keeping.
IGNORED_FIELDS = frozenset(
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
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# More than these are refused before they are looked at one by one.
_LIMITS = {
    "logit_bias": MAX_LOGIT_BIAS_ENTRIES,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "speculation": 64,
    "stream_options": 64,
}
SHOWN_CHARACTERS = 80
# Writes a value of a million entries no further than it is shown.
_SHORT = Repr()
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = SHOWN_CHARACTERS
MISSING = "missing"
EXTRA = "extra_forbidden"
# Variables of a chat template that the server sets.
TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_METHOD = f"({'|'.join(METHODS)})"
_Text = Annotated[str, Field(min_length=1)]
_TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
_TokenIds = Annotated[list[_TokenId], Field(min_length=1)]
_SOME = Field(min_length=1, max_length=MAX_CHOICES)
_Prompt = _Text | _TokenIds | Annotated[list[_Text], _SOME] | Annotated[list[_TokenIds], _SOME]
_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Stops = Annotated[list[_Stop], Field(max_length=MAX_STOP_STRINGS)]


def _told(default: Any = ..., **limits: Any) -> Any:
    """Returns a field whose limits are described here and checked, for both doors, where sessions are made."""
    return Field(default, json_schema_extra=limits)


def _describe(schema: dict[str, Any]) -> None:
    """Adds to the schema of a body what `parse_body` lets pass: null for what is absent, and fields not served."""
    fields = schema["properties"]
    null = {"type": "null"}
    for name, field in fields.items():
        if name not in schema["required"] and null not in field.get("anyOf", ()):
            fields[name] = {"anyOf": [field, null]}
    fields |= {name: {"description": "Changes nothing."} for name in sorted(IGNORED_FIELDS)}
    for name, values in NEUTRAL_VALUES.items():
        fields[name] = {"enum": [*values, None], "description": "Only with values that ask for nothing."}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """What a stream carries besides text.

    Places are asked for, as widely used clients take every line of a stream for data.
    """

    include_usage: bool = False
    include_event_ids: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SpeculationBody(_Strict):
    """What the request asks of speculation; our own field."""

    enabled: bool = True
    max_draft_tokens: int | None = _told(None, minimum=0, maximum=MAX_DRAFT_TOKENS)
    acceptance: str = _told("", enum=["", *ACCEPTANCE_RULES])
    method: str = _told("", maxLength=MAX_METHOD_CHARS, pattern=rf"^({_METHOD}(\+{_METHOD})*)?$")
    token_fates: bool = False


class CommonBody(_Strict):
    """Fields of both completion endpoints."""

    model_config = ConfigDict(json_schema_extra=_describe)

    model: str = ""
    n: int = Field(default=1, ge=1, json_schema_extra={"maximum": MAX_CHOICES})
    max_tokens: int | None = _told(None, minimum=1)
    # Where these are absent, the model's own hold: see `paceline.gateway.generation_config`.
    temperature: float | None = _told(None, minimum=0, maximum=100)
    top_p: float | None = _told(None, exclusiveMinimum=0, maximum=1)
    top_k: int | None = _told(None, minimum=-1, maximum=2**32 - 1)
    min_p: float | None = _told(None, minimum=0, maximum=1)
    repetition_penalty: float | None = _told(None, minimum=0.01, maximum=100)
    presence_penalty: float = _told(0.0, minimum=-2, maximum=2)
    frequency_penalty: float = _told(0.0, minimum=-2, maximum=2)
    logit_bias: dict[str, float] = _told(
        {},
        maxProperties=MAX_LOGIT_BIAS_ENTRIES,
        propertyNames={"pattern": "^[0-9]{1,20}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
    )
    min_tokens: int = _told(0, minimum=0)
    stop: SkipValidation[_Stop | _Stops | None] = None
    stop_token_ids: list[_TokenId] = _told([], maxItems=MAX_STOP_TOKEN_IDS)
    allowed_token_ids: _TokenIds | None = _told(None, maxItems=MAX_ALLOWED_TOKEN_IDS)
    bad_words: list[_BadWord] = _told([], maxItems=MAX_BAD_WORDS)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    truncate_prompt_tokens: int | None = _told(
        None, anyOf=[{"const": -1}, {"type": "integer", "minimum": 1}, {"type": "null"}]
    )
    cache_salt: str = _told("", maxLength=MAX_SALT_CHARACTERS)
    seed: int | None = _told(None, minimum=-(2**63), maximum=MAX_SEED)
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: SpeculationBody = SpeculationBody()


class CompletionBody(CommonBody):
    """Body of /v1/completions."""

    prompt: SkipValidation[_Prompt]
    logprobs: int | None = _told(None, minimum=0, maximum=MAX_TOP_LOGPROBS)


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One message of a chat; `content` is text or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: SkipValidation[str | list[TextPart]]
    name: str | None = None


class ChatBody(CommonBody):
    """Body of /v1/chat/completions; each of `messages` is read by itself, with `chat_message`."""

    messages: list[SkipValidation[ChatMessage]] = _told(minItems=1)
    max_completion_tokens: int | None = _told(None, minimum=1)
    logprobs: bool = False
    top_logprobs: int | None = _told(None, minimum=0, maximum=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = _told({}, propertyNames={"not": {"enum": sorted(TEMPLATE_NAMES)}})


def parse_body(body_class: type[BodyT], fields: Mapping[str, Any]) -> BodyT:
    """Returns the request; a field that is null counts as absent.

    Raises:
        InvalidRequestError: Names the first field that is missing, unknown, not served or of the wrong type.
    """
    given: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or name in IGNORED_FIELDS:
            continue
        if name in body_class.model_fields:
            given[name] = value
        elif name not in NEUTRAL_VALUES:
            raise InvalidRequestError(_shown(name), "is not a field of this endpoint")
        elif not any(_same(value, neutral) for neutral in NEUTRAL_VALUES[name]):
            raise InvalidRequestError(name, f"is not supported by this server, got {_shown(value)}")
    for name, limit in _LIMITS.items():
        if isinstance(given.get(name), list | dict) and len(given[name]) > limit:
            raise InvalidRequestError(name, f"has {len(given[name])} entries, at most {limit} are allowed")
    body = _read(body_class, given, "")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options", "is only allowed with stream: true")
    return body


def chat_message(given: Any, index: int) -> ChatMessage:
    """Returns one of the `messages` of a chat.

    Raises:
        InvalidRequestError: Names the first field of it that is wrong.
    """
    return _read(ChatMessage, given, f"messages[{index}]")


def _read(kind: type[ModelT], given: Any, where: str) -> ModelT:
    """Returns an object of a kind. pydantic lists all that is wrong before it says anything: not so for strangers."""
    try:
        if isinstance(given, dict) and len(given) > len(kind.model_fields):
            given = dict(islice(given.items(), len(kind.model_fields) + 1))
        return kind.model_validate(given)
    except ValidationError as error:
        raise _first_problem(error, where) from None


def _same(value: object, neutral: object) -> bool:
    """Tells whether two JSON values are equal; to Python, true is 1 as well."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _first_problem(error: ValidationError, where: str) -> InvalidRequestError:
    problem = error.errors(include_url=False, include_context=False)[0]
    field = _path(problem["loc"], where)
    if problem["type"] == MISSING:
        return InvalidRequestError(field, "is required")
    if problem["type"] == EXTRA:
        return InvalidRequestError(field, "is not a field of this endpoint")
    message = problem["msg"].replace("Input should be", "must be")
    return InvalidRequestError(field, f"{message}, got {_shown(problem['input'])}")


def _path(location: tuple[int | str, ...], path: str) -> str:
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{_shown(part)}" if path else _shown(part)
    return path


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else _SHORT.repr(value)
    return shortened(text, SHOWN_CHARACTERS)

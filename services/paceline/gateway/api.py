"""The request bodies of the OpenAI API: which fields there are, and what is wrong with a body.

It knows JSON values only: no models, no tokens. `paceline.gateway.choices` makes sessions of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from reprlib import Repr
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.core.errors import InvalidRequestError, shortened
from paceline.core.params import MAX_LOGIT_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS

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
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# More than these are refused before they are looked at one by one.
_LIMITS = {
    "logit_bias": MAX_LOGIT_BIAS_ENTRIES,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "speculation": 64,
    "stream_options": 64,
}
SHOWN_CHARACTERS = 80
# Writes a value of a million entries no further than it is shown.
_SHORT = Repr()
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = SHOWN_CHARACTERS
MISSING = "missing"
EXTRA = "extra_forbidden"


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
    max_draft_tokens: int | None = None
    acceptance: str = ""
    method: str = ""
    token_fates: bool = False


class CommonBody(_Strict):
    """Fields of both completion endpoints."""

    model: str = ""
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    min_tokens: int = 0
    stop: Any = None
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    cache_salt: str = ""
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: SpeculationBody = SpeculationBody()


class CompletionBody(CommonBody):
    """Body of /v1/completions."""

    prompt: Any
    logprobs: int | None = None


class ChatMessage(_Strict):
    """One message of a chat; `content` is text or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any
    name: str | None = None


class ChatBody(CommonBody):
    """Body of /v1/chat/completions; each of `messages` is read by itself, with `chat_message`."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


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

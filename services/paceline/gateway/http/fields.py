"""Reads the JSON objects of requests: null is absent, unknown fields are ignored and named, fields not served refused.

Where a number or a boolean is due, a text that spells one in JSON counts as it. It knows no field by itself, but for
parts that are text, which all APIs have; each kind of object declares its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from reprlib import Repr
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.core.errors import InvalidRequestError, shortened
from paceline.gateway.http.body import number

FieldsT = TypeVar("FieldsT", bound="Fields")

SHOWN_CHARACTERS = 80
# Limits of the header that names ignored fields.
MAX_NAMED_FIELDS = 20
MAX_NAME_CHARACTERS = 64
_MISSING, _NO_OBJECT = "missing", "model_type"
# No number that is worth anything is spelled in more.
_LONGEST_NUMBER = 40
# Asks for nothing, whatever the field.
_NOTHING: tuple[object, ...] = ("", [])
# Writes no more of a value of a million entries than is shown.
_SHORT = Repr()
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = SHOWN_CHARACTERS


class UnknownFields:
    """Unknown parts of a request: fields, entries of lists, tools. Ignored, or refused.

    Args:
        strict: Whether they are refused.

    Attributes:
        ignored_tools: Kinds of the tools that are left out, by their kinds and their names.
    """

    def __init__(self, *, strict: bool) -> None:
        self.ignored_tools: dict[str, str] = {}
        self._strict = strict
        self._fields: list[str] = []
        self._tools: list[str] = []

    def add(self, path: str, name: str) -> None:
        """Notes a field.

        Args:
            path: Path of the object that holds it; empty: the body.
            name: As the client wrote it.

        Raises:
            InvalidRequestError: Unknown fields are refused.
        """
        if self._strict:
            raise InvalidRequestError(_joined(path, name), "is not a field of this endpoint")
        _note(_joined(path, name), self._fields)

    def leave_out(self, path: str, kind: Any) -> str:
        """Notes an entry of a list, which is left out as its kind is not served; returns the name of the kind.

        Args:
            path: Path of the entry.
            kind: Its `type`, a JSON value.

        Raises:
            InvalidRequestError: A part is unknown, and refused.
        """
        if self._strict:
            raise InvalidRequestError(f"{path}.type", f"is not served, got {_shown(kind)}")
        name = _shown(kind)
        _note(_joined(path, name), self._fields)
        return name

    def leave_out_tool(self, path: str, kind: str, name: Any) -> None:
        """Notes a tool that is left out, as the model may call functions only.

        Args:
            path: Path of the tool.
            kind: Its `type`.
            name: Its name; a JSON value.

        Raises:
            InvalidRequestError: A part is unknown, and refused.
        """
        if self._strict:
            raise InvalidRequestError(f"{path}.type", f"is not served, as it is no function, got {_shown(kind)}")
        self.ignored_tools |= dict.fromkeys((kind, name) if isinstance(name, str) else (kind,), kind)
        _note(kind, self._tools)

    @property
    def header(self) -> str:
        """Paths of fields and entries, as far as a header should name them; empty: there are none."""
        return _header(self._fields)

    @property
    def tools_header(self) -> str:
        return _header(self._tools)


def _note(name: str, names: list[str]) -> None:
    """Adds a name for a header; of those beyond the first ones, only the number is told."""
    names.append(_in_header(name) if len(names) < MAX_NAMED_FIELDS else "")


def _header(names: Sequence[str]) -> str:
    others = len(names) - MAX_NAMED_FIELDS
    return ", ".join([*names[:MAX_NAMED_FIELDS], *([f"{others} more"] if others > 0 else [])])


class Fields(BaseModel):
    """A JSON object of a request.

    Attributes:
        no_effect: Fields that change nothing about the answer; clients send them for bookkeeping.
        not_served: Fields that would change the answer in ways not served here, and the values that ask for nothing,
            beside an empty text and an empty list.
        instead: Replacements for some of these.
        objects: The kinds of fields that hold objects.
        ours: Whether no other server has the object, so that an unknown field is a mistake, and refused.
    """

    no_effect: ClassVar[frozenset[str]] = frozenset()
    not_served: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    instead: ClassVar[Mapping[str, str]] = {}
    objects: ClassVar[Mapping[str, type[Fields]]] = {}
    ours: ClassVar[bool] = False

    model_config = ConfigDict(strict=True, frozen=True, json_schema_extra=lambda schema, kind: _describe(schema, kind))


def read_fields(kind: type[FieldsT], given: Any, unknown: UnknownFields, where: str = "") -> FieldsT:
    """Returns an object of a kind.

    Args:
        given: The JSON value.
        unknown: Collects fields that the kind does not have.
        where: Path of the object; empty: it is the body.

    Raises:
        InvalidRequestError: Names the first field that is missing, not served or of the wrong type.
    """
    try:
        return kind.model_validate(_known(kind, given, unknown, where) if isinstance(given, dict) else given)
    except ValidationError as error:
        raise _first_problem(error, where) from None


# The kinds of parts that are text, in the words of all APIs and of vLLM, and the members that hold it.
_TEXTS = {
    **dict.fromkeys(("text", "input_text", "output_text", "reasoning_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}


class TextPart(Fields):
    """A part of a content that is text, under any of its names."""

    no_effect = frozenset({"annotations", "cache_control", "citations", "closed", "logprobs", "signature"})
    not_served = dict.fromkeys(
        ("image_url", "input_audio", "audio_url", "video_url", "file", "file_id", "file_data"), ()
    )

    type: Literal["text", "input_text", "output_text", "reasoning_text", "refusal", "thinking"]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


def read_part(given: Any, unknown: UnknownFields, where: str) -> str:
    """Returns the text of a part of a content; a text may stand for its part.

    Raises:
        InvalidRequestError: It is no part of text.
    """
    if isinstance(given, str):
        return given
    part = read_fields(TextPart, given, unknown, where)
    member = _TEXTS[part.type]
    text: str | None = getattr(part, member)
    if text is None:
        raise InvalidRequestError(f"{where}.{member}", "is required")
    return text


def is_text(part: Any) -> bool:
    """Tells whether a part of a content says that it is text."""
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _TEXTS


def read_text(given: Any, unknown: UnknownFields, where: str) -> str:
    """Returns the text of a content; parts are joined by line breaks, as vLLM does.

    Args:
        given: The JSON value, text or a list of parts.
        unknown: Collects fields that no part has.
        where: Path of the content.

    Raises:
        InvalidRequestError: It is neither, or as of `read_fields`.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise InvalidRequestError(where, "must be a string or a list of text parts")
    return "\n".join(read_part(each, unknown, f"{where}[{at}]") for at, each in enumerate(given))


def read_result(given: Any, unknown: UnknownFields, where: str) -> str:
    """Returns what a tool has answered, as text.

    Of parts that are no text, the text inside is taken; those without any are left out, and named in the text. Content
    that is neither text nor a list of parts is written as JSON.

    Args:
        given: The JSON value; None: nothing.
        unknown: Collects fields that no part has, and parts that are left out.
        where: Path of the answer.

    Raises:
        InvalidRequestError: A part of text is wrong.
    """
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        return json.dumps(given, ensure_ascii=False)
    return "\n".join(_result_part(each, unknown, f"{where}[{at}]") for at, each in enumerate(given))


def _result_part(part: Any, unknown: UnknownFields, where: str) -> str:
    if isinstance(part, str) or is_text(part):
        return read_part(part, unknown, where)
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return json.dumps(part, ensure_ascii=False)
    text = text_within(part)
    return f"[{unknown.leave_out(where, kind)}]" if text is None else text


def text_within(part: Any) -> str | None:
    """Returns the text of a part that is none itself, such as a document; None: it has no text."""
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        texts = [text for each in part if (text := text_within(each)) is not None]
        return "\n".join(texts) if texts else None
    if not isinstance(part, dict):
        return None
    if part.get("type") == "text" and "data" in part:
        return text_within(part["data"])
    return text_within(next((part[name] for name in ("text", "content", "source") if name in part), None))


def _known(kind: type[Fields], given: Mapping[str, Any], unknown: UnknownFields, where: str) -> dict[str, Any]:
    """Returns what pydantic gets to see: it would collect all errors of a hostile body before it reports the first."""
    known: dict[str, Any] = {}
    fields, objects = kind.model_fields, kind.objects
    for name, value in given.items():
        if value is None:
            continue
        if name in fields:
            inside = objects.get(name) if isinstance(value, dict) else None
            if inside is not None:
                known[name] = _known(inside, value, unknown, _joined(where, name))
            else:
                known[name] = _spelled(value) if name in _numeric(kind) else value
        elif name in kind.no_effect:
            continue
        elif kind.ours:
            raise InvalidRequestError(_joined(where, name), f"is no field of {where}; {_nearest(name, fields)}")
        elif name not in kind.not_served:
            unknown.add(where, name)
        elif not any(_same(_without_nulls(value), neutral) for neutral in (*kind.not_served[name], *_NOTHING)):
            use = f"; use {kind.instead[name]}" if name in kind.instead else ""
            raise InvalidRequestError(
                _joined(where, name), f"is not supported by this server{use}, got {_shown(value)}"
            )
    return known


def _nearest(name: str, fields: Iterable[str]) -> str:
    """Returns the field that was meant, as it seems, or all that there are."""
    near = get_close_matches(name[:MAX_NAME_CHARACTERS], fields, n=1)
    return f"{near[0]} is" if near else f"there are {', '.join(fields)}"


@cache
def _numeric(kind: type[Fields]) -> frozenset[str]:
    """Returns the fields that hold numbers or booleans alone, themselves or in lists and objects."""
    numbers = {int, float, bool, type(None)}
    return frozenset(name for name, field in kind.model_fields.items() if _leaves(field.annotation) <= numbers)


def _leaves(annotation: Any) -> set[Any]:
    """Returns the types of the values within a type; those of an object's keys are left out."""
    inner = get_args(annotation)
    if not inner or get_origin(annotation) is Literal:
        return {annotation}
    if get_origin(annotation) is Annotated:
        inner = inner[:1]
    return set().union(*map(_leaves, inner[1:] if get_origin(annotation) is dict else inner))


def _spelled(value: Any) -> Any:
    """Returns a JSON value whose texts are the numbers and booleans that they spell; others stay texts."""
    if isinstance(value, list):
        return [_spelled(each) for each in value]
    if isinstance(value, dict):
        return {name: _spelled(each) for name, each in value.items()}
    if not isinstance(value, str) or len(value) > _LONGEST_NUMBER:
        return value
    try:
        spelled = json.loads(value.lower(), parse_float=number)
    except ValueError:
        return value
    return spelled if isinstance(spelled, bool | int | float) else value


def _describe(schema: dict[str, Any], kind: type[Fields]) -> None:
    """Adds to a schema what `read_fields` lets pass: null for what is absent, and fields not served."""
    fields = schema["properties"]
    null = {"type": "null"}
    for name, field in fields.items():
        if name not in schema.get("required", ()) and null not in field.get("anyOf", ()):
            fields[name] = {"anyOf": [field, null]}
    if kind.ours:
        schema["additionalProperties"] = False
    fields |= {name: {"description": "Changes nothing."} for name in sorted(kind.no_effect)}
    for name, values in kind.not_served.items():
        fields[name] = {"enum": [*values, *_NOTHING, None], "description": "Only with values that ask for nothing."}


def _without_nulls(value: object) -> object:
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


def _same(value: object, neutral: object) -> bool:
    """Tells whether two JSON values are equal; to Python, true is 1 as well."""
    value = value if isinstance(neutral, str) else _spelled(value)
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _in_header(path: str) -> str:
    """Returns a path without what a header cannot hold, and without commas, which part the names."""
    plain = "".join(each if "!" <= each <= "~" and each != "," else "?" for each in path[:MAX_NAME_CHARACTERS])
    return plain or "?"


def _first_problem(error: ValidationError, where: str) -> InvalidRequestError:
    problem = error.errors(include_url=False, include_context=False)[0]
    field = _path(problem["loc"], where)
    if problem["type"] == _MISSING:
        return InvalidRequestError(field, "is required")
    # pydantic's words name a class of ours.
    message = "must be an object" if problem["type"] == _NO_OBJECT else problem["msg"]
    message = message.replace("Input should be", "must be")
    return InvalidRequestError(field, f"{message}, got {_shown(problem['input'])}")


def _path(location: tuple[int | str, ...], path: str) -> str:
    for part in location:
        path = f"{path}[{part}]" if isinstance(part, int) else _joined(path, part)
    return path


def _joined(path: str, name: str) -> str:
    return f"{path}.{_shown(name)}" if path else _shown(name)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else _SHORT.repr(value)
    return shortened(text, SHOWN_CHARACTERS)

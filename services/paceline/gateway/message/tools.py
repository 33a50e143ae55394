"""The tools of a chat: read from its body, told to its template, and what a grammar makes of them.

It knows JSON values only: no models, no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, SkipValidation

from paceline.core.errors import InvalidRequestError
from paceline.gateway.http.fields import Fields, UnknownFields, read_fields

MAX_TOOLS = 1024
MAX_NAME_CHARACTERS = 256
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}

Json = dict[str, Any]


class ToolFunction(Fields):
    """What a tool is called, and what it takes: a JSON schema."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(Fields):
    """A tool that the model may call."""

    objects = {"function": ToolFunction}  # noqa: RUF012 - a class variable

    type: Literal["function"] = "function"
    function: ToolFunction


class CalledFunction(Fields):
    """What was called, with arguments as JSON text."""

    name: str
    arguments: str = ""


class ToolCall(Fields):
    """A call in an earlier message."""

    no_effect = frozenset({"index"})
    objects = {"function": CalledFunction}  # noqa: RUF012 - a class variable

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedFunction(Fields):
    """A function by its name."""

    name: str


class NamedTool(Fields):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Fields):
    """Which of the tools the model may call, and whether it has to call one."""

    mode: Literal["auto", "required"]
    tools: list[SkipValidation[NamedTool]]


class AllowedChoice(Fields):
    """The choice of some tools; the model is told of no others."""

    objects = {"allowed_tools": AllowedTools}  # noqa: RUF012 - a class variable

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of one request.

    Attributes:
        tools: As the template gets them.
        parsed: Whether the answer may hold calls.
        enforced: Whether it has to.
        named: The tool that it has to call; empty: any.
        parallel: Whether it may hold several.
        strict: Whether each tool's calls have to be as its schema says, in the order of the tools.
        chosen: Whether the client offered more tools than these, which may not be called.
    """

    tools: tuple[Json, ...] = ()
    parsed: bool = False
    enforced: bool = False
    named: str = ""
    parallel: bool = True
    strict: tuple[bool, ...] = ()
    chosen: bool = False

    @classmethod
    def read(cls, tools: Sequence[Any], choice: Any, parallel: bool, unknown: UnknownFields) -> Toolbox:
        """Reads the fields of a body.

        Raises:
            InvalidRequestError: One is wrong, or a tool is to be called that is not there.
        """
        if len(tools) > MAX_TOOLS:
            raise InvalidRequestError("tools", f"has {len(tools)} entries, at most {MAX_TOOLS} are allowed")
        given = [read_fields(Tool, each, unknown, f"tools[{at}]") for at, each in enumerate(tools)]
        allowed = isinstance(choice, dict) and choice.get("type") == "allowed_tools"
        if allowed:
            given, choice = _allowed(given, choice, unknown)
        told = tuple(map(_told, given))
        choice = ("auto" if told else "none") if choice is None else choice
        enforced = choice not in ("none", "auto")
        if enforced and not told:
            raise InvalidRequestError("tool_choice", "needs tools")
        return cls(
            tools=told,
            parsed=bool(told) and choice != "none",
            enforced=enforced,
            named=_named(choice, told) if enforced else "",
            parallel=parallel,
            strict=tuple(each.function.strict for each in given),
            chosen=allowed,
        )

    @property
    def bound(self) -> bool:
        """Whether a call that the model may make has to be of a form."""
        return self.parsed and (self.chosen or any(self.strict))

    @property
    def names(self) -> list[str]:
        """What the tools are called."""
        return [each["function"]["name"] for each in self.tools]

    @property
    def parameters(self) -> list[tuple[Json, bool]]:
        """The JSON schema of each tool's arguments, and whether calls have to follow it."""
        return [(each["function"]["parameters"], strict) for each, strict in zip(self.tools, self.strict, strict=True)]

    @property
    def types(self) -> dict[str, dict[str, str]]:
        """Types of parameters, by tool and name."""
        return {each["function"]["name"]: _types(each["function"]["parameters"]) for each in self.tools}

    @property
    def schema(self) -> Json:
        """The JSON schema of enforced calls: of the named tool its arguments, else an array of calls."""
        functions = [each["function"] for each in self.tools]
        if self.named:
            return next(each["parameters"] for each in functions if each["name"] == self.named)
        calls = [_call_schema(each["name"], f"#/$defs/tool_{at}") for at, each in enumerate(functions)]
        return {
            "type": "array",
            "minItems": 1,
            **({} if self.parallel else {"maxItems": 1}),
            "items": {"anyOf": calls},
            "$defs": {f"tool_{at}": _moved(each["parameters"], at) for at, each in enumerate(functions)},
        }


def _told(tool: Tool) -> Json:
    function = tool.function
    described = {} if function.description is None else {"description": function.description}
    parameters = dict(NO_PARAMETERS) if function.parameters is None else function.parameters
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


def _allowed(tools: Sequence[Tool], choice: Any, unknown: UnknownFields) -> tuple[list[Tool], str]:
    """Returns the tools that a choice allows, and what it says of calling them."""
    allowed = read_fields(AllowedChoice, choice, unknown, "tool_choice").allowed_tools
    field = "tool_choice.allowed_tools.tools"
    names = [
        read_fields(NamedTool, each, unknown, f"{field}[{at}]").function.name for at, each in enumerate(allowed.tools)
    ]
    offered = {each.function.name for each in tools}
    for at, name in enumerate(names):
        if name not in offered:
            raise InvalidRequestError(f"{field}[{at}].function.name", f"{name[:80]!r} is none of the tools")
    return [each for each in tools if each.function.name in names], allowed.mode


def _named(choice: Any, tools: Sequence[Json]) -> str:
    """Returns the tool that a choice names; empty: any."""
    if choice == "required":
        return ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError("tool_choice", "must be none, auto, required, allowed_tools, or name a function")
    if all(each["function"]["name"] != name for each in tools):
        raise InvalidRequestError("tool_choice.function.name", f"{name[:80]!r} is none of the tools")
    return name


def _types(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns the types of parameters; one of several types is of none, and read as what it looks like."""
    properties = parameters.get("properties")
    if not isinstance(properties, dict):
        return {}
    kinds = {name: each.get("type", "any") if isinstance(each, dict) else "any" for name, each in properties.items()}
    return {name: kind if isinstance(kind, str) else "any" for name, kind in kinds.items()}


def _call_schema(name: str, parameters: str) -> Json:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": parameters}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(value: Any, at: int) -> Any:
    """Returns a schema whose references within itself hold where it stands now."""
    if isinstance(value, list):
        return [_moved(each, at) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(each, at) for key, each in value.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/tool_{at}{reference[1:]}"
    return moved

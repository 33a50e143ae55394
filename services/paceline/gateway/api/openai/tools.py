"""The tools of a chat, as clients name them in OpenAI's words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, SkipValidation

from paceline.core.errors import InvalidRequestError
from paceline.gateway.http.fields import Fields, UnknownFields, read_fields
from paceline.gateway.message.schemas import Json
from paceline.gateway.message.tools import MAX_TOOLS, Toolbox

FUNCTION = "function"
MAX_NAME_CHARACTERS = 256
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


class ToolFunction(Fields):
    """A tool's name, and the JSON schema of its arguments."""

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
    """The called function, with arguments as JSON text or as an object."""

    name: str
    # Models write others too, and clients send them back; those count as no arguments.
    arguments: SkipValidation[str | dict[str, Any]] = ""


class CalledCustom(Fields):
    """The called custom tool, with its text: a tool that is no function."""

    name: str
    input: str = ""


class ToolCall(Fields):
    """A call in an earlier message."""

    no_effect = frozenset({"index", "type"})
    objects = {"function": CalledFunction, "custom": CalledCustom}  # noqa: RUF012 - a class variable

    id: str = ""
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


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
    """The choice of some tools; the model sees no others."""

    objects = {"allowed_tools": AllowedTools}  # noqa: RUF012 - a class variable

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def read_toolbox(tools: Sequence[Any], choice: Any, parallel: bool, unknown: UnknownFields) -> Toolbox:
    """Returns the tools of a body, and whether they may or must be called.

    Args:
        tools: The field `tools`.
        choice: The field `tool_choice`.
        parallel: The field `parallel_tool_calls`.
        unknown: Collects unknown fields.

    Raises:
        InvalidRequestError: A field is wrong, or the tool to call is not among the tools.
    """
    given = [read_fields(Tool, each, unknown, field) for field, each in functions(placed(tools), unknown)]
    allowed = isinstance(choice, dict) and choice.get("type") == "allowed_tools"
    if allowed:
        given, choice = _allowed(given, choice, unknown)
    listed = tuple(map(_listed, given))
    choice = ("auto" if listed else "none") if choice is None else choice
    enforced = choice not in ("none", "auto")
    if enforced and not listed:
        raise InvalidRequestError("tool_choice", _needed(unknown))
    return Toolbox(
        tools=listed,
        parsed=bool(listed) and choice != "none",
        enforced=enforced,
        named=_named(choice, listed, unknown) if enforced else "",
        parallel=parallel,
        strict=tuple(each.function.strict for each in given),
        chosen=allowed,
    )


def functions(
    tools: Iterable[tuple[str, Any]], unknown: UnknownFields, kind: str = FUNCTION
) -> Iterator[tuple[str, Any]]:
    """Yields those of a request's tools that are functions; the model gets no others.

    Args:
        tools: The tools of a body of any API, each with its path.
        unknown: Collects the kinds of those that are left out.
        kind: The `type` of functions.

    Raises:
        InvalidRequestError: There are too many of all kinds, or what is unknown is refused.
    """
    for count, (field, tool) in enumerate(tools, 1):
        if count > MAX_TOOLS:
            # The third audit had 33,000 in a namespace, most of them no functions.
            raise InvalidRequestError("tools", f"has more than {MAX_TOOLS} entries, those of other kinds included")
        given = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(given, str) and given != kind:
            unknown.leave_out_tool(field, given, tool.get("name"))
        else:
            yield field, tool


def placed(tools: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the entries of the field `tools` with their paths."""
    return ((f"tools[{at}]", tool) for at, tool in enumerate(tools))


def _needed(unknown: UnknownFields) -> str:
    """Returns what is wrong with a choice that needs tools where there are none."""
    left_out = ", ".join(dict.fromkeys(unknown.ignored_tools.values()))
    return f"needs a function, and {left_out[:80]!r} is none" if left_out else "needs tools"


def _listed(tool: Tool) -> Json:
    """Returns a tool as chat templates get it."""
    function = tool.function
    described = {} if function.description is None else {"description": function.description}
    parameters = dict(NO_PARAMETERS) if function.parameters is None else function.parameters
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


def _allowed(tools: Sequence[Tool], choice: Any, unknown: UnknownFields) -> tuple[list[Tool], str]:
    """Returns the tools that a choice allows, and its mode."""
    allowed = read_fields(AllowedChoice, choice, unknown, "tool_choice").allowed_tools
    offered = {each.function.name for each in tools}
    names: set[str] = set()
    # Not checked when the choice was read.
    entries: Sequence[Any] = allowed.tools
    for at, each in enumerate(entries):
        field = f"tool_choice.allowed_tools.tools[{at}]"
        kind = each.get("type") if isinstance(each, dict) else None
        if isinstance(kind, str) and kind in unknown.ignored_tools:
            continue
        name = read_fields(NamedTool, each, unknown, field).function.name
        if name not in offered:
            raise InvalidRequestError(f"{field}.function.name", f"{name[:80]!r} is none of the tools")
        names.add(name)
    return [each for each in tools if each.function.name in names], allowed.mode


def _named(choice: Any, tools: Sequence[Json], unknown: UnknownFields) -> str:
    """Returns the tool that a choice names; empty: any."""
    if choice == "required":
        return ""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind != FUNCTION:
        raise InvalidRequestError("tool_choice.type", f"{kind[:80]!r} is no function, and only functions are served")
    function = choice.get("function") if kind == FUNCTION else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError("tool_choice", "must be none, auto, required, allowed_tools, or name a function")
    if all(each["function"]["name"] != name for each in tools):
        found = "no function, and only functions are served" if name in unknown.ignored_tools else "none of the tools"
        raise InvalidRequestError("tool_choice.function.name", f"{name[:80]!r} is {found}")
    return name

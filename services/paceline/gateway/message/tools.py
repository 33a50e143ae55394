"""The tools that a model may call in one answer, and the JSON schemas of their calls.

It knows JSON values only: no models, no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

MAX_TOOLS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of one request.

    Attributes:
        tools: The tools as chat templates get them.
        parsed: Whether the answer may hold calls.
        enforced: Whether it must.
        named: The tool that it must call; empty: any.
        parallel: Whether it may hold several calls.
        strict: For each tool, whether its calls must follow its schema.
        chosen: Whether the client offered more tools than these, which may not be called.
    """

    tools: tuple[Json, ...] = ()
    parsed: bool = False
    enforced: bool = False
    named: str = ""
    parallel: bool = True
    strict: tuple[bool, ...] = ()
    chosen: bool = False

    @property
    def bound(self) -> bool:
        """Whether a grammar must bind the calls that the model may make."""
        return self.parsed and (self.chosen or any(self.strict))

    @property
    def names(self) -> list[str]:
        """The names of the tools."""
        return [each["function"]["name"] for each in self.tools]

    @property
    def parameters(self) -> list[tuple[Json, bool]]:
        """The JSON schema of each tool's arguments, and whether calls must follow it."""
        return [(each["function"]["parameters"], strict) for each, strict in zip(self.tools, self.strict, strict=True)]

    @property
    def types(self) -> dict[str, dict[str, str]]:
        """Types of parameters, by tool and name."""
        return {each["function"]["name"]: _types(each["function"]["parameters"]) for each in self.tools}

    @property
    def schema(self) -> Json:
        """The JSON schema of enforced calls: the arguments of the named tool, or an array of calls."""
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


def _types(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns the types of parameters; a value whose schema allows several types is read as what it looks like."""
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
    """Returns a schema of a tool with its references adapted to its place among the definitions."""
    if isinstance(value, list):
        return [_moved(each, at) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(each, at) for key, each in value.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/tool_{at}{reference[1:]}"
    return moved

"""The tools that a model may call in one answer, and the JSON schemas of their calls.

It knows JSON values only: no models, no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


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

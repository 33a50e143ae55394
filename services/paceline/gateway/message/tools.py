"""The tools that a model may call in one answer, and the JSON schemas of their calls.

It knows JSON values only: no models, no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.gateway.message.schemas import TYPES, Definitions, Json, definitions, followed, types_of

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
        return [each["function"]["name"] for each in self.tools]

    @property
    def parameters(self) -> list[tuple[Json, bool]]:
        """The JSON schema of each tool's arguments, and whether calls must follow it."""
        return [(each["function"]["parameters"], strict) for each, strict in zip(self.tools, self.strict, strict=True)]

    def with_parameters(self, given: Sequence[Json]) -> Toolbox:
        """Returns the same with other schemas of the tools' arguments."""
        tools = (
            {**each, "function": {**each["function"], "parameters": schema}}
            for each, schema in zip(self.tools, given, strict=True)
        )
        return replace(self, tools=tuple(tools))

    def defined(self, at: int) -> Definitions:
        """Returns the schema of one tool's arguments as `tool_AT`, and what it refers to; see `definitions`.

        Raises:
            InvalidRequestError: It is nested too deeply.
        """
        return definitions(self.tools[at]["function"]["parameters"], f"tool_{at}", field="tools")

    @property
    def types(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Types that parameters may have, by tool and name; empty: any.

        Raises:
            InvalidRequestError: A schema is nested too deeply.
        """
        return {name: _types(self.defined(at), f"tool_{at}") for at, name in enumerate(self.names)}

    @property
    def schema(self) -> Json:
        """The JSON schema of enforced calls: the arguments of the named tool, or an array of calls.

        Raises:
            InvalidRequestError: A schema is nested too deeply.
        """
        names = self.names
        if self.named:
            named: Json = self.tools[names.index(self.named)]["function"]["parameters"]
            return named
        defined = [self.defined(at) for at in range(len(names))]
        return {
            "type": "array",
            "minItems": 1,
            **({} if self.parallel else {"maxItems": 1}),
            "items": {"anyOf": [_call_schema(name, f"#/$defs/tool_{at}") for at, name in enumerate(names)]},
            "$defs": {name: schema for each in defined for name, schema in each.items()},
        }


def _types(defined: Definitions, name: str) -> dict[str, tuple[str, ...]]:
    """Returns the types of the parameters of a tool."""
    properties = followed(defined[name], defined).get("properties")
    if not isinstance(properties, dict):
        return {}
    found = {key: types_of(each, defined) for key, each in properties.items()}
    return {key: () if types == TYPES else tuple(sorted(types)) for key, types in found.items()}


def _call_schema(name: str, parameters: str) -> Json:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": parameters}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }

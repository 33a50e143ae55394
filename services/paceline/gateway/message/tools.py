"""The tools that a model may call in one answer, and the JSON schemas of their arguments.

It knows JSON values only: no models, no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def _types(defined: Definitions, name: str) -> dict[str, tuple[str, ...]]:
    """Returns the types of the parameters of a tool."""
    properties = followed(defined[name], defined).get("properties")
    if not isinstance(properties, dict):
        return {}
    found = {key: types_of(each, defined) for key, each in properties.items()}
    return {key: () if types == TYPES else tuple(sorted(types)) for key, types in found.items()}

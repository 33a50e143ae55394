"""Functions that a request offers in namespaces, as Codex does with those of MCP servers.

The model knows them by joined names; the API's items hold the two names apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.gateway.api.openai.tools import FUNCTION

NAMESPACE = "namespace"
_SEPARATOR = "__"


def joined(namespace: str | None, name: str) -> str:
    """Returns the name of a function as the model knows it."""
    return f"{(namespace or '').removesuffix(_SEPARATOR)}{_SEPARATOR}{name}" if namespace else name


def flat(tools: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the tools of a request with their paths, and in place of a namespace the tools in it."""
    for at, tool in enumerate(tools):
        if not _is_namespace(tool):
            yield f"tools[{at}]", tool
            continue
        for inner_at, inner in enumerate(tool["tools"]):
            named = isinstance(inner, dict) and isinstance(inner.get("name"), str)
            within = {**inner, "name": joined(tool["name"], inner["name"])} if named else inner
            yield f"tools[{at}].tools[{inner_at}]", within


def names_within(tools: Sequence[Any]) -> Mapping[str, tuple[str, str]]:
    """Returns namespace and name of each function that is in one, by the names that the model may call it.

    Models leave namespaces out at times: the bare name stands for a function too, where no other tool has it.
    """
    inner = [
        (tool["name"], each["name"])
        for tool in filter(_is_namespace, tools)
        for each in filter(_is_function, tool["tools"])
    ]
    alone = (tool["name"] for tool in filter(_is_function, tools))
    bare = Counter([*alone, *(name for _, name in inner)])
    return {pair[1]: pair for pair in inner if bare[pair[1]] == 1} | {joined(*pair): pair for pair in inner}


def _is_function(tool: Any) -> bool:
    """Tells whether a tool is one that the model gets; its type may be left out, as nothing else could be meant."""
    return isinstance(tool, dict) and tool.get("type", FUNCTION) == FUNCTION and isinstance(tool.get("name"), str)


def _is_namespace(tool: Any) -> bool:
    return (
        isinstance(tool, dict)
        and tool.get("type") == NAMESPACE
        and isinstance(tool.get("name"), str)
        and isinstance(tool.get("tools"), list)
    )

"""Functions in namespaces: the model's names for them, and theirs."""

from __future__ import annotations

from typing import Any

from paceline.gateway.api.responses.requests import flat, joined, names_within


def space(name: str, *functions: str) -> Any:
    return {"type": "namespace", "name": name, "tools": [{"type": "function", "name": each} for each in functions]}


def test_names_are_joined_once() -> None:
    """codex-relay #6: namespaces of MCP servers end with the separator at times."""
    assert joined("mcp__hub__", "f") == joined("mcp__hub", "f") == "mcp__hub__f"
    assert joined(None, "f") == joined("", "f") == "f"


def test_a_bare_name_stands_for_the_one_function_that_has_it() -> None:
    """CLIProxyAPI #4106: models leave namespaces out."""
    tools = [space("a", "f", "g"), space("b", "g", "h"), {"type": "function", "name": "h"}]
    names = names_within(tools)
    assert names["f"] == names["a__f"] == ("a", "f")
    assert names["b__h"] == ("b", "h")
    assert names.keys().isdisjoint({"g", "h"})


def test_tools_within_have_paths_of_their_own_and_odd_ones_stay() -> None:
    odd: list[Any] = [5, {"type": "namespace"}, {"type": "namespace", "name": "a", "tools": [7]}]
    assert list(flat(odd)) == [("tools[0]", 5), ("tools[1]", odd[1]), ("tools[2].tools[0]", 7)]
    assert names_within(odd) == {}


def test_what_is_no_function_takes_no_name_from_one() -> None:
    """The third audit: tools that the model never gets were counted, and with the square of their number."""
    tools = [space("a", "f"), {"type": "namespace", "name": "b", "tools": [{"type": "custom", "name": "f"}]}]
    assert names_within([*tools, {"type": "custom", "name": "f"}]) == {"f": ("a", "f"), "a__f": ("a", "f")}

"""What several clients are asked: tools as JSON, and how their calls are to end."""

from __future__ import annotations

from typing import Any

PARAMETERS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in PARAMETERS.items()]
QUESTION = "How warm will it be in Paris tomorrow, when it gets one degree warmer?"
ANSWER = "Tomorrow it will be 21 degrees in Paris."
CALLS = ["get_weather('Paris')", "add(20, 1)"]

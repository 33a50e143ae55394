"""Loops of smolagents: every answer is a call that must be made, or code: text that a stop string ends, or JSON."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import conversation as said
from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool

from loops.run import INSTRUCTIONS, Run


def answered(agent_of: Callable[..., Any], run: Run) -> str:
    """Returns an agent's final answer."""

    @tool
    def get_weather(city: str) -> str:
        """The degrees in a city.

        Args:
            city: Its name.
        """
        return str(run.tools.get_weather(city))

    @tool
    def add(a: int, b: int) -> int:
        """The sum of two numbers.

        Args:
            a: One.
            b: The other.
        """
        return int(run.tools.add(a, b))

    model = OpenAIModel(
        run.served.model,
        api_base=run.served.v1,
        api_key="none",
        client_kwargs={"max_retries": 0, "timeout": 60},
        max_tokens=run.max_tokens,
        extra_body=run.more,
    )
    agent = agent_of(
        [get_weather, add],
        model,
        instructions=INSTRUCTIONS,
        stream_outputs=run.streamed,
        max_steps=6,
        verbosity_level=LogLevel.OFF,
    )
    return str(agent.run(run.question))


# By what they are asked.
SMOL_AGENTS = {
    said.CALLS_ONLY: partial(answered, ToolCallingAgent),
    said.CODE: partial(answered, CodeAgent),
    said.CODE_OBJECT: partial(answered, partial(CodeAgent, use_structured_outputs_internally=True)),
}

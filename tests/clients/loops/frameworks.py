"""Loops of the libraries that people write agents with, each through a door that it knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import agents as openai_agents
import anthropic
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import messages_from_dict, messages_to_dict
from langchain_core.tools import StructuredTool, ToolException
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelMessagesTypeAdapter, ModelRetry, NativeOutput, Tool
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from loops.run import INSTRUCTIONS, Run, Turn

openai_agents.set_tracing_disabled(True)
PATIENCE: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}


def openai_agents_sdk(door: Callable[..., Any], run: Run) -> Turn:
    """OpenAI's Agents SDK, whose conversation is a list of items."""

    async def answered() -> Turn:
        async with AsyncOpenAI(base_url=run.served.v1, **PATIENCE) as client:
            agent = openai_agents.Agent(
                name="agent",
                instructions=INSTRUCTIONS,
                tools=[openai_agents.function_tool(each) for each in (run.tools.get_weather, run.tools.add)],
                model=door(model=run.served.model, openai_client=client),
                model_settings=openai_agents.ModelSettings(max_tokens=run.max_tokens, extra_body=run.more),
                output_type=run.answer_type,
            )
            items = [*json.loads(run.history or "[]"), {"role": "user", "content": run.question}]
            if run.streamed:
                result: Any = openai_agents.Runner.run_streamed(agent, items)
                async for _ in result.stream_events():
                    pass
            else:
                result = await openai_agents.Runner.run(agent, items)
        answer = result.final_output
        text = answer if isinstance(answer, str) else answer.model_dump_json()
        return Turn(answer=text, history=json.dumps(result.to_input_list()))

    return asyncio.run(answered())


def anthropic_tool_runner(run: Run) -> Turn:
    """The tool runner of Anthropic's SDK."""
    messages: list[Any] = [*json.loads(run.history or "[]"), {"role": "user", "content": run.question}]
    with anthropic.Anthropic(base_url=run.served.url, **PATIENCE) as client:
        runner: Any = client.beta.messages.tool_runner(
            model=run.served.model,
            max_tokens=run.max_tokens,
            system=INSTRUCTIONS,
            messages=messages,
            tools=[anthropic.beta_tool(each, strict=True) for each in (run.tools.get_weather, run.tools.add)],
            stream=run.streamed,
            output_format=run.answer_type or anthropic.omit,
            extra_body=run.more,
        )
        for each in runner:
            message = each.get_final_message() if run.streamed else each
            content = [block.model_dump(mode="json", exclude_none=True) for block in message.content]
            results = runner.generate_tool_call_response()
            messages += [{"role": "assistant", "content": content}, *([results] if results else [])]
    return Turn(answer=message.content[-1].text, history=json.dumps(messages))


def langgraph_agent(run: Run) -> Turn:
    """The ready-made agent on LangGraph; it replays its messages."""

    def tool_of(function: Callable[..., Any]) -> StructuredTool:
        def call(**arguments: Any) -> Any:
            try:
                return function(**arguments)
            except ValueError as error:
                raise ToolException(str(error)) from error

        made = StructuredTool.from_function(function)
        return made.model_copy(update={"func": call, "handle_tool_error": True})

    model = ChatOpenAI(
        base_url=run.served.v1,
        model=run.served.model,
        max_tokens=run.max_tokens,
        extra_body=run.more,
        **PATIENCE,
    )
    agent = create_agent(
        model,
        [tool_of(run.tools.get_weather), tool_of(run.tools.add)],
        system_prompt=INSTRUCTIONS,
        response_format=run.answer_type and ProviderStrategy(run.answer_type),
    )
    messages = [*messages_from_dict(json.loads(run.history or "[]")), ("user", run.question)]
    if run.streamed:
        pieces = list(agent.stream({"messages": messages}, stream_mode=["messages", "values"]))
        state = [piece for mode, piece in pieces if mode == "values"][-1]
    else:
        state = agent.invoke({"messages": messages})
    return Turn(answer=state["messages"][-1].text, history=json.dumps(messages_to_dict(state["messages"])))


def pydantic_ai_agent(door: Callable[[Run], Any], run: Run) -> Turn:
    """Pydantic AI, whose history is its own JSON."""

    async def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        try:
            return run.tools.add(a, b)
        except ValueError as error:
            raise ModelRetry(str(error)) from error

    async def answered() -> Turn:
        agent: Any = Agent(
            door(run),
            instructions=INSTRUCTIONS,
            tools=[Tool(each, strict=True) for each in (run.tools.get_weather, add)],
            output_type=NativeOutput(run.answer_type) if run.answer_type else str,
            model_settings={"max_tokens": run.max_tokens, "extra_body": run.more},
        )
        asked = {"message_history": ModelMessagesTypeAdapter.validate_json(run.history) if run.history else None}
        if run.streamed:
            async with agent.run_stream(run.question, **asked) as result:
                output = await result.get_output()
        else:
            result = await agent.run(run.question, **asked)
            output = result.output
        text = output if isinstance(output, str) else output.model_dump_json()
        return Turn(answer=text, history=result.all_messages_json().decode())

    return asyncio.run(answered())


def _pydantic_chat(run: Run) -> Any:
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=run.served.v1, **PATIENCE))
    return OpenAIChatModel(run.served.model, provider=provider)


def _pydantic_responses(run: Run) -> Any:
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=run.served.v1, **PATIENCE))
    return OpenAIResponsesModel(run.served.model, provider=provider)


FRAMEWORKS = {
    "openai-agents, chat": partial(openai_agents_sdk, openai_agents.OpenAIChatCompletionsModel),
    "openai-agents, responses": partial(openai_agents_sdk, openai_agents.OpenAIResponsesModel),
    "anthropic": anthropic_tool_runner,
    "langgraph": langgraph_agent,
    "pydantic-ai, chat": partial(pydantic_ai_agent, _pydantic_chat),
    "pydantic-ai, responses": partial(pydantic_ai_agent, _pydantic_responses),
}

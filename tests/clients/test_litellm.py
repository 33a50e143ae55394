"""LiteLLM over all three APIs: chats, responses, and Anthropic's messages."""

from __future__ import annotations

import copy
import json
from typing import Any

import litellm
import pytest
from chats import ANSWER, CALLS, QUESTION, TOOLS

USER = [{"role": "user", "content": QUESTION}]


def asked(served, provider: str = "openai", **fields: Any) -> dict[str, Any]:
    base = served.url if provider == "anthropic" else served.v1
    given = {"max_tokens": 80, "num_retries": 0, "messages": USER, **fields}
    # For some providers it takes keywords out of the very schemas that it is given.
    return {"model": f"{provider}/{served.model}", "api_base": base, "api_key": "none", **copy.deepcopy(given)}


@pytest.mark.parametrize("provider", ["openai", "anthropic", "hosted_vllm"])
def test_a_stream_joins_to_the_whole(served, provider) -> None:
    fields = asked(served, provider, max_tokens=16, temperature=0)
    whole = litellm.completion(**fields).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**fields, stream=True)]
    assert whole
    assert "".join(pieces) == whole


@pytest.mark.parametrize("provider", ["openai", "anthropic", "hosted_vllm"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_two_tools_and_answers(caller, tools, provider, streamed) -> None:
    def ask(messages: list[Any]) -> Any:
        answer = litellm.completion(**asked(caller, provider, messages=messages, tools=TOOLS, stream=streamed))
        return litellm.stream_chunk_builder([*answer]) if streamed else answer

    messages: list[Any] = [*USER]
    while (choice := ask(messages).choices[0]).finish_reason == "tool_calls":
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            result = tools.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert tools.calls == CALLS
    assert choice.message.content == ANSWER
    assert choice.message.reasoning_content == "I know it now."


def test_a_response_is_told_whole_and_streamed_and_gone_on_from(served) -> None:
    fields = {name: value for name, value in asked(served).items() if name not in ("messages", "max_tokens")}
    fields |= {"max_output_tokens": 16, "temperature": 0}
    whole = litellm.responses(input="Hello", **fields)
    events = list(litellm.responses(input="Hello", **fields, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    again = litellm.responses(input="And then?", previous_response_id=whole.id, **fields)
    assert again.usage.input_tokens > whole.usage.input_tokens


def test_errors_are_its_own(served) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**asked(served, temperature=-1))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked(served), "model": "openai/strange"})

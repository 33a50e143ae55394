"""What agents replay and offer, at the three doors: the conversation goes on, and what is left out is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.integration.test_tool_calls import CALLS, PARSERS, THOUGHT, says
from tests.support.scripted_fleet import MODEL, SHARES_A_GATEWAY, Script, ScriptedFleet

pytestmark = SHARES_A_GATEWAY
# Writes arguments as templates do that take them for a mapping, and refuses one text.
TEMPLATE = """\
{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{%- for m in messages %}
{%- if m.content == 'refuse me' %}{{ raise_exception('not this text') }}{% endif %}
{{ '<|' ~ m.role ~ '|>' ~ m.content }}
{%- if m.thinking %}({{ m.thinking }}){% endif %}
{%- for c in m.tool_calls or [] %} {{ c.id }}:{{ c.function.name }}
{%- for name, value in c.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}{% endfor %}
{%- if m.role == 'tool' %} of {{ m.tool_call_id }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
GATEWAY = {**PARSERS, "template": TEMPLATE}
IGNORED_TOOLS, IGNORED_FIELDS = "x-paceline-ignored-tools", "x-paceline-ignored-fields"
CHAT, RESPONSES, MESSAGES = DOORS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def said(door: str, role: str, text: Any) -> Any:
    return {"role": role, "content": text}


def called(door: str, arguments: Any, call_id: str | None = "call12345", name: str = "f") -> Any:
    """A turn of the assistant that calls a function; without an id where it is None."""
    named = {} if call_id is None else {"call_id" if door == RESPONSES else "id": call_id}
    if door == CHAT:
        call = {**named, "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if door == RESPONSES:
        return {"type": "function_call", **named, "name": name, "arguments": arguments}
    return {"role": "assistant", "content": [{"type": "tool_use", **named, "name": name, "input": arguments}]}


def result(door: str, content: Any, call_id: str | None = "call12345") -> Any:
    """What a tool has answered."""
    if door == CHAT:
        return {"role": "tool", "tool_call_id": call_id, "content": content}
    if door == RESPONSES:
        return {"type": "function_call_output", "call_id": call_id, "output": content}
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": content}]}


def function(door: str, name: str = "f") -> Any:
    """A function that is offered."""
    inner = {**FUNCTION, "name": name}
    if door == CHAT:
        return {"type": "function", "function": inner}
    if door == RESPONSES:
        return {"type": "function", **inner}
    return {"name": name, "input_schema": inner["parameters"]}


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer, and the prompt that the model got for it."""

    answer: httpx.Response
    prompt: str


@pytest.fixture
def ask(fleet: ScriptedFleet) -> Callable[..., Any]:
    async def asked(door: str, *conversation: Any, **fields: Any) -> Asked:
        name = "input" if door == RESPONSES else "messages"
        limit = "max_output_tokens" if door == RESPONSES else "max_tokens"
        body = {"model": MODEL, limit: 100, name: [*conversation], **fields}
        answer = await fleet.http.post(door, json=body)
        requests = fleet.verifier.requests
        return Asked(answer, fleet.codec.decode(requests[-1].prompt_token_ids, special_tokens=True) if requests else "")

    return asked


BROKEN = ['{"value": ', "", "null", "[1]", "7", '"x"', "{'a': 1}", "{}{}", None, [1], 7]


@pytest.mark.parametrize("arguments", BROKEN)
@pytest.mark.parametrize("door", DOORS)
async def test_broken_arguments_reach_the_template_as_an_empty_object(
    ask: Callable[..., Any], door: str, arguments: Any
) -> None:
    """vLLM PR #48922: a cut call in the history was a 400 for ever."""
    asked = await ask(door, said(door, "user", "go"), called(door, arguments), result(door, "1"))
    assert asked.answer.status_code == 200, asked.answer.text
    assert asked.prompt == "<|user|>go<|assistant|> call12345:f<|tool|>1 of call12345<|assistant|>"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize("door", DOORS)
async def test_arguments_are_an_object_to_the_template_however_they_come(
    ask: Callable[..., Any], door: str, arguments: Any
) -> None:
    """vLLM PR #48922: what is a valid object stays one."""
    asked = await ask(door, said(door, "user", "go"), called(door, arguments))
    assert "call12345:f a=1" in asked.prompt


@pytest.mark.parametrize("door", DOORS)
async def test_calls_and_results_without_ids_get_the_same_ones(ask: Callable[..., Any], door: str) -> None:
    """vLLM #9019: templates want ids of nine letters and digits, and clients leave them out."""
    turns = [called(door, {}, None), result(door, "1", None), called(door, {}, None), result(door, "2", None)]
    asked = await ask(door, said(door, "user", "go"), *turns)
    assert asked.prompt.count("call00001") == asked.prompt.count("call00002") == 2
    assert "1 of call00001" in asked.prompt


@pytest.mark.parametrize("door", DOORS)
async def test_results_without_a_call_or_twice_stay_in_the_conversation(ask: Callable[..., Any], door: str) -> None:
    """Agents compact a history, and leave results whose calls are gone."""
    asked = await ask(door, result(door, "lost"), called(door, {}), result(door, "1"), result(door, "1"))
    assert asked.answer.status_code == 200, asked.answer.text
    assert asked.prompt.count("1 of call12345") == 2
    assert "lost of call12345" in asked.prompt


@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize("door", DOORS)
async def test_the_assistant_and_tools_may_have_said_nothing(ask: Callable[..., Any], door: str, content: Any) -> None:
    """vLLM #13978 and its like: empty, null or absent parts of a replayed turn."""
    first = {**said(door, "assistant", content), **({"tool_calls": []} if door == CHAT else {})}
    turns = [first, called(door, {}), result(door, content), said(door, "user", "go")]
    asked = await ask(door, *turns)
    assert asked.answer.status_code == 200, asked.answer.text
    assert asked.prompt.endswith("<|tool|> of call12345<|user|>go<|assistant|>")


@pytest.mark.parametrize("door", DOORS)
async def test_a_user_who_says_nothing_is_a_mistake(ask: Callable[..., Any], door: str) -> None:
    """A text under a misspelled name must not be lost in silence (vLLM #9294)."""
    asked = await ask(door, said(door, "assistant", "hi"), {"role": "user", "contents": "lost"})
    assert asked.answer.status_code == 400
    assert f"{'input' if door == RESPONSES else 'messages'}[1]" in asked.answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
async def test_reasoning_reaches_the_template_under_any_name(ask: Callable[..., Any], name: str) -> None:
    """Clients and templates disagree on the name of reasoning."""
    asked = await ask(CHAT, {"role": "assistant", "content": "hi", name: "hm"}, said(CHAT, "user", "go"))
    assert "<|assistant|>hi(hm)" in asked.prompt


PARTS = [
    "hi",
    {"type": "text", "text": "hi"},
    {"type": "input_text", "text": "hi"},
    {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []},
    {"type": "refusal", "refusal": "hi"},
    {"type": "thinking", "thinking": "hi"},
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("door", DOORS)
async def test_parts_are_text_under_each_of_its_names(ask: Callable[..., Any], door: str, part: Any) -> None:
    """vLLM PR #55479: parts of refusals came back with the history, and no door took them."""
    asked = await ask(door, said(door, "assistant", [part]), said(door, "user", ["go"]))
    assert asked.answer.status_code == 200, asked.answer.text
    thought = door == MESSAGES and isinstance(part, dict) and part["type"] == "thinking"
    assert f"<|assistant|>{'(hi)' if thought else 'hi'}<|user|>go" in asked.prompt.replace("\n", "")
    assert IGNORED_FIELDS not in asked.answer.headers


async def test_a_refusal_instead_of_content_is_what_the_assistant_said(ask: Callable[..., Any]) -> None:
    """A message of a refusal, as OpenAI's official client dumps it."""
    asked = await ask(CHAT, {"role": "assistant", "content": None, "refusal": "No."}, said(CHAT, "user", "go"))
    assert "<|assistant|>No.<|user|>go" in asked.prompt.replace("\n", "")


@pytest.mark.parametrize(
    "part", [{"type": "refusal", "text": "x"}, {"type": "text"}, {"type": "refusal", "refusal": 5}]
)
async def test_a_part_without_its_text_is_refused_by_its_place(ask: Callable[..., Any], part: Any) -> None:
    asked = await ask(CHAT, said(CHAT, "user", [part]))
    assert asked.answer.json()["error"]["param"] == f"messages[0].content[0].{part['type']}"


async def test_the_older_form_of_calls_is_read(ask: Callable[..., Any]) -> None:
    """`function_call` and the role `function`, as older clients send them."""
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    asked = await ask(CHAT, call, {"role": "function", "name": "f", "content": "1"}, said(CHAT, "user", "go"))
    assert "call00001:f a=1<|tool|>1 of call00001" in asked.prompt


@pytest.mark.parametrize("door", DOORS)
async def test_a_refusal_of_the_template_names_the_message_and_what_to_change(
    ask: Callable[..., Any], door: str
) -> None:
    """ollama #17774: "System message must be at the beginning." said neither which nor what to do."""
    turns = [said(door, "user", "a"), said(door, "assistant", "b"), said(door, "user", "refuse me")]
    asked = await ask(door, *turns, called(door, {}), result(door, "1"))
    error = asked.answer.json()["error"]
    assert asked.answer.status_code == 400
    field = "input[2]" if door == RESPONSES else "messages[2]"
    assert error["message"].startswith(f"{field}: the chat template refuses it: not this text; ")
    assert error["message"].endswith("leave this user message out, or change it")


STRANGE = {
    CHAT: [{"type": "web_search"}, {"type": "custom", "custom": {"name": "patch"}}],
    RESPONSES: [
        *({"type": kind} for kind in ("web_search", "web_search_preview", "local_shell", "shell", "apply_patch")),
        *({"type": kind} for kind in ("file_search", "code_interpreter", "image_generation", "computer_use_preview")),
        {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
        {"type": "mcp", "server_label": "s"},
    ],
    MESSAGES: [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "edit"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 9},
        {"type": "code_execution_20250522", "name": "code_execution"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
    ],
}


@pytest.mark.parametrize("door", DOORS)
async def test_the_model_gets_functions_only_and_the_answer_names_the_other_tools(
    ask: Callable[..., Any], door: str
) -> None:
    """llama.cpp #20156: Codex offers web_search beside its functions."""
    asked = await ask(door, said(door, "user", "go"), tools=[*STRANGE[door], function(door)], stream=True)
    assert asked.answer.status_code == 200, asked.answer.text
    assert asked.prompt.startswith("[f]<|user|>go")
    assert asked.answer.headers[IGNORED_TOOLS] == ", ".join(tool["type"] for tool in STRANGE[door])
    assert IGNORED_FIELDS not in asked.answer.headers


REQUIRED = [
    (CHAT, [], "required", "web_search"),
    (CHAT, [function(CHAT)], {"type": "custom", "custom": {"name": "patch"}}, "custom"),
    (CHAT, [], {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": STRANGE[CHAT]}}, "web_search"),
    (RESPONSES, [], "required", "web_search"),
    (RESPONSES, [function(RESPONSES)], {"type": "web_search"}, "web_search"),
    (RESPONSES, [function(RESPONSES)], {"type": "mcp", "server_label": "s"}, "mcp"),
    (RESPONSES, [], {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}, "web_search"),
    (MESSAGES, [], {"type": "any"}, "web_search_20250305"),
    (MESSAGES, [function(MESSAGES)], {"type": "tool", "name": "web_search"}, "web_search"),
]


@pytest.mark.parametrize(("door", "beside", "choice", "name"), REQUIRED)
async def test_a_request_that_requires_such_a_tool_is_refused_by_name(
    ask: Callable[..., Any], door: str, beside: list[Any], choice: Any, name: str
) -> None:
    """llama.cpp #20156: a call that nobody can make must not be promised."""
    tools = [*STRANGE[door], *beside]
    asked = await ask(door, said(door, "user", "go"), tools=tools, tool_choice=choice)
    assert asked.answer.status_code == 400
    message = asked.answer.json()["error"]["message"]
    assert message.startswith("tool_choice")
    assert name in message


async def test_tools_that_are_allowed_beside_functions_are_passed_over(ask: Callable[..., Any]) -> None:
    """llama.cpp #20156, with `allowed_tools`."""
    for door in (CHAT, RESPONSES):
        named = {"type": "function", **({"function": {"name": "f"}} if door == CHAT else {"name": "f"})}
        allowed = {"mode": "auto", "tools": [STRANGE[door][0], named]}
        choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if door == CHAT else allowed)}
        tools = [*STRANGE[door], function(door), function(door, "g")]
        asked = await ask(door, said(door, "user", "go"), tools=tools, tool_choice=choice)
        assert asked.prompt.startswith("[f]<|user|>"), asked.answer.text


async def test_functions_in_a_namespace_are_offered_and_called_by_both_names(
    fleet: ScriptedFleet, ask: Callable[..., Any]
) -> None:
    """codex-relay #6: Codex cannot find the tool without its namespace. CLIProxyAPI #4106: models leave it out."""
    inner = [{**function(RESPONSES), "description": "d"}, {"type": "custom", "name": "patch"}]
    tools = [{"type": "namespace", "name": "mcp__hub__", "tools": inner}, function(RESPONSES, "g")]
    for name in ("mcp__hub__f", "f"):
        says(fleet, f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>')
        asked = await ask(RESPONSES, said(RESPONSES, "user", "go"), tools=tools)
        [call] = asked.answer.json()["output"]
        assert (call["namespace"], call["name"]) == ("mcp__hub__", "f")
    assert asked.prompt.startswith("[mcp__hub__f][g]<|user|>")
    assert asked.answer.headers[IGNORED_TOOLS] == "custom"
    again = await ask(RESPONSES, call, result(RESPONSES, "1", call["call_id"]), tools=tools)
    assert f"{call['call_id']}:mcp__hub__f<|tool|>1" in again.prompt
    kept = await ask(
        RESPONSES, said(RESPONSES, "user", "x"), tools=tools, previous_response_id=asked.answer.json()["id"]
    )
    assert ":mcp__hub__f<|user|>x" in kept.prompt


async def test_calls_of_other_tools_are_read_as_those_of_functions(ask: Callable[..., Any]) -> None:
    """llama.cpp #20156: what Codex replays of its own tools."""
    screen = {"type": "computer_screenshot", "image_url": "data:,"}
    items = [
        {"type": "custom_tool_call", "call_id": "call00007", "name": "patch", "input": "+a"},
        {"type": "custom_tool_call_output", "call_id": "call00007", "output": "done"},
        {"type": "local_shell_call", "call_id": "call00008", "action": {"command": ["ls"]}, "status": "completed"},
        {"type": "local_shell_call_output", "id": "call00008", "output": [{"type": "input_text", "text": "a.py"}]},
        {"type": "computer_call", "call_id": "call00009", "action": {}},
        {"type": "computer_call_output", "call_id": "call00009", "output": screen},
    ]
    asked = await ask(RESPONSES, *items, max_output_tokens=1)
    assert asked.prompt == (
        "<|assistant|> call00007:patch input=+a<|tool|>done of call00007"
        "<|assistant|> call00008:local_shell action={'command': ['ls']}<|tool|>a.py of call00008"
        "<|assistant|> call00009:computer action={}<|tool|>[computer_screenshot] of call00009<|assistant|>"
    ), asked.answer.text
    assert asked.answer.headers[IGNORED_FIELDS] == "input[5].output[0].computer_screenshot"


async def test_items_of_what_a_server_has_run_are_left_out_and_named(ask: Callable[..., Any]) -> None:
    """llama.cpp #20156: what other servers have run, and what only they can read."""
    kinds = ("item_reference", "web_search_call", "mcp_list_tools", "mcp_call", "file_search_call")
    kinds += ("image_generation_call", "code_interpreter_call", "compaction")
    secret = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"}
    items = [{"type": kind, "id": "x", "output": "x"} for kind in kinds]
    asked = await ask(RESPONSES, *items, secret, said(RESPONSES, "user", "go"))
    assert asked.prompt == "<|user|>go<|assistant|>"
    assert asked.answer.headers[IGNORED_FIELDS] == ", ".join(f"input[{at}].{kind}" for at, kind in enumerate(kinds))


async def test_a_reference_stands_for_the_item_of_a_kept_response(
    fleet: ScriptedFleet, ask: Callable[..., Any]
) -> None:
    """ai-sdk and others send the ids of what the server has kept, and not the items."""
    says(fleet, f"{THOUGHT}So:{CALLS}")
    go, tools = said(RESPONSES, "user", "go"), [function(RESPONSES)]
    first = (await ask(RESPONSES, go, tools=tools)).answer.json()
    replayed = await ask(RESPONSES, go, *first["output"], tools=tools)
    references = [{"type": "item_reference", "id": each["id"]} for each in first["output"]]
    asked = await ask(RESPONSES, go, *references, tools=tools)
    assert IGNORED_FIELDS not in asked.answer.headers
    assert ":f a=1" in asked.prompt
    assert asked.prompt == replayed.prompt
    unknown = {"type": "item_reference", "id": f"{references[0]['id'][:-4]}0fff"}
    await fleet.http.delete(f"{RESPONSES}/{first['id']}")
    for item in (unknown, references[0]):
        asked = await ask(RESPONSES, item, go, max_output_tokens=1)
        assert (asked.prompt, asked.answer.headers[IGNORED_FIELDS]) == (
            "<|user|>go<|assistant|>",
            "input[0].item_reference",
        )


async def test_references_to_too_many_responses_are_refused(ask: Callable[..., Any]) -> None:
    """Each would be fetched."""
    items = [{"type": "item_reference", "id": f"msg_{at:032x}0000"} for at in range(101)]
    answer = (await ask(RESPONSES, *items)).answer
    assert (answer.status_code, answer.json()["param"]) == (400, "input")
    assert "101 responses, at most 100" in answer.json()["message"]


async def test_blocks_of_other_tools_are_read_or_left_out(ask: Callable[..., Any]) -> None:
    """What Claude Code replays of tools that Anthropic's servers run, and files that tools have read."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    paper = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "paper"}}
    turns = [
        said(MESSAGES, "user", [{"type": "text", "text": "go"}, paper]),
        said(
            MESSAGES,
            "assistant",
            [
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
                {
                    "type": "web_search_tool_result",
                    "tool_use_id": "srvtoolu_1",
                    "content": [{"type": "x", "text": "t"}],
                },
                {"type": "text", "text": "found"},
            ],
        ),
        called(MESSAGES, {}),
        result(MESSAGES, [image, paper, {"type": "text", "text": "end"}]),
    ]
    asked = await ask(MESSAGES, *turns)
    read = "<|tool|>[image]\npaper\nend of call12345<|assistant|>"
    assert asked.prompt == f"<|user|>go\npaper<|assistant|>found<|assistant|> call12345:f{read}"
    ignored = "messages[1].content[0].server_tool_use, messages[1].content[1].web_search_tool_result"
    assert asked.answer.headers[IGNORED_FIELDS] == f"{ignored}, messages[3].content[0].content[0].image"
    refused = await ask(MESSAGES, said(MESSAGES, "user", [image]))
    assert refused.answer.json()["error"]["message"].startswith("messages[0].content[0].type: 'image'")


@pytest.mark.parametrize("door", DOORS)
async def test_what_is_nested_too_deeply_is_refused(fleet: ScriptedFleet, door: str) -> None:
    """Without this, arguments that a parser takes end in a template, as a 500."""
    fleet.verifier.script = Script()
    deep = "[" * 700 + "]" * 700
    name, limit = ("input", "max_output_tokens") if door == RESPONSES else ("messages", "max_tokens")
    turn = json.dumps(called(door, {"a": "HERE"})).replace('"HERE"', deep)
    answer = await fleet.http.post(door, content=f'{{"model": "{MODEL}", "{limit}": 1, "{name}": [{turn}]}}')
    assert (answer.status_code, "nested too deeply" in answer.text) == (400, True)

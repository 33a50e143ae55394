"""The requests of two programs for the command line, in the shapes that these send; their loops are much alike.

Codex CLI sends `/v1/responses` without a store, Claude Code `/v1/messages`. Both offer tools that are no functions or
that the model never calls, wrap what the user wrote in texts of their own, and replay all they got. A call whose
arguments they cannot read gets an error as its result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import httpx
from chats import PARAMETERS

from loops.run import LONG, Run, Turn

Json = dict[str, Any]
WRAPPED = "<system-reminder>\nToday is Thursday. Do not mention it.\n</system-reminder>"
PLAN = {"type": "object", "properties": {"plan": {"type": "array", "items": {"type": "string"}}}, "required": ["plan"]}
SCHEMAS: dict[str, Json] = {
    **{name: {**each, "$schema": "http://json-schema.org/draft-07/schema#"} for name, each in PARAMETERS.items()},
    "update_plan": PLAN,
}


class Program(Protocol):
    """One program's requests."""

    path: str

    def opening(self) -> list[Json]:
        """What a conversation begins with."""

    def asked(self, question: str) -> list[Json]:
        """What a question becomes."""

    def body(self, conversation: list[Json], max_tokens: int) -> Json:
        """The request for the next answer."""

    def streamed(self, events: Iterator[Json]) -> list[Json]:
        """What an answer adds to the conversation, joined from its events."""

    def whole(self, answer: Json) -> list[Json]:
        """What an answer adds to the conversation."""

    def calls(self, added: list[Json]) -> list[tuple[str, str, Any]]:
        """Ids, names and arguments of the calls in it; arguments may be a text that is no JSON."""

    def results(self, results: list[tuple[str, str, bool]]) -> list[Json]:
        """What results become: ids of the calls, texts, and whether these are errors."""

    def text(self, added: list[Json]) -> str:
        """What the answer says."""


class Codex:
    """Codex CLI."""

    path = "/v1/responses"

    def opening(self) -> list[Json]:
        developer = "<permissions instructions>\nAsk before you write.\n</permissions instructions>"
        context = "<environment_context>\n  <cwd>/home/user</cwd>\n  <shell>bash</shell>\n</environment_context>"
        return [self._message("developer", developer), self._message("user", context)]

    def asked(self, question: str) -> list[Json]:
        return [self._message("user", question)]

    def body(self, conversation: list[Json], max_tokens: int) -> Json:
        functions = [
            {"type": "function", "name": name, "description": "d", "strict": False, "parameters": each}
            for name, each in SCHEMAS.items()
        ]
        grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
        return {
            "instructions": "You are a coding agent.",
            "input": conversation,
            "tools": [
                *functions,
                {"type": "custom", "name": "apply_patch", "description": "d", "format": grammar},
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0198f0a2-5a40-7d10-b2f3-000000000000",
            "text": {"verbosity": "low"},
            # The program leaves it out; without it no answer could be cut.
            "max_output_tokens": max_tokens,
        }

    def streamed(self, events: Iterator[Json]) -> list[Json]:
        return [self._replayed(event["item"]) for event in events if event["type"] == "response.output_item.done"]

    def whole(self, answer: Json) -> list[Json]:
        return [self._replayed(item) for item in answer["output"]]

    def calls(self, added: list[Json]) -> list[tuple[str, str, Any]]:
        calls = [item for item in added if item["type"] == "function_call"]
        return [(call["call_id"], call["name"], call["arguments"]) for call in calls]

    def results(self, results: list[tuple[str, str, bool]]) -> list[Json]:
        return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, text, _ in results]

    def text(self, added: list[Json]) -> str:
        contents = [part for item in added if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in contents)

    def _message(self, role: str, text: str) -> Json:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    def _replayed(self, item: Json) -> Json:
        """An item without its id and status, as nothing was stored."""
        return {name: value for name, value in item.items() if name not in ("id", "status")}


class ClaudeCode:
    """Claude Code."""

    path = "/v1/messages?beta=true"

    def opening(self) -> list[Json]:
        return []

    def asked(self, question: str) -> list[Json]:
        last = {"type": "text", "text": question, "cache_control": {"type": "ephemeral"}}
        return [{"role": "user", "content": [{"type": "text", "text": WRAPPED}, last]}]

    def body(self, conversation: list[Json], max_tokens: int) -> Json:
        system = ["You are Claude Code.", "You help with tasks of software engineering."]
        return {
            "system": [{"type": "text", "text": each, "cache_control": {"type": "ephemeral"}} for each in system],
            "messages": conversation,
            "tools": [{"name": name, "description": "d", "input_schema": each} for name, each in SCHEMAS.items()],
            "metadata": {"user_id": "user_0_account__session_0"},
            "max_tokens": max_tokens,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
        }

    def streamed(self, events: Iterator[Json]) -> list[Json]:
        blocks: list[Json] = []
        pieces: list[str] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
                pieces = []
            elif event["type"] == "content_block_delta":
                self._grow(blocks[-1], event["delta"], pieces)
        return [{"role": "assistant", "content": blocks}]

    def whole(self, answer: Json) -> list[Json]:
        return [{"role": "assistant", "content": answer["content"]}]

    def calls(self, added: list[Json]) -> list[tuple[str, str, Any]]:
        blocks = [block for message in added for block in message["content"] if block["type"] == "tool_use"]
        return [(block["id"], block["name"], block["input"]) for block in blocks]

    def results(self, results: list[tuple[str, str, bool]]) -> list[Json]:
        content = [
            {"type": "tool_result", "tool_use_id": call_id, "content": text, **({"is_error": True} if failed else {})}
            for call_id, text, failed in results
        ]
        return [{"role": "user", "content": [*content, {"type": "text", "text": WRAPPED}]}]

    def text(self, added: list[Json]) -> str:
        return "".join(block.get("text", "") for message in added for block in message["content"])

    def _grow(self, block: Json, delta: Json, pieces: list[str]) -> None:
        if delta["type"] == "input_json_delta":
            pieces.append(delta["partial_json"])
            block["input"] = _read("".join(pieces))
        else:
            name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[delta["type"]]
            block[name] = block.get(name, "") + delta[name]


def _read(arguments: Any) -> Any:
    """Arguments as an object; as they are, where they are no JSON."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def run_program(program: Program, run: Run) -> Turn:
    """Asks until an answer calls no tool."""
    conversation = json.loads(run.history) if run.history else program.opening()
    conversation += program.asked(run.question)
    max_tokens = run.max_tokens
    with httpx.Client(base_url=run.served.url, timeout=60) as client:
        while True:
            body = {"model": run.served.model, **program.body(conversation, max_tokens), **run.more}
            added = _answer(client, program, body, streamed=run.streamed)
            conversation += added
            calls = program.calls(added)
            if not calls:
                return Turn(answer=program.text(added), history=json.dumps(conversation))
            conversation += program.results([_result(run, *call) for call in calls])
            max_tokens = LONG


def _answer(client: httpx.Client, program: Program, body: Json, *, streamed: bool) -> list[Json]:
    with client.stream("POST", program.path, json={**body, "stream": streamed}) as response:
        if response.is_error or not streamed:
            response.read()
            assert response.is_success, response.text
            return program.whole(response.json())
        lines = (line.removeprefix("data:").strip() for line in response.iter_lines() if line.startswith("data:"))
        return program.streamed(json.loads(line) for line in lines if line != "[DONE]")


def _result(run: Run, call_id: str, name: str, arguments: Any) -> tuple[str, str, bool]:
    try:
        return call_id, run.tools.call(name, _read(arguments)), False
    except (TypeError, ValueError) as error:
        return call_id, f"error: {error}", True


PROGRAMS = {"codex": partial(run_program, Codex()), "claude-code": partial(run_program, ClaudeCode())}

"""Arranges the messages of a chat as a template demands them. Nothing that was said is lost."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.gateway.text.template_probe import DEVELOPER, SYSTEM, USER, Capabilities, Message, SystemPlace, in_parts

# All texts of a message; templates disagree on the name of reasoning.
_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def arranged(messages: Sequence[Message], capabilities: Capabilities) -> list[Message]:
    """Returns messages as a template demands them.

    Args:
        messages: Each with `role`, `content` as a string, and maybe calls and reasoning.
        capabilities: Of the template.
    """
    known = [_with_known_role(message, capabilities) for message in messages]
    joined = _without_refused_pairs(_with_system_placed(known, capabilities.system), capabilities.refused_pairs)
    return [_dressed(message, capabilities) for message in joined]


def _with_known_role(message: Message, capabilities: Capabilities) -> Message:
    if message["role"] != DEVELOPER or capabilities.knows_developers:
        return message
    return {**message, "role": SYSTEM}


def _with_system_placed(messages: Sequence[Message], place: SystemPlace) -> Sequence[Message]:
    """Joins all system messages in front, or in the first message of a user."""
    system = [message for message in messages if message["role"] in (SYSTEM, DEVELOPER)]
    fits = place is SystemPlace.FIRST and system == list(messages[:1])
    if not system or fits or place is SystemPlace.ANYWHERE:
        return messages
    others = [message for message in messages if message["role"] not in (SYSTEM, DEVELOPER)]
    content = _paragraphs(system)
    if place is SystemPlace.FIRST:
        return [{**system[0], "content": content}, *others]
    at = next((at for at, message in enumerate(others) if message["role"] == USER), None)
    if at is None:
        return [{"role": USER, "content": content}, *others]
    user = {**others[at], "content": _paragraphs([*system, others[at]])}
    return [*others[:at], user, *others[at + 1 :]]


def _without_refused_pairs(messages: Sequence[Message], pairs: frozenset[tuple[str, str]]) -> Sequence[Message]:
    """Joins messages that may not follow one another. Calls stay what they are: a text beside them may be lost."""
    runs: list[list[Message]] = []
    for message in messages:
        before = runs[-1][0] if runs else message
        calls = before.get("tool_calls") or message.get("tool_calls")
        if runs and not calls and (before["role"], message["role"]) in pairs:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_joined(run) for run in runs]


def _joined(run: Sequence[Message]) -> Message:
    """Returns the first of some messages with the texts of all."""
    if len(run) == 1:
        return run[0]
    names = [name for name in _TEXTS if any(name in message for message in run)]
    return {**run[0], **{name: _paragraphs(run, name) for name in names}}


def _paragraphs(messages: Iterable[Message], name: str = "content") -> str:
    return "\n\n".join(text for message in messages if (text := message.get(name)))


def _dressed(message: Message, capabilities: Capabilities) -> Message:
    """Returns a message with its content, arguments and ids in the form that a template takes."""
    changed: dict[str, Any] = {}
    role = SYSTEM if message["role"] == DEVELOPER else message["role"]
    if role in capabilities.in_parts:
        changed["content"] = in_parts(message["content"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [_dressed_call(call, capabilities) for call in message["tool_calls"]]
    if capabilities.short_ids and message.get("tool_call_id"):
        changed["tool_call_id"] = short_id(message["tool_call_id"])
    return {**message, **changed} if changed else message


def _dressed_call(call: Mapping[str, Any], capabilities: Capabilities) -> Mapping[str, Any]:
    if capabilities.short_ids and call.get("id"):
        call = {**call, "id": short_id(call["id"])}
    function = call["function"]
    if capabilities.text_arguments and not isinstance(function["arguments"], str):
        written = json.dumps(function["arguments"], ensure_ascii=False)
        call = {**call, "function": {**function, "arguments": written}}
    return call


def short_id(given: str) -> str:
    """Returns an id of a call in nine letters or digits, the same for the call and its result."""
    return given if _SHORT_ID.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]

"""The message of one answer as it grows: content, reasoning and calls, as a whole or in deltas of OpenAI's chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.gateway.message.form import MessageForm, call_id
from paceline.gateway.message.reader import CallArguments, CallBegin, Content, Part, Reasoning

Json = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class GrowingCall:
    """A call as it grows."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def to_json(self) -> Json:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": "".join(self.arguments)},
        }


class Message:
    """A message made of its parts so far.

    Args:
        form: How its text was read; None: all of it is content.
        session_id: The session, which ids of calls are made of.

    Attributes:
        call_id: Returns the id of the call with that index.
    """

    def __init__(self, form: MessageForm | None, session_id: str) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[GrowingCall] = []
        self.call_id = partial(call_id, session_id, short=form is not None and form.short_ids)

    def take(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Takes further parts; returns them."""
        for part in parts:
            match part:
                case Content():
                    self.content.append(part.text)
                case Reasoning():
                    self.reasoning.append(part.text)
                case CallBegin():
                    self.calls.append(GrowingCall(id=self.call_id(len(self.calls)), name=part.name))
                case CallArguments():
                    self.calls[-1].arguments.append(part.text)
        return parts

    def delta(self, parts: Sequence[Part]) -> Json:
        """Returns the newest parts as one delta, so that a client which resumes has all of them or none."""
        delta: Json = {}
        if content := [part.text for part in parts if isinstance(part, Content)]:
            delta["content"] = "".join(content)
        if reasoning := [part.text for part in parts if isinstance(part, Reasoning)]:
            delta["reasoning_content"] = delta["reasoning"] = "".join(reasoning)
        calls = self._call_deltas(parts)
        return {**delta, "tool_calls": calls} if calls else delta

    def _call_deltas(self, parts: Sequence[Part]) -> list[Json]:
        index = len(self.calls) - 1 - sum(isinstance(part, CallBegin) for part in parts)
        calls: list[Json] = []
        arguments: dict[int, list[str]] = {}
        for part in parts:
            if isinstance(part, CallBegin):
                index += 1
                named = {"id": self.calls[index].id, "type": "function", "function": {"name": part.name}}
                calls.append({"index": index, **named})
                arguments[index] = []
            elif isinstance(part, CallArguments):
                if index not in arguments:
                    calls.append({"index": index, "function": {}})
                arguments.setdefault(index, []).append(part.text)
        for call in calls:
            call["function"]["arguments"] = "".join(arguments[call["index"]])
        return calls

    def whole(self) -> Json:
        """Returns the members of the message; content is null if there are only calls."""
        content = "".join(self.content)
        message: Json = {"content": content if content or not self.calls else None}
        if self.reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [call.to_json() for call in self.calls]
        return message

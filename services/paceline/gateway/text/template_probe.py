"""The capabilities of a chat template, found once by rendering probes: chats whose texts are marks.

A template says nowhere what it takes. Its loops show it only in part: one may walk over the content of users, and take
the first part of a system message. So each form is tried, and one suits if its mark is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from paceline.core.errors import ConfigError, InvalidRequestError

Message = Mapping[str, Any]
Renders = Callable[[Sequence[Message], Mapping[str, Any]], str]

USER, ASSISTANT, TOOL, SYSTEM = "user", "assistant", "tool", "system"
# The role of system messages in newer APIs; templates that do not know it would drop the message.
DEVELOPER = "developer"
# The assistant's message before a result holds its call.
_CALLED = (USER, ASSISTANT, TOOL)
# The shortest chats in which the contents of roles can be found; each needs those before it.
_CONTENTS = {
    USER: (USER,),
    SYSTEM: (SYSTEM, USER),
    ASSISTANT: (USER, ASSISTANT, USER),
    TOOL: _CALLED,
}
# Pairs of roles that templates refuse, each in a chat, and the same chat with another message between the two.
_PAIRS = {
    (USER, USER): ((USER, USER), (USER, ASSISTANT, USER)),
    (ASSISTANT, ASSISTANT): ((USER, ASSISTANT, ASSISTANT, USER), (USER, ASSISTANT, USER)),
    (TOOL, USER): ((*_CALLED, USER), (*_CALLED, ASSISTANT, USER)),
}
# Every template takes ids of the first form, and Mistral's take no other.
_SHORT_ID, _LONG_ID = "probe0001", "call_0123456789abcdef01234567"
_KEY = "key"
# A template that prints objects as Python spells them was written for text.
_PYTHON_SPELLED = f"{{'{_KEY}': "
_FUNCTION = {
    "name": "probe",
    "description": "probes",
    "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "any"}}},
}
_TOOLS: Mapping[str, Any] = {"tools": [{"type": "function", "function": _FUNCTION}]}


class SystemPlace(Enum):
    """Where a template takes system messages."""

    ANYWHERE = "anywhere"
    FIRST = "first"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a template takes.

    Attributes:
        system: Where system messages may stand; if first only, there may be one.
        knows_developers: Whether it has a role for developers.
        in_parts: Roles whose content must be a list of parts; that of others is a string.
        refused_pairs: Roles of two messages, the second of which must not follow the first.
        text_arguments: Whether arguments of calls must be JSON text; otherwise they are objects.
        short_ids: Whether ids of calls must have nine letters or digits.
    """

    system: SystemPlace = SystemPlace.ANYWHERE
    knows_developers: bool = False
    in_parts: frozenset[str] = frozenset()
    refused_pairs: frozenset[tuple[str, str]] = frozenset()
    text_arguments: bool = False
    short_ids: bool = False


def in_parts(text: str) -> list[dict[str, str]]:
    """Returns a text as a content that has parts."""
    return [{"type": "text", "text": text}]


def capabilities_of(render: Renders, source: str) -> Capabilities:
    """Finds out what a template takes.

    Args:
        render: Renders messages as they are, or raises InvalidRequestError.
        source: Of the template.

    Raises:
        ConfigError: It loses the text of users.
    """
    probe = _Probe(render)
    return Capabilities(
        system=probe.system_place(),
        knows_developers=DEVELOPER in source and probe.takes(DEVELOPER, USER),
        in_parts=probe.in_parts,
        refused_pairs=frozenset(
            pair for pair, (close, apart) in _PAIRS.items() if not probe.takes(*close) and probe.takes(*apart)
        ),
        text_arguments=probe.text_arguments,
        short_ids=probe.takes(*_CALLED) and not probe.takes(*_CALLED, call_id=_LONG_ID),
    )


class _Probe:
    """Renders chats of marks, in forms that are found first.

    Raises:
        ConfigError: As of `capabilities_of`.
    """

    def __init__(self, render: Renders) -> None:
        self.in_parts: frozenset[str] = frozenset()
        self.text_arguments = False
        self._render = render
        for role, chat in _CONTENTS.items():
            self._find_content(role, chat)
        if self._num_rendered((USER,)) == 0:
            raise ConfigError("the chat template renders the text of users neither from a string nor from parts")

    def system_place(self) -> SystemPlace:
        # Between two users as well: a template may leave it out when it counts turns.
        if self.takes(SYSTEM, SYSTEM, USER, SYSTEM, USER, ASSISTANT, SYSTEM, USER, SYSTEM):
            return SystemPlace.ANYWHERE
        return SystemPlace.FIRST if self.takes(SYSTEM, USER) else SystemPlace.NOWHERE

    def takes(self, *roles: str, call_id: str = _SHORT_ID) -> bool:
        """Tells whether the template renders all texts of a chat, and the arguments of its calls."""
        return self._num_rendered(roles, call_id) == len(roles)

    def _find_content(self, role: str, chat: Sequence[str]) -> None:
        """Keeps the first of all forms of a role's content, and of arguments, in which most is rendered."""
        forms: list[tuple[frozenset[str], bool]] = [
            (self.in_parts | parts, text_arguments)
            for text_arguments in ((False, True) if role == TOOL else (False,))
            for parts in (frozenset[str](), {role})
        ]

        def num_rendered(form: tuple[frozenset[str], bool]) -> int:
            self.in_parts, self.text_arguments = form
            return self._num_rendered(chat)

        self.in_parts, self.text_arguments = max(forms, key=num_rendered)

    def _num_rendered(self, roles: Sequence[str], call_id: str = _SHORT_ID) -> int:
        """Returns how many texts of a chat are rendered; -1: the template refuses it."""
        rendered = self._rendered(roles, call_id)
        if rendered is None:
            return -1
        return sum(_mark(at) in rendered for at in range(len(roles))) - (_PYTHON_SPELLED in rendered)

    def _rendered(self, roles: Sequence[str], call_id: str = _SHORT_ID) -> str | None:
        """Returns a rendered chat; None: the template refuses it."""
        messages = [self._message(roles, at, call_id) for at in range(len(roles))]
        try:
            return self._render(messages, _TOOLS if TOOL in roles else {})
        except InvalidRequestError:
            return None

    def _message(self, roles: Sequence[str], at: int, call_id: str) -> Message:
        role, mark = roles[at], _mark(at)
        if role == ASSISTANT and roles[at + 1 : at + 2] == (TOOL,):
            arguments = {_KEY: mark}
            function = {"name": "probe", "arguments": json.dumps(arguments) if self.text_arguments else arguments}
            call = {"id": call_id, "type": "function", "function": function}
            return {"role": role, "content": self._content(role, ""), "tool_calls": [call]}
        message = {"role": role, "content": self._content(SYSTEM if role == DEVELOPER else role, mark)}
        return message | ({"tool_call_id": call_id, "name": "probe"} if role == TOOL else {})

    def _content(self, role: str, text: str) -> Any:
        return in_parts(text) if role in self.in_parts else text


def _mark(at: int) -> str:
    return f"mark{at}end"

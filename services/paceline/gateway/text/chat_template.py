"""Chat templates: read from a checkpoint folder, and rendered as transformers does, with messages as they demand them.

A template says nowhere what it takes. Its loops show it only in part: one may walk over the content of users, and take
the first part of a system message. So each form is tried once by probes, chats whose texts are marks, and one suits if
its mark is rendered. Messages are arranged by that; nothing that was said is lost.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.checkpoints.json_files import read_object, tokenizer_settings
from paceline.checkpoints.tokenizer import named_tokens
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
    """Capabilities of a template.

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
        source: Source of the template.

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


# All texts of a message; templates disagree on the name of reasoning.
_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")
_NINE_CHARACTERS = re.compile(r"[A-Za-z0-9]{9}")


def arranged(messages: Sequence[Message], capabilities: Capabilities) -> list[Message]:
    """Returns messages as a template demands them.

    Args:
        messages: Each with `role`, `content` as a string, and maybe calls and reasoning.
        capabilities: The template's capabilities.
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
    return given if _NINE_CHARACTERS.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]


TEMPLATE_FILE = "chat_template.jinja"
# Further templates, each named by its file.
TEMPLATES_FOLDER = "additional_chat_templates"
# Older checkpoints with processors have it.
PROCESSOR_TEMPLATE_FILE = "chat_template.json"
_DEFAULT, _TOOL_USE, _SUFFIX = "default", "tool_use", ".jinja"


def read_templates(
    folder: Path, replacement: Path | None = None
) -> tuple[ChatTemplate | None, ChatTemplate | None, Mapping[str, str]]:
    """Returns the template of a folder, the one for chats with tools if it has one, and the tokens that they may name.

    Args:
        folder: A checkpoint's folder.
        replacement: File of a template that is used for all chats instead; None: the folder's own are used.

    Raises:
        ConfigError: A file cannot be read, or a template cannot be used.
    """
    settings = tokenizer_settings(folder)
    named = _named_templates(folder, settings) if replacement is None else {_DEFAULT: _text(replacement)}
    special_tokens = named_tokens(settings)
    default, tool_use = (
        None if source is None else ChatTemplate(source, special_tokens)
        for source in (named.get(_DEFAULT, named.get(_TOOL_USE)), named.get(_TOOL_USE))
    )
    return default, tool_use, special_tokens


def _named_templates(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the templates by name. Files win; no other place is read then."""
    files = {path.name.removesuffix(_SUFFIX): path for path in (folder / TEMPLATES_FOLDER).glob(f"*{_SUFFIX}")}
    if (folder / TEMPLATE_FILE).is_file():
        files[_DEFAULT] = folder / TEMPLATE_FILE
    in_files = {name: _text(path) for name, path in sorted(files.items())}
    if _DEFAULT in in_files:
        return in_files
    key = "chat_template"
    in_settings = _by_name(settings.get(key)) or _by_name(_json_object(folder / PROCESSOR_TEMPLATE_FILE).get(key))
    return {**in_settings, **in_files}


def _by_name(given: object) -> Mapping[str, str]:
    """Returns one template, or several of a list or an object, by name."""
    if isinstance(given, str):
        return {_DEFAULT: given}
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
    return {name: each for name, each in given.items() if isinstance(each, str)} if isinstance(given, dict) else {}


def _json_object(path: Path) -> Mapping[str, Any]:
    """Returns the object that a file holds; empty: there is no such file."""
    return read_object(path) if path.is_file() else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from error


# Marks the end of a text in a rendered chat. The characters mean nothing in any text; the space behind them shows
# whether the template trims texts.
_MARK = "\ufdd4end-of-text\ufdd5"
_MARK_AND_SPACE = f"{_MARK} "


class TemplateRefusalError(InvalidRequestError):
    """The chat template refuses the messages.

    Attributes:
        reason: Its own words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__("messages", f"the chat template refuses them: {reason}")
        self.reason = reason


class ChatTemplate:
    """A compiled chat template together with the special tokens it may name.

    Attributes:
        source: The Jinja source.
        capabilities: Capabilities of the template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles the template.

        Args:
            source: Jinja source, as in tokenizer_config.json.
            special_tokens: `bos_token` and the like.

        Raises:
            ConfigError: The template has a syntax error, or loses what users say.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from error
        self.capabilities = capabilities_of(self._rendered, source)

    def render(self, messages: Sequence[Message], extra: Mapping[str, Any]) -> str:
        """Returns the prompt that asks for the next message of the assistant.

        Args:
            messages: Each with `role`, `content` as a string, and maybe calls and reasoning; arranged here as the
                template demands.
            extra: Further variables of the template, such as `enable_thinking`.

        Raises:
            TemplateRefusalError: The template refuses the messages.
        """
        return self._rendered(arranged(messages, self.capabilities), extra)

    def _rendered(self, messages: Sequence[Message], extra: Mapping[str, Any]) -> str:
        variables = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render({**self._special_tokens, **variables, **extra, "messages": messages})
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise TemplateRefusalError(str(error)) from error


def with_end_marked(messages: Sequence[Message], field: str) -> list[Message]:
    """Returns the messages of a chat whose last one is to be continued, with a mark at the end of its text.

    Nothing of the template follows that text: `up_to_mark` cuts the rendered chat there, as transformers does.

    Raises:
        InvalidRequestError: The last message has no text.
    """
    *before, last = messages
    if not isinstance(last.get("content"), str) or not last["content"]:
        raise InvalidRequestError(f"{field}[{len(before)}].content", "must be a text, as continue_final_message is set")
    return [*before, {**last, "content": last["content"] + _MARK_AND_SPACE}]


def up_to_mark(rendered: str) -> str:
    """Returns a rendered chat up to the end of its last message's text.

    Raises:
        InvalidRequestError: The template does not render that text.
    """
    end = rendered.rfind(_MARK)
    if end < 0:
        raise InvalidRequestError("continue_final_message", "the chat template does not render the last message")
    cut = rendered[:end]
    return cut if rendered.startswith(_MARK_AND_SPACE, end) else cut.rstrip()


class _GenerationBlock(Extension):
    """Supports `{% generation %}`, which marks the assistant's text for training and prints its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own convention

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Writes JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

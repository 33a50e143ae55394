"""Renders chat messages with a checkpoint's own template, as transformers does.

It knows only Jinja. Templates come with checkpoints, so they run in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.gateway.text.arranging import arranged
from paceline.gateway.text.template_probe import Message, capabilities_of

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
        capabilities: What it takes.
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

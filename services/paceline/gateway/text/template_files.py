"""The chat templates of a checkpoint folder, and the special tokens that they name, as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.json_file import read_object, tokenizer_settings
from paceline.checkpoints.tokenizer import named_tokens
from paceline.core.errors import ConfigError

TEMPLATE_FILE = "chat_template.jinja"
# Further templates, each named by its file.
TEMPLATES_FOLDER = "additional_chat_templates"
# Older checkpoints with processors have it.
PROCESSOR_TEMPLATE_FILE = "chat_template.json"
_DEFAULT, _TOOL_USE, _SUFFIX = "default", "tool_use", ".jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSources:
    """The templates of a folder.

    Attributes:
        default: Of chats without tools; None: there is none.
        tool_use: Of chats with tools; None: the same.
        special_tokens: Those that they may name, `bos_token` and the like.
    """

    default: str | None
    tool_use: str | None
    special_tokens: Mapping[str, str]


def read_templates(folder: Path, replacement: Path | None = None) -> TemplateSources:
    """Reads the templates of a folder.

    Args:
        folder: Of a checkpoint.
        replacement: File of a template that is used for all chats instead; None: the folder's own are used.

    Raises:
        ConfigError: A file cannot be read.
    """
    settings = tokenizer_settings(folder)
    named = _named_templates(folder, settings) if replacement is None else {_DEFAULT: _text(replacement)}
    default = named.get(_DEFAULT, named.get(_TOOL_USE))
    return TemplateSources(
        default=default,
        tool_use=None if default is None else named.get(_TOOL_USE),
        special_tokens=named_tokens(settings),
    )


def _named_templates(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the templates by name. Those of files win; no other place is read then."""
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

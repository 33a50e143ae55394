"""The tokenizer of a checkpoint folder, of all files that define it.

tokenizer.json alone is not enough: fine-tunes keep the marks of their chats in tokenizer_config.json, older ones in
added_tokens.json and special_tokens_map.json. Transformers' reading of a folder is right, its order included, since a
token that has no id yet gets the next free one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from paceline.checkpoints.json_files import (
    EXTRA_TOKENS,
    LISTED_TOKENS,
    OLD_EXTRA_TOKENS,
    TOKENIZER,
    read_object,
    tokenizer_settings,
)
from paceline.core.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
ADDED_TOKENS_FILE = "added_tokens.json"
# Classes whose tokenizers transformers builds anew, with the setting in place of tokenizer.json's value.
PREFIX_SPACE_CLASSES = ("GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer")
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def read_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a checkpoint folder.

    Raises:
        ConfigError: There is none, or a file cannot be read or used.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {TOKENIZER_FILE}; give a checkpoint folder with a fast tokenizer")
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error
    settings = tokenizer_settings(folder)
    try:
        _add_tokens(tokenizer, settings, _listed(folder, settings))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / TOKENIZER}: names tokens that cannot be added: {error}") from error
    _apply(settings, tokenizer)
    return tokenizer


def _apply(settings: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Sets what transformers takes from the settings, and not from the tokenizer's own file."""
    # Then special tokens are special by their ids alone, in chats, too.
    tokenizer.encode_special_tokens = settings.get("split_special_tokens") is True
    kind = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    if kind in PREFIX_SPACE_CLASSES and isinstance(tokenizer.pre_tokenizer, ByteLevel):
        tokenizer.pre_tokenizer.add_prefix_space = settings.get("add_prefix_space") is True


def _listed(folder: Path, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Returns the added tokens that the files list with their ids, which are an order and no more."""
    if LISTED_TOKENS in settings:
        return {int(at): _added(token) for at, token in settings[LISTED_TOKENS].items()}
    path = folder / ADDED_TOKENS_FILE
    extra = settings.get(EXTRA_TOKENS)
    special = {*named_tokens(settings).values(), *map(_content, extra if isinstance(extra, list) else ())}
    listed = {
        at: AddedToken(content, normalized=content not in special, special=content in special)
        for content, at in (read_object(path) if path.is_file() else {}).items()
    }
    for token in read_object(folder / TOKENIZER_FILE).get("added_tokens") or []:
        listed[token["id"]] = _added(token)
    return listed


def _add_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], listed: Mapping[int, AddedToken]) -> None:
    """Adds all tokens in transformers' order; one that is there gets the properties that are named here."""
    adding = {token.content: token for _, token in sorted(listed.items())}
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for token in _special(settings):
        if _content(token) not in known:
            adding.setdefault(_content(token), _added(token))
    named = set(named_tokens(settings).values())
    for content, token in adding.items():
        # The library never forgets that one was special.
        token.special |= content in named or (content in known and known[content].special)
    tokenizer.add_tokens(list(adding.values()))


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that have names, such as `bos_token`, by name."""
    return {name: _content(token) for name, token in _named(settings).items()}


def _special(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the special tokens that settings name, as they are written."""
    yield from _named(settings).values()
    extra = _extra(settings)
    yield from extra if isinstance(extra, list) else ()


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns them as they are written, the usual ones first, then those that are the model's own."""
    own = {name: token for name, token in settings.items() if name.endswith("_token") and name not in NAMED_TOKENS}
    extra = _extra(settings)
    own |= extra if isinstance(extra, dict) else {}
    usual = {name: settings.get(name) for name in NAMED_TOKENS}
    return {name: token for name, token in {**usual, **own}.items() if isinstance(token, (str, dict)) and token}


def _extra(settings: Mapping[str, Any]) -> Any:
    return settings.get(EXTRA_TOKENS) or settings.get(OLD_EXTRA_TOKENS)


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _added(token: Any) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(**{name: value for name, value in token.items() if name not in ("__type", "id")})

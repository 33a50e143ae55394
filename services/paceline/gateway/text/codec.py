"""Text to token ids and back for one checkpoint folder, with the `tokenizers` library alone.

It knows neither models nor requests nor networks; the limits that it enforces are passed in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.checkpoints.identity import vocab_hash
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.gateway.text.chat_template import ChatTemplate, Message, up_to_mark, with_end_marked
from paceline.gateway.text.detokenizer import Decodes
from paceline.gateway.text.spellings import MarkedChat, SpecialSpellings, token_ids

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
NAMED_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))


class TextCodec:
    """The tokenizer of one model: encodes prompts, decodes single tokens, renders chats.

    Attributes:
        chat_template: How messages become a prompt; None if the folder holds no template.
        vocab_size: Ids that the tokenizer knows; the model's own vocabulary may be padded beyond it.
        vocab_hash: The hash that a verifier of the same model announces; empty if the tokenizer came from no folder.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        vocab_hash: str = "",
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Takes over a tokenizer, and switches its truncation and padding off.

        Args:
            tokenizer: The tokenizer.
            chat_template: How messages become a prompt; None: chats are not served.
            vocab_hash: The hash that a verifier of the same model announces.
            special_tokens: Those that chat templates may name, `bos_token` and the like.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.chat_template = chat_template
        self.vocab_hash = vocab_hash
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self._spellings = SpecialSpellings(tokenizer)
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._visible = frozenset(vocab.values()) - self._special.keys()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._added_ids = {spelling: token_id for token_id, spelling in self._added.items()}
        # By the few sets of special tokens that readers of answers need.
        self._showing: dict[tuple[str, ...] | None, Decodes] = {}
        self._spelling = _Spelling(json.loads(tokenizer.to_str()).get("decoder"))
        self._longest_token_bytes = max((len(self._spelling.to_bytes(piece)) for piece in vocab), default=1)

    @property
    def template_source(self) -> str:
        """Source of the chat template; empty: there is none."""
        return "" if self.chat_template is None else self.chat_template.source

    @classmethod
    def from_folder(cls, folder: Path, chat_template: Path | None = None) -> TextCodec:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja of a checkpoint folder.

        Args:
            folder: The folder.
            chat_template: File of a template that replaces the folder's own; None: the folder's own is used.

        Raises:
            ConfigError: The folder holds no tokenizer, or the tokenizer or the template cannot be read.
        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ConfigError(f"{folder} holds no {TOKENIZER_FILE}; give a checkpoint folder with a fast tokenizer")
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
        settings = _settings(folder)
        source = _own_template(folder, settings) if chat_template is None else _read_template(chat_template)
        special_tokens = _special_tokens(settings)
        template = None if source is None else ChatTemplate(source, special_tokens)
        return cls(tokenizer, template, vocab_hash(folder), special_tokens)

    def template(self, source: str) -> ChatTemplate:
        """Returns another chat template with the special tokens of this tokenizer.

        Raises:
            ConfigError: It has a syntax error.
        """
        return ChatTemplate(source, self._special_tokens)

    def encode(
        self, text: str, *, field: str, special_tokens: bool, context_len: int, keep_last: int | None = None
    ) -> tuple[int, ...]:
        """Returns the token ids of a text. Its time is bounded by the context, and other threads run meanwhile.

        Special tokens spelled out in the text become special tokens: the text is a whole prompt of its author.

        Args:
            text: The text.
            field: Name of the request field, for the error.
            special_tokens: Whether the tokenizer adds its own (begin of text) tokens.
            context_len: Texts that cannot fit into this number of tokens are refused unread.
            keep_last: Number of last tokens to return, however long the text is; None: all, if the context holds them.

        Raises:
            InvalidRequestError: The text is too long, or is not Unicode text.
        """
        self._check_length(field, utf8_len(field, text), context_len)
        return token_ids(
            self._tokenizer, text, field, special_tokens=special_tokens, context_len=context_len, keep_last=keep_last
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        extra: Mapping[str, Any],
        *,
        field: str,
        context_len: int,
        keep_last: int | None = None,
        template: ChatTemplate | None = None,
        continue_last: bool = False,
    ) -> tuple[int, ...]:
        """Returns the prompt that asks for the next message of a chat, in tokens.

        Special tokens spelled out in the messages stay text; those of the template are special tokens.

        Args:
            messages: Each with `role` and `content`, and maybe `name`.
            extra: Further variables of the template.
            field: Name of the request field, for the error.
            context_len: Chats that cannot fit into this number of tokens are refused unread.
            keep_last: As in `encode`.
            template: The template to use; None: the model's own, which must exist.
            continue_last: Whether the prompt ends with the text of the last message.

        Raises:
            InvalidRequestError: The chat is too long, is not Unicode text, or the template refuses it.
        """
        template = template or self.chat_template
        assert template is not None, "callers check that there is one"
        num_bytes = sum(utf8_len(f"{field}[{index}].content", each["content"]) for index, each in enumerate(messages))
        num_bytes += sum(_num_bytes(f"{field}[{index}]", _beside_content(each)) for index, each in enumerate(messages))
        num_bytes += _num_bytes("tools", extra.get("tools"))
        self._check_length(field, num_bytes, context_len)
        if continue_last:
            messages = with_end_marked(messages, field)
        marked = self._spellings.marked([list(map(dict, messages)), dict(extra)], field)
        rendered = template.render(messages, extra) if marked is None else _rendered_marked(template, marked)
        if continue_last:
            rendered = up_to_mark(rendered)
        if marked is not None:
            return self._spellings.encode(rendered, marked, field, context_len=context_len, keep_last=keep_last)
        return self.encode(rendered, field=field, special_tokens=False, context_len=context_len, keep_last=keep_last)

    def _check_length(self, field: str, num_bytes: int, context_len: int) -> None:
        most_bytes = context_len * self._longest_token_bytes
        if num_bytes > most_bytes:
            raise InvalidRequestError(
                field, f"has {num_bytes} bytes, the context of {context_len} tokens holds at most {most_bytes}"
            )

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Returns the text of tokens, special ones spelled out or left out; broken UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=not special_tokens)

    def is_visible(self, token_id: int) -> bool:
        """Tells whether a token has text: known to the tokenizer and not special."""
        return token_id in self._visible

    def added_token_id(self, spelling: str) -> int | None:
        """Returns the token that was added to the vocabulary under this spelling; None: there is none."""
        return self._added_ids.get(spelling)

    def showing(self, spellings: tuple[str, ...] | None) -> Decodes:
        """Returns a decoder for which these special tokens have text, and others none; None: all of them have text."""
        if spellings not in self._showing:
            shown = {
                token_id for token_id, spelled in self._special.items() if spellings is None or spelled in spellings
            }
            self._showing[spellings] = _Showing(self._tokenizer, self._visible | shown) if shown else self
        return self._showing[spellings]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token, special ones spelled out."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        return self._spelling.to_bytes(piece)


class _Showing:
    """Decodes tokens of which some are special and have the text that they are written as.

    Args:
        tokenizer: The tokenizer.
        visible: All tokens that have text.
    """

    def __init__(self, tokenizer: Tokenizer, visible: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._visible = visible

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def is_visible(self, token_id: int) -> bool:
        return token_id in self._visible


def _rendered_marked(template: ChatTemplate, marked: MarkedChat) -> str:
    """Returns a chat rendered with marks; an error of the template that quotes it shows what the client wrote."""
    try:
        return template.render(*marked.value)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.field, marked.restored(error.problem)) from error


def _beside_content(message: Message) -> list[Any]:
    return [value for name, value in message.items() if name != "content"]


def _num_bytes(field: str, value: Any) -> int:
    """Returns the bytes of all strings in a JSON value."""
    if isinstance(value, str):
        return utf8_len(field, value)
    if isinstance(value, Mapping):
        return sum(_num_bytes(field, key) + _num_bytes(field, each) for key, each in value.items())
    return sum(_num_bytes(field, each) for each in value) if isinstance(value, list) else 0


def utf8_len(field: str, text: str) -> int:
    """Returns the bytes of a text in UTF-8.

    Raises:
        InvalidRequestError: It has no such form, because it holds half of a surrogate pair.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            field, f"is not Unicode text: half of a surrogate pair at character {error.start}"
        ) from None


class _Spelling:
    """How a vocabulary spells bytes, derived from the decoder of tokenizer.json."""

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        parts = [] if decoder is None else decoder.get("decoders", [decoder])
        kinds = {part["type"] for part in parts}
        self._bytes_of = _byte_alphabet() if "ByteLevel" in kinds else {}
        self._byte_fallback = "ByteFallback" in kinds
        self._space = next((part["replacement"] for part in parts if part["type"] == "Metaspace"), None)
        for part in parts:
            if part["type"] == "Replace" and part["content"] == " " and "String" in part["pattern"]:
                self._space = part["pattern"]["String"]

    def to_bytes(self, piece: str) -> bytes:
        if self._bytes_of:
            return b"".join(self._bytes_of.get(character) or character.encode() for character in piece)
        if self._byte_fallback and len(piece) == len("<0x00>") and piece.startswith("<0x"):
            return bytes.fromhex(piece[3:5])
        return (piece if self._space is None else piece.replace(self._space, " ")).encode()


def _byte_alphabet() -> dict[str, bytes]:
    """Returns the byte behind each character of byte-level BPE (the table of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    table.update({chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)})
    return table


def _settings(folder: Path) -> Mapping[str, Any]:
    path = folder / SETTINGS_FILE
    try:
        settings: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return settings


def _own_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    return _read_template(path) if path.is_file() else _template_source(settings.get("chat_template"))


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from error


def _template_source(given: object) -> str | None:
    """Returns the one template, or the one named "default" of several."""
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in NAMED_SPECIAL_TOKENS:
        value = settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens

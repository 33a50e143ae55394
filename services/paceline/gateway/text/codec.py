"""Text to token ids and back for one checkpoint folder, with the `tokenizers` library alone.

It knows neither models nor requests nor networks; the limits that it enforces are passed in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.checkpoints.identity import vocab_hash
from paceline.checkpoints.tokenizer import read_tokenizer
from paceline.core.errors import InvalidRequestError
from paceline.core.params import utf8_len
from paceline.gateway.text.chat_template import ChatTemplate, Message, read_templates, up_to_mark, with_end_marked
from paceline.gateway.text.spellings import MarkedChat, SpecialSpellings, token_ids

# Requests that bring templates of their own mostly bring the same one.
_NUM_TEMPLATES = 16
_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")


class TextCodec:
    """The tokenizer of one model: encodes prompts, decodes single tokens, renders chats.

    Attributes:
        chat_template: How messages become a prompt; None if the folder holds no template.
        tool_template: How they do where the request has tools; mostly the same.
        vocab_size: Ids that the tokenizer knows; the model's own vocabulary may be padded beyond it.
        vocab_hash: The hash that a verifier of the same model announces; empty if the tokenizer came from no folder.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        vocab_hash: str = "",
        special_tokens: Mapping[str, str] | None = None,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        """Takes over a tokenizer, and switches its truncation and padding off.

        Args:
            chat_template: How messages become a prompt; None: chats are not served.
            vocab_hash: The hash that a verifier of the same model announces.
            special_tokens: Tokens that chat templates may name, `bos_token` and the like.
            tool_template: How messages become a prompt where there are tools; None: no other way.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.chat_template = chat_template
        self.tool_template = tool_template or chat_template
        self.vocab_hash = vocab_hash
        self._tokenizer = tokenizer
        self._compiled = lru_cache(_NUM_TEMPLATES)(partial(ChatTemplate, special_tokens=dict(special_tokens or {})))
        self._spellings = SpecialSpellings(tokenizer)
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._visible = frozenset(vocab.values()) - self._special.keys()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._added_ids = {spelling: token_id for token_id, spelling in self._added.items()}
        # By the few sets of special tokens that readers of answers need.
        self._shown: dict[tuple[str, ...] | None, frozenset[int]] = {}
        decoder = tokenizer.decoder
        # Copies the decoder alone: all of a tokenizer with 150,000 tokens takes two thirds of a second.
        self._spelling = _Spelling(None if decoder is None else json.loads(decoder.__getstate__()))
        self._bytes_of = self._spelling.bytes_of(vocab)
        # The library is asked for no text of a byte-level vocabulary: a session's step would wait for it twice.
        self._spelled = _Spelled(tokenizer, self._spelling) if self._spelling.is_byte_level else None
        self._of_pieces = decoder
        self._longest_token_bytes = max((len(self._spelling.to_bytes(piece)) for piece in vocab), default=1)

    def own_template(self, *, with_tools: bool) -> ChatTemplate | None:
        """Returns the model's chat template; None: it has none."""
        return self.tool_template if with_tools else self.chat_template

    @property
    def template_source(self) -> str:
        """Source of the chat template that calls are written by; empty: there is none."""
        return "" if self.tool_template is None else self.tool_template.source

    @property
    def has_short_call_ids(self) -> bool:
        """Whether the chat template takes no other ids of calls than those of nine letters or digits."""
        return self.tool_template is not None and self.tool_template.capabilities.short_ids

    @classmethod
    def from_folder(cls, folder: Path, chat_template: Path | None = None) -> TextCodec:
        """Reads the tokenizer and the chat templates of a checkpoint folder.

        Args:
            chat_template: File of a template that replaces the folder's own; None: the folder's own is used.

        Raises:
            ConfigError: The folder holds no tokenizer, or the tokenizer or a template cannot be read or used.
        """
        tokenizer = read_tokenizer(folder)
        template, tool_template, special_tokens = read_templates(folder, chat_template)
        return cls(tokenizer, template, vocab_hash(folder), special_tokens, tool_template)

    def template(self, source: str) -> ChatTemplate:
        """Returns another chat template with the special tokens of this tokenizer.

        Raises:
            ConfigError: It has a syntax error, or loses what users say.
        """
        return self._compiled(source)

    def encode(
        self, text: str, *, field: str, special_tokens: bool, context_len: int, keep_last: int | None = None
    ) -> tuple[int, ...]:
        """Returns the token ids of a text. Its time is bounded by the context, and other threads run meanwhile.

        Special tokens spelled out in the text become special tokens: the text is a whole prompt of its author.

        Args:
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
        template = template or self.own_template(with_tools=bool(extra.get("tools")))
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
        """Returns the text of tokens, special ones spelled out or left out; broken UTF-8 becomes U+FFFD.

        Valid UTF-8 stays, whatever comes behind it. The library's decoder of byte-fallback vocabularies gives up a
        whole run of bytes for one that is invalid: the text of the tokens before that one would change when it comes.
        """
        if not special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self._special]
        if self._spelled is not None:
            return b"".join(map(self._spelled.__getitem__, token_ids)).decode(errors="replace")
        if self._bytes_of.keys().isdisjoint(token_ids):
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        pieces: list[str] = []
        for byte_tokens, run in groupby(token_ids, self._bytes_of.__contains__):
            if byte_tokens:
                valid = bytes(map(self._bytes_of.__getitem__, run)).decode(errors="replace").encode()
                pieces += (f"<0x{byte:02X}>" for byte in valid)
            else:
                pieces += filter(None, map(self._tokenizer.id_to_token, run))
        return str(self._of_pieces.decode(pieces))

    def is_visible(self, token_id: int) -> bool:
        """Tells whether a token has text: known to the tokenizer and not special."""
        return token_id in self._visible

    def added_token_id(self, spelling: str) -> int | None:
        """Returns the token that was added to the vocabulary under this spelling; None: there is none."""
        return self._added_ids.get(spelling)

    def special_ids(self, spellings: tuple[str, ...] | None) -> frozenset[int]:
        """Returns the special tokens with these spellings; None: all of them."""
        if spellings not in self._shown:
            self._shown[spellings] = frozenset(
                token_id for token_id, spelled in self._special.items() if spellings is None or spelled in spellings
            )
        return self._shown[spellings]

    def piece(self, token_id: int) -> str | None:
        """Returns a token as the vocabulary spells it; None: there is none."""
        return self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token, special ones spelled out."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        return self._spelling.to_bytes(piece)


class _Spelled(dict[int, bytes]):
    """The bytes of the tokens of a byte-level vocabulary, as the library's decoder has them; looked up once each."""

    def __init__(self, tokenizer: Tokenizer, spelling: _Spelling) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._spelling = spelling

    def __missing__(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        self[token_id] = self._spelling.to_bytes(piece)
        return self[token_id]


def _rendered_marked(template: ChatTemplate, marked: MarkedChat) -> str:
    """Returns a chat rendered with marks; an error of the template that quotes it shows what the client wrote."""
    try:
        return template.render(*marked.value)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.field, marked.restored(error.problem)) from error


def _beside_content(message: Message) -> list[Any]:
    return [value for name, value in message.items() if name != "content"]


def _num_bytes(field: str, value: Any) -> int:
    if isinstance(value, str):
        return utf8_len(field, value)
    if isinstance(value, Mapping):
        return sum(_num_bytes(field, key) + _num_bytes(field, each) for key, each in value.items())
    return sum(_num_bytes(field, each) for each in value) if isinstance(value, list) else 0


class _Spelling:
    """How a vocabulary spells bytes, derived from the decoder of tokenizer.json."""

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        parts = [] if decoder is None else decoder.get("decoders", [decoder])
        kinds = {part["type"] for part in parts}
        self.is_byte_level = kinds == {"ByteLevel"}
        self._bytes_of = _byte_alphabet() if "ByteLevel" in kinds else {}
        self._byte_fallback = "ByteFallback" in kinds
        self._space = next((part["replacement"] for part in parts if part["type"] == "Metaspace"), None)
        for part in parts:
            if part["type"] == "Replace" and part["content"] == " " and "String" in part["pattern"]:
                self._space = part["pattern"]["String"]

    def bytes_of(self, vocab: Mapping[str, int]) -> dict[int, int]:
        """Returns the byte that tokens of a byte-fallback vocabulary stand for, by their ids."""
        spelled = filter(_FALLBACK.fullmatch, vocab if self._byte_fallback else ())
        return {vocab[piece]: int(piece[3:5], 16) for piece in spelled}

    def to_bytes(self, piece: str) -> bytes:
        if self._bytes_of:
            try:
                return b"".join([self._bytes_of[character] for character in piece])
            except KeyError:
                # A token added to the vocabulary, in other characters.
                return piece.encode()
        if self._byte_fallback and _FALLBACK.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        return (piece if self._space is None else piece.replace(self._space, " ")).encode()


def _byte_alphabet() -> dict[str, bytes]:
    """Returns the byte behind each character of byte-level BPE (the table of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    table.update({chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)})
    return table

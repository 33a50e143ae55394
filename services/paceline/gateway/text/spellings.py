"""Separates the special tokens of a chat template from their spellings in users' texts.

Both become one prompt before it is encoded, in which `<|end|>` of the template and `<|end|>` that a user wrote look
alike. So marks replace the spellings in users' texts before the template is rendered. Afterwards other marks, which a
second tokenizer knows, replace the template's own spellings, and the users' are restored; that tokenizer treats special
tokens as text. Marks hold random numbers: the template's one of the process, which nothing shows, and the users' one of
the chat, since a template may quote a text in its error.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from paceline.core.errors import InvalidRequestError

# In one chat; replacing a million of them takes long.
MAX_SPELLINGS = 10_000
# Larger texts are counted in pieces first. Tokens take 240 bytes each while they are made: two texts of 4 MiB took a
# gateway 1.7 GiB, only to be refused.
WHOLE_CHARACTERS, PIECE_CHARACTERS = 128 * 1024, 32 * 1024
_ONE_LARGE_TEXT = threading.Lock()


def token_ids(
    tokenizer: Tokenizer, text: str, field: str, *, special_tokens: bool, context_len: int, keep_last: int | None
) -> tuple[int, ...]:
    """Returns the token ids of a text, or the last of them. Memory is bounded by what is wanted, not by the text.

    Raises:
        InvalidRequestError: There are more than the context holds, and `keep_last` is None.
    """
    if len(text) <= WHOLE_CHARACTERS:
        return _token_ids(tokenizer, text, field, special_tokens, context_len, keep_last)
    with _ONE_LARGE_TEXT:
        if keep_last is None:
            _check_far_too_long(tokenizer, text, field, context_len)
        else:
            text = _end_of(tokenizer, text, keep_last)
        return _token_ids(tokenizer, text, field, special_tokens, context_len, keep_last)


def _token_ids(
    tokenizer: Tokenizer, text: str, field: str, special_tokens: bool, context_len: int, keep_last: int | None
) -> tuple[int, ...]:
    # A batch, even of one text, is encoded without the lock of the interpreter.
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
    if keep_last is not None:
        return tuple(encoding.ids[-keep_last:])
    if len(encoding) > context_len:
        raise InvalidRequestError(field, f"has {len(encoding)} tokens, more than the context of {context_len} tokens")
    return tuple(encoding.ids)


def _check_far_too_long(tokenizer: Tokenizer, text: str, field: str, context_len: int) -> None:
    """Reads a text piece by piece, only to count: a cut makes some tokens more, but never twice as many."""
    num_tokens = 0
    for begin in range(0, len(text), PIECE_CHARACTERS):
        num_tokens += _num_tokens(tokenizer, text[begin : begin + PIECE_CHARACTERS])
        if num_tokens > 2 * context_len:
            so_far = f"{num_tokens} tokens in its first {begin + PIECE_CHARACTERS} characters"
            raise InvalidRequestError(field, f"has {so_far}, more than the context of {context_len} tokens")


def _end_of(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """Returns the end of a text that has so many tokens, and a piece before it, for the effect of the cut."""
    begin, num_found = len(text), 0
    while begin > 0 and num_found < num_tokens:
        end, begin = begin, max(0, begin - PIECE_CHARACTERS)
        num_found += _num_tokens(tokenizer, text[begin:end])
    return text[max(0, begin - PIECE_CHARACTERS) :]


def _num_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedChat:
    """A chat whose texts hold marks in place of special tokens.

    Attributes:
        value: The chat, a JSON value.
        marks: By spelling, the mark that replaces it in this chat alone.
    """

    value: Any
    marks: Mapping[str, str]

    def restored(self, text: str) -> str:
        """Returns a text with spellings in place of the marks."""
        for spelled, mark in self.marks.items():
            text = text.replace(mark, spelled)
        return text


class SpecialSpellings:
    """The special tokens of one tokenizer, and the marks that replace them while a chat becomes a prompt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        # A tokenizer that splits them has none in any text.
        split = tokenizer.encode_special_tokens
        special = {token_id: token for token_id, token in added.items() if token.special and not split}
        secret = secrets.token_hex(8)
        # Longest first: one may be part of another.
        self._spelled = sorted((token.content for token in special.values()), key=len, reverse=True)
        # These characters are in no alphabet, and have no meaning in any text.
        self._of_template = {token.content: f"\ufdd0{secret}.{number}\ufdd1" for number, token in special.items()}
        # Within a word these are text, as everywhere.
        self._alone = {
            token.content: re.compile(rf"(?<!\w){re.escape(token.content)}(?!\w)")
            for token in special.values()
            if token.single_word
        }
        self._tokenizer = _twin(tokenizer)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.add_tokens(
            [
                AddedToken(
                    self._of_template[each.content],
                    lstrip=each.lstrip,
                    rstrip=each.rstrip,
                    normalized=each.normalized,
                )
                for each in special.values()
            ]
        )
        self._id_of = {
            self._tokenizer.token_to_id(self._of_template[t.content]): number for number, t in special.items()
        }

    def marked(self, value: Any, field: str) -> MarkedChat | None:
        """Returns a JSON value with marks for all special tokens in its strings; None if there are none.

        Raises:
            InvalidRequestError: There are too many.
        """
        num_found = 0
        marks = _marks(self._spelled)

        def mark(text: str) -> str:
            nonlocal num_found
            for spelled in self._spelled:
                # Most spellings begin alike, and most texts hold no such beginning.
                if spelled[:2] in text and (found := text.count(spelled)):
                    num_found += found
                    if num_found > MAX_SPELLINGS:
                        raise InvalidRequestError(field, f"spell out more than {MAX_SPELLINGS} special tokens")
                    text = text.replace(spelled, marks[spelled])
            return text

        changed = _mapped(value, mark)
        return MarkedChat(value=changed, marks=marks) if num_found else None

    def encode(
        self, rendered: str, marked: MarkedChat, field: str, *, context_len: int, keep_last: int | None = None
    ) -> tuple[int, ...]:
        """Returns the tokens of a prompt that was rendered from a marked chat, or the last of them.

        Raises:
            InvalidRequestError: There are more than the context holds.
        """
        text = rendered
        for spelled in self._spelled:
            mark = self._of_template[spelled]
            alone = self._alone.get(spelled)
            text = text.replace(spelled, mark) if alone is None else alone.sub(mark, text)
        ids = token_ids(
            self._tokenizer,
            marked.restored(text),
            field,
            special_tokens=False,
            context_len=context_len,
            keep_last=keep_last,
        )
        return tuple(self._id_of.get(token_id, token_id) for token_id in ids)


def _twin(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer with the same model, which is not copied: one with 150,000 tokens takes a second and 90 MB."""
    twin = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (set_up := getattr(tokenizer, part)) is not None:
            setattr(twin, part, set_up)
    twin.add_tokens([token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())])
    return twin


def _marks(spellings: Sequence[str]) -> dict[str, str]:
    """Returns marks for the spellings of one chat."""
    secret = secrets.token_hex(8)
    return {spelled: f"\ufdd2{secret}.{number}\ufdd3" for number, spelled in enumerate(spellings)}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(entry, change) for entry in value]
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(entry, change) for key, entry in value.items()}
    return value

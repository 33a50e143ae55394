"""Pieces of text join to the whole, and none of them holds half a character."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from paceline.gateway.text.codec import TextCodec
from paceline.gateway.text.detokenizer import MAX_HELD_TOKENS, REPLACEMENT, Decodes, Detokenizer
from tests.support import tiny_tokenizer

CODEC = TextCodec(tiny_tokenizer.train(), None)
TOKEN_IDS = st.integers(0, CODEC.vocab_size + 3)
# Half of these ids are bytes, so that broken and split characters are common.
STEPS = st.lists(st.lists(TOKEN_IDS | st.integers(2, 258), max_size=5), max_size=12)


def sentencepiece_codec() -> TextCodec:
    """Returns a codec that spells spaces as U+2581 and unknown characters as bytes, as Llama 2 does."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581the", "\u2581", "fox", "\u2581fox"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextCodec(tokenizer, None)


def stream(codec: Decodes, steps: list[list[int]], prompt: list[int] | None = None) -> list[str]:
    """Returns the pieces that the steps give, the flushed rest last."""
    detokenizer = Detokenizer(codec, prompt or [])
    return [*(detokenizer.feed(step) for step in steps), detokenizer.flush()]


@given(steps=STEPS)
def test_pieces_join_to_the_text_of_all_tokens(steps: list[list[int]]) -> None:
    for codec in (CODEC, CODEC.showing(None)):
        assert "".join(stream(codec, steps)) == codec.decode(list(itertools.chain(*steps)))


@given(text=st.text(max_size=20), cuts=st.lists(st.integers(1, 4), max_size=80))
def test_no_piece_of_a_clean_text_holds_half_a_character(text: str, cuts: list[int]) -> None:
    token_ids = CODEC.encode(text, field="text", special_tokens=False, context_len=1000)
    steps: list[list[int]] = []
    for size in [*cuts, len(token_ids)]:
        steps.append(list(token_ids[:size]))
        token_ids = token_ids[size:]
    pieces = stream(CODEC, steps)
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in text


def byte_ids(codec: TextCodec, text: str) -> list[int]:
    """Returns one token a byte."""
    by_bytes = {codec.token_bytes(token_id): token_id for token_id in reversed(range(codec.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("codec", [CODEC, sentencepiece_codec()], ids=["byte level", "byte fallback"])
def test_a_character_comes_out_whole_with_its_last_byte_or_as_a_replacement_at_the_end(codec: TextCodec) -> None:
    steps = [[token_id] for token_id in byte_ids(codec, "a😀b")]
    assert stream(codec, steps) == ["a", "", "", "", "😀", "b", ""]
    assert stream(codec, [[byte_ids(codec, "é")[0]]]) == ["", REPLACEMENT]


def test_bytes_that_can_never_become_text_are_not_held_for_ever() -> None:
    continuation = byte_ids(CODEC, "é")[1]
    detokenizer = Detokenizer(CODEC)
    given = sum(len(detokenizer.feed([continuation])) for _ in range(100))
    assert given >= 100 - MAX_HELD_TOKENS


def test_text_goes_on_after_a_broken_character_of_a_byte_fallback_vocabulary() -> None:
    dollar, broken, control, space = 0x24 + 1, 0xFF + 1, 0x05 + 1, 258
    pieces = stream(sentencepiece_codec(), [[dollar], [broken], [control], [space]])
    assert pieces == ["$", "", "", 2 * REPLACEMENT + " ", ""]


def test_special_and_unknown_tokens_have_no_text() -> None:
    assert "".join(stream(CODEC, [[1], [0], [CODEC.vocab_size + 7]])) == ""


def test_the_space_before_the_first_word_is_kept_after_a_prompt() -> None:
    codec = sentencepiece_codec()
    the, fox = 257, 260
    assert "".join(stream(codec, [[fox]], prompt=[the])) == " fox"
    assert "".join(stream(codec, [[the], [fox]])) == "the fox"

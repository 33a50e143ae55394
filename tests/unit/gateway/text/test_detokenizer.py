"""Pieces of text join to the whole, and none of them holds half a character."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from paceline.gateway.text.codec import TextCodec
from paceline.gateway.text.streaming import MAX_HELD_TOKENS, REPLACEMENT, Detokenizer
from tests.support import tiny_tokenizer

CODEC = TextCodec(tiny_tokenizer.train(), None)
TOKEN_IDS = st.integers(0, CODEC.vocab_size + 3)
# Half of these ids are bytes, so that broken and split characters are common.
STEPS = st.lists(st.lists(TOKEN_IDS | st.integers(2, 258), max_size=5), max_size=12)


SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["<unk>", "the", "fox", "##es", "\u00e9", ".", "do", "n't", "fox</w>"]
PIECES = ["<unk>", *BYTES, f"{SPACE}the", SPACE, "fox", f"{SPACE}fox"]
FALLBACK = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def codec_of(decoder: Any, pieces: list[str], special: tuple[str, ...] = ()) -> TextCodec:
    """Returns a codec of a vocabulary of these pieces."""
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(list(special))
    return TextCodec(tokenizer, None)


def sentencepiece_codec() -> TextCodec:
    """Returns a codec that spells spaces as U+2581 and unknown characters as bytes, as Llama 2 does."""
    return codec_of(decoders.Sequence([*FALLBACK, decoders.Strip(" ", 1, 0)]), PIECES, ("</s>",))


# With tokens that were added in characters that a byte-level vocabulary has, and has not.
LIBRARY = tiny_tokenizer.train()
LIBRARY.add_tokens(["a b", "é"])
ADDED = TextCodec(LIBRARY, None)
DECODERS = {
    "bytes as Llama 2 has them": sentencepiece_codec(),
    "bytes as Gemma has them": codec_of(decoders.Sequence(FALLBACK), PIECES, ("<eos>",)),
    "byte level": CODEC,
    "Metaspace": codec_of(decoders.Metaspace(), [f"{SPACE}the", SPACE, "fox", "\u00e9", "es"], ("</s>",)),
    "WordPiece": codec_of(decoders.WordPiece(), WORDS, ("[SEP]",)),
    "Fuse": codec_of(decoders.Fuse(), WORDS),
    "BPE": codec_of(decoders.BPEDecoder(), WORDS),
    "none": codec_of(None, WORDS),
}


def stream(
    codec: TextCodec, steps: list[list[int]], prompt: list[int] | None = None, *, special_tokens: bool = False
) -> list[str]:
    """Returns the pieces that the steps give, the flushed rest last."""
    detokenizer = Detokenizer(codec, prompt or [], codec.special_ids(None if special_tokens else ()))
    return [*(detokenizer.feed(step) for step in steps), detokenizer.flush()]


def cut(token_ids: list[int], places: list[int]) -> list[list[int]]:
    """Returns tokens in bursts that begin at these places."""
    ends = sorted({place % (len(token_ids) + 1) for place in places} | {0, len(token_ids)})
    return [token_ids[begin:end] for begin, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_text_is_a_function_of_its_tokens_however_many_come_at_once(name: str, data: st.DataObject) -> None:
    """With drafts, whole characters of Llama 2 and Gemma were lost before a byte that is no text."""
    codec = DECODERS[name]
    ids = st.integers(0, codec.vocab_size - 1)
    common = [*map(int, "你é".encode()), 0xE5] if codec.vocab_size > 256 else [0]
    token_ids = data.draw(st.lists(ids | st.sampled_from([byte + 1 for byte in common]), max_size=30))
    prompt = data.draw(st.lists(ids, max_size=8))
    for special in (False, True):
        one_by_one = "".join(stream(codec, [[each] for each in token_ids], prompt, special_tokens=special))
        for _ in range(3):
            places = data.draw(st.lists(st.integers(0, 30), max_size=6))
            assert "".join(stream(codec, cut(token_ids, places), prompt, special_tokens=special)) == one_by_one
        whole = codec.decode(token_ids, special_tokens=special)
        assert "".join(stream(codec, [token_ids], special_tokens=special)) == whole


@given(token_ids=st.lists(st.integers(0, CODEC.vocab_size + 3) | st.integers(2, 258), max_size=20))
def test_the_text_of_a_byte_level_vocabulary_is_what_the_library_makes_of_it(token_ids: list[int]) -> None:
    assert ADDED.decode(token_ids, special_tokens=True) == LIBRARY.decode(token_ids, skip_special_tokens=False)


@given(token_ids=st.lists(st.integers(1, len(PIECES) - 1) | st.sampled_from([0xE5 + 1, 0xBD + 1]), max_size=20))
def test_bytes_that_are_no_text_cost_no_character_beside_them(token_ids: list[int]) -> None:
    whole = b"".join(map(DECODERS["bytes as Gemma has them"].token_bytes, token_ids)).decode(errors="replace")
    assert DECODERS["bytes as Gemma has them"].decode(token_ids) == whole
    assert DECODERS["bytes as Llama 2 has them"].decode(token_ids) == whole.removeprefix(" ")


@given(steps=STEPS)
def test_pieces_join_to_the_text_of_all_tokens(steps: list[list[int]]) -> None:
    for special in (False, True):
        whole = CODEC.decode(list(itertools.chain(*steps)), special_tokens=special)
        assert "".join(stream(CODEC, steps, special_tokens=special)) == whole


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
    assert pieces == ["$", "", f"{REPLACEMENT}\x05", " ", ""]


def test_special_and_unknown_tokens_have_no_text() -> None:
    assert "".join(stream(CODEC, [[1], [0], [CODEC.vocab_size + 7]])) == ""


def test_the_space_before_the_first_word_is_kept_after_a_prompt() -> None:
    codec = sentencepiece_codec()
    the, fox = 257, 260
    assert "".join(stream(codec, [[fox]], prompt=[the])) == " fox"
    assert "".join(stream(codec, [[the], [fox]])) == "the fox"

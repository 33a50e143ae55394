"""Texts held to grammars by a tokenizer of bytes, whose markers are as models have them."""

from __future__ import annotations

from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.gateway.grammars.partial import Opening

MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
)
SPELLED, TOKENS, SPECIAL_TOKENS = "spelled", "tokens", "special tokens"


def byte_tokenizer(kind: str) -> Tokenizer:
    """Returns a tokenizer of bytes with markers in text, or as added tokens, or as special ones."""
    made = Tokenizer(models.BPE({each: at for at, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens([AddedToken("<eos>", special=True)])
    if kind != SPELLED:
        special = kind == SPECIAL_TOKENS
        made.add_tokens([AddedToken(each, special=special, normalized=False) for each in MARKERS])
    return made


def grammar_vocabulary(tokenizer: Tokenizer, folder: Path) -> LLTokenizer:
    """Returns what matchers know of it."""
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return LLTokenizer(str(path), eos_token=[tokenizer.get_vocab()["<eos>"]])


def opening(tokenizer: Tokenizer, reasoning: str = "", prompt_end: str = "") -> Opening:
    """Returns the opening of an answer."""
    return Opening(reasoning=reasoning, prompt_end=prompt_end, token_of=tokenizer.token_to_id)


def whole(tokenizer: Tokenizer, vocabulary: LLTokenizer, grammar: str, text: str) -> bool | None:
    """Tells whether a text may end so; None: it may not begin so."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    ids = tokenizer.encode(text).ids
    taken = matcher.try_consume_tokens(ids)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.is_accepting()) if taken == len(ids) else None

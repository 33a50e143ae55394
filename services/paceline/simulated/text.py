"""Texts that are a function of their committed tokens alone: the digest of a text chooses its next token.

So a session that goes on elsewhere has the same text, a wrong token or a wrong place in the KV shows, and a drafter
that knows the same digest knows the truth.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Digests = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

# Streams of choices made of a digest, each with its own number.
NEXT, GUESS, LAW = 1, 3, 4
# A sentence has words, and now and then something that ends it, or a string, or a line.
_WORD = re.compile(r" [a-z]{2,}")
_MARKS = (".", ",", '"', "\n")
WORDS_PER_MARK = 8
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_STEP = 0x9E3779B97F4A7C15


def mixed(values: Digests, stream: int = 0) -> Digests:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014) of each value; streams are independent of one another."""
    with np.errstate(over="ignore"):
        state = values + np.uint64(((stream + 1) * _STEP) & (2**64 - 1))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX[0])
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX[1])
        return state ^ (state >> np.uint64(31))


def contributions(token_ids: Ints, positions: Ints, key: int) -> Digests:
    """Parts of tokens in the digest of their text; sums of them, modulo 2**64, are digests."""
    with np.errstate(over="ignore"):
        places = positions.astype(np.uint64) * np.uint64(_STEP) + np.uint64(key)
        return mixed(mixed(places) ^ token_ids.astype(np.uint64))


def next_tokens(words: Ints, digests: Digests, *, others: int = 0) -> Ints:
    """The tokens that follow texts, int64 [n]; with `others` the other words that could be taken for them.

    Args:
        words: Tokens that texts are made of, int64 [n].
        digests: Digests of the texts.
        others: How many wrong guesses are wanted beside each: then int64 [n, 1 + others], the true one first.
    """
    at = (mixed(digests, NEXT) % np.uint64(len(words))).astype(np.int64)
    chosen: Ints = words[(at[:, None] + np.arange(1 + others)) % len(words)]
    return chosen if others else chosen[:, 0]


def words_of(tokenizer: Tokenizer) -> Ints:
    """The tokens of a tokenizer that are a word with its space, and marks among them, int64 [n]."""
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    texts = {
        token_id: tokenizer.decode([token_id]) for token_id in tokenizer.get_vocab().values() if token_id not in special
    }
    words = sorted(token_id for token_id, text in texts.items() if _WORD.fullmatch(text))
    marks = sorted(token_id for token_id, text in texts.items() if text in _MARKS)
    # Any text will do for a tokenizer that knows no words.
    return _mingled(words if len(words) >= len(_MARKS) else sorted(texts), marks)


def _mingled(words: Sequence[int], marks: Sequence[int]) -> Ints:
    """Words with a mark after every few of them."""
    mingled: list[int] = []
    for count, word in enumerate(words, start=1):
        mingled.append(word)
        if marks and count % WORDS_PER_MARK == 0:
            mingled.append(marks[count // WORDS_PER_MARK % len(marks)])
    return np.array(mingled, np.int64)

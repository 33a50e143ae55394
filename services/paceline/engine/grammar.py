"""Grammars: llguidance compiles them for the target's tokenizer, and computes which tokens may follow.

A grammar comes from a stranger. What it may cost is bounded, in compiling as in every step; one that needs more ends
its own session and nothing else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from typing_extensions import override

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.grammar import FIELD, Bits, GrammarState

# Compiled grammars that are kept for the next session.
MOST_KEPT = 64
# Of one grammar: work of its lexer at first and in a step (some 14,000 a ms), items of its parser in a step (some
# 20,000 a ms), states (1 to 2 KiB each), and symbols. The gateway's are the same (`paceline.gateway.grammars`).
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


class Matcher(GrammarState):
    """A text's place in a grammar.

    Args:
        matcher: Used by this object alone.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    @override
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    @override
    def consume(self, token_ids: Sequence[int]) -> int:
        return int(self._matcher.try_consume_tokens(list(token_ids)))

    @override
    def go_back(self, count: int) -> None:
        self._matcher.rollback(count)

    @override
    def allowed(self) -> Bits:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8).copy()
        if self._matcher.is_error():
            raise InvalidRequestError(FIELD, f"cannot be followed any further: {self._matcher.get_error()}")
        return bits

    @override
    def forced(self) -> Sequence[int]:
        return self._matcher.compute_ff_tokens()


class Grammars:
    """Compiles grammars for one tokenizer; threads may share it.

    Args:
        folder: Checkpoint folder with a tokenizer.json.
        vocab_size: Ids of the model, which may have more than the tokenizer.
        eos_token_ids: Of the model.

    Raises:
        ConfigError: The tokenizer is of a kind that llguidance does not know.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        path = folder.expanduser() / "tokenizer.json"
        try:
            self._tokenizer = LLTokenizer(str(path), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(f"{path}: grammars cannot be served with this tokenizer: {error}") from error
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> Matcher:
        """Returns the beginning of a grammar; takes up to seconds the first time, and blocks no other thread.

        Raises:
            InvalidRequestError: It is invalid, or needs more than the bounds allow.
        """
        with self._lock:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
        if known is None:
            known = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
            # The first mask takes longest; copies know what it found.
            known.compute_bitmask()
            if known.is_error():
                raise InvalidRequestError(FIELD, known.get_error())
            with self._lock:
                self._kept[grammar] = known
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return Matcher(known.deep_copy())

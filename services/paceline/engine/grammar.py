"""Grammars: llguidance compiles them for the target's tokenizer, and computes which tokens may follow.

A grammar comes from a stranger. What it may cost is bounded, in compiling as in every step; one that needs more ends
its own session and nothing else. Sessions of one tenant and grammar share what its lexer has found out, which is
bounded, too: once that is used up, each of them is placed anew and goes on with a lexer of its own.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from typing_extensions import override

from paceline.checkpoints.tokenizer import read_tokenizer
from paceline.core.errors import ConfigError, InvalidRequestError, MovedError
from paceline.core.grammar import FIELD, Bits, GrammarState
from paceline.engine.grammar_trial import compiled, try_out

# Compiled grammars that are kept for the next session: one tenant's new ones take the places of its own first.
MOST_KEPT = 64
# Grammars that need no further trial, 32 bytes each: a process for each costs a tenth of a second.
MOST_TRIED = 4096
# Compiling yields to steps and to requests: it takes the time of one tenant, and not of others.
NICENESS = 5


class Matcher(GrammarState):
    """A text's place in a grammar.

    Args:
        matcher: Used by this object alone.
        shared_used_up: Called when it fails, if other sessions share its lexer; None: they do not.
    """

    def __init__(self, matcher: LLMatcher, shared_used_up: Callable[[], None] | None = None) -> None:
        self._matcher = matcher
        self._shared_used_up = shared_used_up

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
            self._fail()
        return bits

    def _fail(self) -> NoReturn:
        problem = f"cannot be followed any further: {self._matcher.get_error()}"
        if self._shared_used_up is None:
            raise InvalidRequestError(FIELD, problem)
        self._shared_used_up()
        raise MovedError(f"{FIELD}: {problem}")

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
        text = read_tokenizer(folder.expanduser()).to_str()
        try:
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(f"{folder}: grammars cannot be served with this tokenizer: {error}") from error
        # By tenant and grammar, those used last at the end.
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        # Digests of grammars that passed their trial, which knows neither tenant nor tokenizer.
        self._tried: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str, tenant: str = "", *, alone: bool = False) -> Matcher:
        """Returns the beginning of a grammar; takes up to a second the first time.

        Args:
            grammar: As llguidance writes it.
            tenant: Whose the session is.
            alone: Whether the session shares nothing with others.

        Raises:
            InvalidRequestError: It is invalid, or needs more than the bounds allow.
            UnavailableError: The machine is too busy.
        """
        key = (tenant, grammar)
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
        if known is None:
            self._try_out(grammar)
        if alone:
            return Matcher(compiled(self._tokenizer, grammar))
        if known is None:
            known = compiled(self._tokenizer, grammar)
            self._keep(key, known)
        return Matcher(known.deep_copy(), partial(self._forget, key, known))

    def _try_out(self, grammar: str) -> None:
        """Tries a grammar in another process, unless one like it has passed lately."""
        digest = hashlib.sha256(grammar.encode()).digest()
        with self._lock:
            if digest in self._tried:
                self._tried.move_to_end(digest)
                return
        try_out(grammar)
        with self._lock:
            self._tried[digest] = None
            if len(self._tried) > MOST_TRIED:
                self._tried.popitem(last=False)

    def _keep(self, key: tuple[str, str], matcher: LLMatcher) -> None:
        """Keeps a grammar; if there is no room, the oldest of a tenant that has most of them goes."""
        with self._lock:
            self._kept[key] = matcher
            if len(self._kept) > MOST_KEPT:
                counts = Counter(tenant for tenant, _ in self._kept)
                most = max(counts.values())
                del self._kept[next(each for each in self._kept if counts[each[0]] == most)]

    def _forget(self, key: tuple[str, str], used_up: LLMatcher) -> None:
        with self._lock:
            if self._kept.get(key) is used_up:
                del self._kept[key]

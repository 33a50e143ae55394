"""Grammars: llguidance compiles them for the target's tokenizer, and computes which tokens may follow.

A grammar comes from a stranger. Its cost is bounded, in compiling as in every step; a grammar that needs more ends
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
from typing import NamedTuple, NoReturn

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from typing_extensions import override

from paceline.checkpoints.tokenizer import read_tokenizer
from paceline.core.errors import ConfigError, InvalidRequestError, MovedError
from paceline.core.grammar import FIELD, Bits, GrammarState
from paceline.engine.grammar_trial import check_forced, compiled, try_out

# Compiled grammars that are kept for the next session: one tenant's new ones take the places of its own first.
MOST_KEPT = 64
# Grammars that need no further trial, 32 bytes each: a process for each costs a tenth of a second.
MOST_TRIED = 4096
# Compiling yields to steps and to requests: it takes the time of one tenant, and not of others.
NICENESS = 5
# Bytes of forced text up to which it is cut into tokens for a guess, at each place anew: a mask cuts it once.
MOST_AHEAD_BYTES = 1024


class _Forced(NamedTuple):
    """Tokens that the grammar leaves no choice of.

    Attributes:
        start: Tokens of the text before them.
    """

    start: int
    token_ids: Sequence[int]


class Matcher(GrammarState):
    """A text's place in a grammar.

    Masks of forced text are those of its usual spelling. Finding it takes microseconds a byte, so it is computed once
    for all places of such a text, and kept while the text goes on by it.

    Args:
        matcher: Used by this object alone.
        mask_bytes: Size of a mask.
        too_much: Called with what is wrong when it needs more than the bounds allow.
        shared_used_up: Called when it fails, if other sessions share its lexer; None: they do not.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        mask_bytes: int,
        too_much: Callable[[str], None] = lambda _: None,
        shared_used_up: Callable[[], None] | None = None,
    ) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._too_much = too_much
        self._shared_used_up = shared_used_up
        # Tokens consumed, and forced texts around here, the last one at the end.
        self._count = 0
        self._known: list[_Forced] = []

    @property
    @override
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    @override
    def consume(self, token_ids: Sequence[int]) -> int:
        forced = self._forced_here()
        if (differs := _first_difference(token_ids, forced)) is not None:
            token_ids = token_ids[:differs]
        count = int(self._matcher.try_consume_tokens(list(token_ids)))
        self._count += count
        return count

    @override
    def go_back(self, count: int) -> None:
        self._matcher.rollback(count)
        self._count -= count
        # Another way may lead elsewhere.
        while self._known and self._known[-1].start > self._count:
            self._known.pop()

    @override
    def allowed(self) -> Bits:
        if forced := self._forced_here() or self._find_forced():
            bits = np.zeros(self._mask_bytes, np.uint8)
            bits[forced[0] >> 3] = 1 << (forced[0] & 7)
            return bits
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
        known = self._forced_here()
        if known or not 0 < len(self._matcher.compute_ff_bytes()) <= MOST_AHEAD_BYTES:
            return known
        return self._matcher.compute_ff_tokens()

    def _forced_here(self) -> Sequence[int]:
        """Tokens known to be forced from here on."""
        for start, token_ids in reversed(self._known):
            if self._count < start + len(token_ids):
                return token_ids[self._count - start :]
        return ()

    def _find_forced(self) -> Sequence[int]:
        """Finds what is forced from here on, and keeps it."""
        try:
            if not check_forced(self._matcher):
                return ()
        except InvalidRequestError as error:
            self._too_much(error.problem)
            raise
        token_ids = self._matcher.compute_ff_tokens()
        if token_ids:
            # Entries further back are unused, unless guesses are taken back.
            self._known = [*self._known[-1:], _Forced(self._count, token_ids)]
        return token_ids


def _first_difference(token_ids: Sequence[int], forced: Sequence[int]) -> int | None:
    """Where tokens first leave a forced text; None: they do not, or go beyond it."""
    both = enumerate(zip(token_ids, forced, strict=False))
    return next((place for place, (token_id, only) in both if token_id != only), None)


class Grammars:
    """Compiles grammars for one tokenizer; threads may share it.

    Args:
        folder: Checkpoint folder with a tokenizer.json.
        vocab_size: Ids of the model, which may have more than the tokenizer.
        eos_token_ids: The model's end tokens.

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
        # Grammars that had their trial, which knows neither tenant nor tokenizer, by their digests: what is wrong with
        # one that passed it, and needed too much in a step; empty: nothing.
        self._tried: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str, tenant: str = "", *, alone: bool = False) -> Matcher:
        """Returns the beginning of a grammar; takes up to a second the first time.

        Args:
            grammar: As llguidance writes it.
            tenant: The session's tenant.
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
        new = partial(Matcher, mask_bytes=self._mask_bytes, too_much=partial(self._refuse, key))
        if alone:
            return new(compiled(self._tokenizer, grammar))
        if known is None:
            known = compiled(self._tokenizer, grammar)
            self._keep(key, known)
        return new(known.deep_copy(), shared_used_up=partial(self._forget, key, known))

    @property
    def _mask_bytes(self) -> int:
        return -(-self._tokenizer.vocab_size // 8)

    def _try_out(self, grammar: str) -> None:
        """Tries a grammar in another process, unless one like it has passed lately.

        Raises:
            InvalidRequestError: It did not pass, or did, and needed too much later.
        """
        digest = _digest(grammar)
        with self._lock:
            problem = self._tried.get(digest)
            if problem is not None:
                self._tried.move_to_end(digest)
        if problem:
            raise InvalidRequestError(FIELD, problem)
        if problem is None:
            try_out(grammar)
            self._note(digest, "")

    def _note(self, digest: bytes, problem: str) -> None:
        with self._lock:
            self._tried[digest] = problem
            if len(self._tried) > MOST_TRIED:
                self._tried.popitem(last=False)

    def _refuse(self, key: tuple[str, str], problem: str) -> None:
        """Further sessions of a grammar that needs too much do not come as far as a step."""
        self._note(_digest(key[1]), problem)
        with self._lock:
            self._kept.pop(key, None)

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


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()

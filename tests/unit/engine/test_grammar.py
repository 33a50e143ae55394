"""Grammars of one verifier: what sessions share, and what none of them may cost another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.core.errors import InvalidRequestError, MovedError
from paceline.core.grammar import Bits, GrammarState, OutputGrammar
from paceline.engine.grammar import Grammars
from paceline.engine.identity import model_identity

IDENTITY = model_identity(DEMO_TARGET)
NAMES = [f"text_{number}" for number in range(12)]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 2000 + 100 * at} for at, name in enumerate(NAMES)},
    "required": NAMES,
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(DEMO_TARGET, IDENTITY.vocab_size, IDENTITY.eos_token_ids)


def output(state: GrammarState) -> OutputGrammar:
    stops = frozenset(IDENTITY.eos_token_ids)
    return OutputGrammar(state, vocab_size=IDENTITY.vocab_size, stop_ids=stops, eos_token_ids=IDENTITY.eos_token_ids)


def text(tokenizer: Tokenizer, length: int) -> list[int]:
    """The tokens of an answer whose strings have `length` characters each."""
    return tokenizer.encode(json.dumps(dict.fromkeys(NAMES, "a b" * (length // 3))), add_special_tokens=False).ids


def exhaust(grammar: OutputGrammar, token_ids: list[int]) -> None:
    """Goes on as a session does, a mask before each token, until the lexer has no states left."""
    for token_id in token_ids:
        grammar.after()
        grammar.push((token_id,))


def test_a_long_answer_uses_up_its_own_lexer_and_another_session_of_the_grammar_goes_on(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    long, short = text(tokenizer, 2000), text(tokenizer, 30)
    modest, greedy = output(grammars.compile(GRAMMAR)), output(grammars.compile(GRAMMAR))
    modest.push(short[:10])
    with pytest.raises(MovedError, match="too many states"):
        exhaust(greedy, long)
    # The modest session notices at most that it is placed anew, and then shares nothing.
    with pytest.raises(MovedError):
        modest.after()
    modest = output(grammars.compile(GRAMMAR, alone=True))
    modest.push(short[:10])
    exhaust(modest, short[10:])
    # Whoever comes next gets a lexer that is not used up.
    exhaust(output(grammars.compile(GRAMMAR)), short)


def test_a_session_alone_that_needs_more_than_the_bounds_ends_for_its_own_fault(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidRequestError, match=r"grammar: cannot be followed any further: .*too many states"):
        exhaust(output(grammars.compile(GRAMMAR, alone=True)), text(tokenizer, 2000))


def test_what_the_grammar_forbids_is_said_whatever_others_share(grammars: Grammars) -> None:
    shared = output(grammars.compile(GRAMMAR))
    with pytest.raises(InvalidRequestError, match="forbids the tokens"):
        shared.push((0, 1, 2))


class Unmasked(GrammarState):
    """A grammar of any text, which may end anywhere; a mask of it is never to be computed."""

    may_end = True

    def consume(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def go_back(self, count: int) -> None:
        del count

    def allowed(self) -> Bits:
        raise AssertionError("a mask takes milliseconds, and a drafter may guess an end at every place")

    def forced(self) -> Sequence[int]:
        return ()


def test_whether_a_text_may_end_behind_a_guess_is_told_without_a_mask() -> None:
    grammar, end = output(Unmasked()), IDENTITY.eos_token_ids[0]
    assert grammar.permits((5, 6, end))
    assert not grammar.permits((5, end, 6))

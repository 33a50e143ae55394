"""Grammars of one verifier: what sessions share, and what none of them may cost another."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.core.errors import InvalidRequestError, MovedError, UnavailableError
from paceline.core.grammar import Bits, GrammarState, OutputGrammar
from paceline.engine import grammar as compiling
from paceline.engine import grammar_trial
from paceline.engine.grammar import MOST_KEPT, Grammars
from paceline.engine.grammar_trial import try_out
from paceline.engine.loading import model_identity

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


def of_schema(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def of_regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


NESTED: Any = {"type": "string"}
for _ in range(400):
    NESTED = {"type": "array", "items": NESTED}


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (of_schema({"properties": {"a": {"items": {"type": "foo"}}}}), "Invalid type: foo"),
        (of_schema({"type": "object", "anyOf": [{}, {"not": {}}]}), "Unimplemented"),
        (of_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (of_schema(NESTED), "recursion limit exceeded"),
        (of_regex("("), "unclosed group"),
        ("start: foo", 'unknown name: "foo"'),
        ("", "Empty grammar"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_what_is_wrong(grammar: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        try_out(grammar)
    assert refused.value.field == "grammar"
    assert problem in refused.value.problem


PRODUCTS = [{"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(6)]} for i in range(8)]
PATTERNS = [{"type": "string", "pattern": f"^(.*a.{{{i}}})*$"} for i in range(99)]
# Bounded by llguidance's limits, or short and without end or filling the memory.
HOSTILE = {
    "megabytes": of_schema({"enum": ["x" * 100] * 20_000}),
    "a remainder": of_schema({"type": "integer", "multipleOf": 999_983}),
    "remainders": of_schema({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}),
    "products": of_schema({"allOf": PRODUCTS}),
    "names by patterns": of_schema({"type": "object", "patternProperties": {f"^a{i}.*": {} for i in range(900)}}),
    "many patterns": of_schema({"properties": {f"k{i}": {"pattern": f"^(.*a.{{{i}}}b)*$"} for i in range(900)}}),
    "a pattern of patterns": of_schema({"allOf": PATTERNS}),
    "intersections": "start: T\nT: " + " & ".join(f"/(.*a.{{{i}}}b)*/" for i in range(9)),
    "letters": of_regex("".join(rf"(\w{{{i},}}|\p{{L}}+)?" for i in range(4000))),
    "repetition": of_regex("(((a{1,999}){1,999}){1,999}){1,999}"),
    "alternatives": of_regex("|".join(f"(.*w{index}.*)" for index in range(8000))),
    "lark": "start: " + " | ".join(f"r{i}" for i in range(4000)) + "".join(
        f"\nr{i}: /[a-z]{{{i % 50 + 1},}}x{i}/ start" for i in range(4000)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_takes_a_bounded_time(name: str) -> None:
    with suppress(InvalidRequestError, UnavailableError):
        try_out(HOSTILE[name])


def test_what_takes_too_long_is_refused_with_the_bound() -> None:
    with pytest.raises(InvalidRequestError, match=r"grammar: takes more than 0\.8 s, or too much memory"):
        try_out(HOSTILE["intersections"])


def test_a_machine_too_busy_to_answer_does_not_refuse_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "PATIENCE_S", 0.001)
    with pytest.raises(UnavailableError, match="too busy"):
        try_out(GRAMMAR)


def test_a_trial_waits_for_its_processor_time_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had 10 s of the clock, and at a load of 20 a key's only grammar got 503."""
    waited: list[float] = []
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda *_, timeout, **__: waited.append(timeout) or Mock(returncode=0, stdout=b"", stderr=b""),
    )
    try_out(GRAMMAR)
    load, weight_of_nice = 20, 3
    assert waited == [pytest.approx(grammar_trial.PATIENCE_S)]
    assert waited[0] > grammar_trial.MOST_S * load * weight_of_nice


WORDS = "def foo(x): return x and y "
# What comes next for sure, and how long it is, after a choice that a trial does not make.
CHOICE: dict[str, Any] = {"enum": ["x", "y"]}
LONG: dict[str, dict[str, Any]] = {
    "a constant": {"const": WORDS * 4000},
    "constants": {"type": "array", "items": {"const": WORDS * 30}, "minItems": 300, "maxItems": 300},
    "a repetition": {"type": "string", "pattern": "^(abc){9000}$"},
    "keys": {"type": "object", "properties": {f"key {at}" * 20: {"const": at} for at in range(200)},
             "required": [f"key {at}" * 20 for at in range(200)], "additionalProperties": False},
}  # fmt: skip
LAID_OUT = {"whitespace_flexible": False}


def of_long(name: str, *, first: bool) -> str:
    names = ["b"] if first else ["a", "b"]
    properties = {"a": CHOICE, "b": LONG[name]}
    schema = {"properties": {each: properties[each] for each in names}, "required": names}
    whole = {"type": "object", **schema, "additionalProperties": False, "x-guidance": LAID_OUT}
    return LLMatcher.grammar_from_json_schema(json.dumps(whole))


@pytest.mark.parametrize("name", LONG)
def test_a_grammar_that_begins_with_a_long_forced_text_does_not_pass_its_trial(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"grammar: leaves no choice of \d+ bytes .* at most 16384"):
        try_out(of_long(name, first=True))


@pytest.mark.parametrize("name", LONG)
def test_a_long_forced_text_behind_a_choice_ends_its_session_and_the_next_ones_do_not_begin(
    grammars: Grammars, tokenizer: Tokenizer, name: str
) -> None:
    """A schema of 3 KB forced 3 MB, and each of its masks took a second."""
    grammar = of_long(name, first=False)
    session = output(grammars.compile(grammar))
    session.push(tokenizer.encode('{"a":"x', add_special_tokens=False).ids)
    assert not session.forced(), "nothing of it is cut into tokens"
    with pytest.raises(InvalidRequestError, match=r"leaves no choice of \d+ bytes"):
        session.after()
    with pytest.raises(InvalidRequestError, match=r"leaves no choice of \d+ bytes"):
        grammars.compile(grammar, "another tenant")


class Counted:
    """A matcher that counts how often it cuts a forced text into tokens."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.num_cut, self._matcher = 0, matcher

    def compute_ff_tokens(self) -> list[int]:
        self.num_cut += 1
        return self._matcher.compute_ff_tokens()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_a_forced_text_is_cut_into_tokens_once_for_all_of_its_masks_and_guesses(grammars: Grammars) -> None:
    """Audit 4, b02: a constant of 118 KB cost 50 ms for each mask of each step, of everybody."""
    state = grammars.compile(of_schema({"const": WORDS * 500}))
    state._matcher = counted = Counted(state._matcher)  # type: ignore[assignment]
    session = output(state)
    text = [*session.forced()]
    while bits := np.flatnonzero(np.unpackbits(session.after().bits, bitorder="little")).tolist():
        if bits[0] in IDENTITY.eos_token_ids:
            break
        text += bits
        following = session.forced(bits)
        assert session.after([*bits, *following[:3]]).bits.any()
        assert not following or not session.permits([*bits, *following[:3], 65]), "another spelling is masked"
        session.push(bits)
    assert len(text) > 3000
    assert counted.num_cut <= 3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["names", "choices", "a regex", "free text"])
def test_masks_are_the_librarys_own_wherever_a_text_goes(grammars: Grammars, name: str, seed: int) -> None:
    grammar = {
        "names": of_schema({**SCHEMA, "x-guidance": LAID_OUT}),
        "choices": of_schema(
            {"enum": ["a long answer of one kind", "a long answer of another", "12 345 678", "  \n  x"]}
        ),
        "a regex": of_regex(r"(alpha beta|alpha gamma){3,5} and [0-9]{1,3}(,000){2} \u00e9\u00e9"),
        "free text": of_schema({"type": "array", "items": {"anyOf": [{"type": "string"}, {"const": "the same"}]}}),
    }[name]
    state, luck = grammars.compile(grammar), np.random.default_rng(seed)
    plain = grammars.compile(grammar)._matcher
    for _ in range(60):
        path, bits = list[int](), state.allowed()
        for _ in range(int(luck.integers(1, 5))):
            assert plain.compute_bitmask()[: len(bits)] == bits.tobytes()
            choices = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if not len(choices) or (token_id := int(luck.choice(choices))) in IDENTITY.eos_token_ids:
                break
            assert state.consume([token_id]) == plain.try_consume_tokens([token_id]) == 1
            path.append(token_id)
            bits = state.allowed()
        if not path:
            break
        back = int(luck.integers(0, len(path)))
        state.go_back(back)
        plain.rollback(back)


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grammars that are compiled from now on; nothing is tried out in processes of their own."""
    done, compiled = list[str](), compiling.compiled
    monkeypatch.setattr(compiling, "try_out", lambda _: None)
    monkeypatch.setattr(
        compiling, "compiled", lambda tokenizer, grammar: done.append(grammar) or compiled(tokenizer, grammar)
    )
    return done


def test_a_grammar_has_one_trial_whoever_brings_it(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each of a hundred tenants with the same schema would be all that a verifier compiles."""
    tried: list[str] = []
    monkeypatch.setattr(compiling, "try_out", tried.append)
    for number in range(MOST_KEPT + 10):
        grammars.compile(of_regex("one"), f"tenant{number}")
    assert tried == [of_regex("one")]


def test_new_grammars_of_one_tenant_push_out_its_own_and_no_other(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 tiny new grammars of one key made another key's schema new again, each time."""
    tried = compilations(monkeypatch)
    modest = of_regex("modest")
    grammars.compile(modest, "modest")
    for number in range(2 * MOST_KEPT):
        grammars.compile(of_regex(f"greedy{number}"), "greedy")
    assert len(tried) == 1 + 2 * MOST_KEPT
    grammars.compile(modest, "modest")
    grammars.compile(of_regex(f"greedy{2 * MOST_KEPT - 1}"), "greedy")
    assert len(tried) == 1 + 2 * MOST_KEPT, "what is kept is not compiled again"
    grammars.compile(of_regex("greedy0"), "greedy")
    grammars.compile(modest, "other")
    assert tried[1 + 2 * MOST_KEPT :] == [of_regex("greedy0"), modest], "tenants share nothing"

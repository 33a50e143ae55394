"""What clients ask of an answer's form becomes a grammar, or is refused within a second by its name and place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError, OverloadedError, UnavailableError
from paceline.gateway.access.allowance import Allowance
from paceline.gateway.access.callers import Caller, become
from paceline.gateway.api.openai.bodies import CompletionBody, parse_body
from paceline.gateway.api.openai.structured import grammar_of
from paceline.gateway.grammars import compiling
from paceline.gateway.grammars.compiling import (
    LAYOUT,
    MOST_S,
    Checker,
    grammar_of_choices,
    grammar_of_json_schema,
    grammar_of_lark,
    grammar_of_regex,
    loosened,
)
from paceline.gateway.http.fields import UnknownFields

NESTED: dict[str, Any] = {"type": "string"}
for _ in range(400):
    NESTED = {"type": "array", "items": NESTED}


def asked(**fields: Any) -> str:
    return grammar_of(parse_body(CompletionBody, {"prompt": "x", **fields}, UnknownFields(strict=False)))


def refusal(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        asked(**fields)
    return caught.value


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": schema_format({"type": "object", "properties": {"a": {"const": None}}})},
        {"response_format": schema_format({"type": "object"}, strict=True, description=None)},
        {"structured_outputs": {"json": {"type": "integer"}}},
        {"structured_outputs": {"json": '{"type": "integer"}', "regex": None}},
        {"structured_outputs": {"json": {"type": "array"}, "whitespace_pattern": "[ ]?"}},
        {"structured_outputs": {"regex": "a+b"}},
        {"structured_outputs": {"choice": ["yes", 'no "quoted"', "völlig egal"]}},
        {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
        {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json": {"type": "integer"}},
        {"guided_regex": "[0-9]+"},
        {"guided_choice": ["a"]},
        {"guided_grammar": 'start: "a"'},
    ],
)
def test_every_way_to_ask_makes_a_grammar(fields: dict[str, Any]) -> None:
    assert asked(**fields)


def test_whoever_asks_for_nothing_gets_none() -> None:
    assert asked() == asked(response_format={"type": "text"}) == asked(structured_outputs={}) == ""


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "must be one of text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
        ({"response_format": schema_format(3)}, "response_format.json_schema.schema", "an object"),
        (
            {"response_format": schema_format({"properties": {"a": {"items": {"type": "foo"}}}})},
            "response_format.json_schema.schema",
            "properties.a.items: Invalid type: foo",
        ),
        ({"guided_json": {"type": "object", "anyOf": [{}, {"not": {}}]}}, "guided_json", "anyOf[1]: Unimplemented"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "must be a string"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "from 1 to"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", "must not be empty"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "excludes"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "excludes response_format"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", 'unknown name: "foo"'),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name_and_place(fields: dict[str, Any], field: str, problem: str) -> None:
    error = refusal(**fields)
    assert error.field == field
    assert problem in error.problem


def test_a_schema_that_no_grammar_holds_is_followed_loosely_where_it_is_not_strict() -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert "oneOf" in refusal(response_format=schema_format(schema)).problem
    assert asked(response_format=schema_format(schema, strict=False))


HOSTILE: dict[str, dict[str, Any]] = {
    "megabytes": {"guided_json": {"enum": ["x" * 100] * 20_000}},
    "nested": {"guided_json": NESTED},
    "a remainder": {"guided_json": {"type": "integer", "multipleOf": 999_983}},
    "remainders": {"guided_json": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}},
    "products": {
        "guided_json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(6)]} for i in range(8)
            ]
        }
    },
    "many patterns": {"guided_json": {"properties": {f"k{i}": {"pattern": f"^(.*a.{{{i}}}b)*$"} for i in range(900)}}},
    "repetition": {"guided_regex": "(((a{1,999}){1,999}){1,999}){1,999}"},
    "alternatives": {"guided_regex": "|".join(f"(.*w{index}.*)" for index in range(8000))},
    "lark": {"guided_grammar": "start: " + " | ".join(f"r{i}" for i in range(4000)) + "".join(
        f"\nr{i}: /[a-z]{{{i % 50 + 1},}}x{i}/ start" for i in range(4000))},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_takes_a_bounded_time(name: str) -> None:
    grammar_of_regex("a")  # The process that compiles is there.
    started_s = time.monotonic()
    with suppress(InvalidRequestError, UnavailableError):
        assert asked(**HOSTILE[name])
    # A guard against minutes, far above the bound.
    assert time.monotonic() - started_s < 20
    assert grammar_of_regex("b"), "the next one is served"


def test_what_takes_too_long_is_refused_and_the_next_one_served(monkeypatch: pytest.MonkeyPatch) -> None:
    # The bound is one of processor time: a busy machine must not interfere.
    monkeypatch.setattr(compiling, "PATIENCE_S", 60.0)
    with pytest.raises(InvalidRequestError, match="schema: takes more than"):
        grammar_of_json_schema({"type": "integer", "multipleOf": 999_979}, field="schema")
    assert grammar_of_choices(["a", "b"])
    assert grammar_of_lark('start: "c"')


@pytest.fixture
def checker() -> Iterator[Checker]:
    """A process whose callers have used nothing yet."""
    checker = Checker()
    yield checker
    checker.close()


def ask_as(name: str, checker: Checker, value: str) -> dict[str, str]:
    def asked() -> dict[str, str]:
        become(Caller(name=name))
        return checker.ask({"kind": "regex", "value": value, "options": None})

    return copy_context().run(asked)


def test_a_key_that_has_used_up_its_time_of_compiling_waits_and_others_do_not(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 grammars of 0.8 s each kept the one compiler, and each verifier after it, from all other keys for a minute."""
    now_s = 1000.0
    checker._allowance = Allowance(burst=1.0, per_s=0.1, clock=lambda: now_s)
    monkeypatch.setattr(checker, "_answer", lambda line: {"grammar": line.decode(), "seconds": 0.8})
    for value in ("a", "b"):
        assert "seconds" not in ask_as("greedy", checker, value)
    with pytest.raises(OverloadedError, match="'greedy' has had its 10 s of compiling grammars") as refused:
        ask_as("greedy", checker, "c")
    assert refused.value.retry_after_s == pytest.approx(6.0)
    assert ask_as("greedy", checker, "a"), "what is known is free"
    assert ask_as("modest", checker, "c")
    now_s += 6.01
    assert ask_as("greedy", checker, "d")


def test_without_keys_nobody_waits(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "_answer", lambda line: {"grammar": line.decode(), "seconds": 60.0})
    for value in "abc":
        assert ask_as("", checker, value)


def test_a_grammar_costs_the_time_that_its_process_computed_and_one_that_ends_it_all_it_may(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[float] = []
    monkeypatch.setattr(checker._allowance, "use", lambda caller, amount: used.append(amount))
    monkeypatch.setattr(compiling, "PATIENCE_S", 60.0)
    assert ask_as("alice", checker, "a+b")
    checker.ask({"kind": "json_schema", "value": {"type": "integer", "multipleOf": 999_979}, "options": LAYOUT})
    # Of a quick one no time may be seen.
    assert 0 <= used[0] < 0.5
    assert used[1] == MOST_S


def test_a_machine_too_busy_to_answer_costs_no_more_than_it_may_have_computed(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: bytes) -> dict[str, str]:
        raise UnavailableError("too busy")

    used: list[float] = []
    monkeypatch.setattr(checker._allowance, "use", lambda caller, amount: used.append(amount))
    monkeypatch.setattr(checker, "_answer", busy)
    with pytest.raises(UnavailableError):
        ask_as("alice", checker, "a")
    assert 0 <= used[0] <= MOST_S


def test_what_no_grammar_holds_is_left_out_of_a_loosened_schema() -> None:
    node = {"properties": {"next": {"$ref": "#"}, "word": {"pattern": r"\bx"}, "kept": {"pattern": "^y"}}}
    assert loosened({"type": "string"}, field="tools") == {"type": "string"}
    loose = loosened(node, field="tools")
    grammar = grammar_of_json_schema(loose, exact=False)
    assert '"^y"' in grammar
    assert "\\bx" not in grammar


@pytest.mark.parametrize(("strict", "served"), [(False, True), (True, False), (None, False)])
def test_a_format_that_is_not_strict_ignores_what_no_grammar_holds(strict: bool | None, served: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "(?!x)"}},
        "additionalProperties": False,
    }
    wrapper = {"name": "n", "schema": schema, **({} if strict is None else {"strict": strict})}
    fields = {"model": "m", "prompt": "p", "response_format": {"type": "json_schema", "json_schema": wrapper}}
    body = parse_body(CompletionBody, fields, UnknownFields(strict=False))
    if served:
        assert grammar_of(body)
    else:
        with pytest.raises(InvalidRequestError, match=r"response_format\.json_schema\.schema: .*look-around"):
            grammar_of(body)

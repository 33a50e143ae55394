"""Calls amid text and what follows reasoning are bound; all else is free. Readers read calls as the schema says."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import Tokenizer

from paceline.core.errors import InvalidRequestError
from paceline.engine.grammar_trial import compiled
from paceline.gateway.api.openai.tools import read_toolbox
from paceline.gateway.grammars.calls import FAMILIES, calls_amid_text, enforced_calls
from paceline.gateway.grammars.formats import (
    grammar_of_choices,
    grammar_of_json_schema,
    grammar_of_lark,
    grammar_of_regex,
)
from paceline.gateway.grammars.partial import Opening, after_reasoning
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.message.form import (
    DEEPSEEK_R1,
    GEMMA4,
    GPT_OSS,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    QWEN3,
    QWEN3_CODER,
    MessageForm,
)
from paceline.gateway.message.reader import CallArguments, CallBegin
from paceline.gateway.message.tools import Toolbox
from tests.support.grammar_texts import SPELLED, byte_tokenizer, grammar_vocabulary, opening, whole

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


NO_OPENING = Opening(reasoning="", prompt_end="", token_of=lambda _: None)


def toolbox(*strict: bool, parameters: dict[str, Any] = SCHEMA, parallel: bool = True, choice: Any = "auto") -> Toolbox:
    given = [
        {"type": "function", "function": {"name": name, "parameters": parameters, "strict": each}}
        for name, each in zip("fg", strict, strict=False)
    ]
    return read_toolbox(given, choice, parallel, UnknownFields(strict=False))


AMID = {
    HERMES: [
        ("hello", True),
        ("a < b <tool", True),
        ("hi\n<tool_call>", False),
        ('hi\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "g"', False),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\nso', True),
        ('<tool_call>\n{"name": "f", "arguments": {"b"', None),
        ('<tool_call>\n{"name": "x"', None),
        ("<tool_call>\nsorry", None),
        ('<tool_call>\n{"name": "g", "arguments": {"b": [null]}}\n</tool_call>', True),
    ],
    MISTRAL: [
        ("hello", True),
        ('hi[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 2}}]', True),
        ('[TOOL_CALLS]f{"a": 1}', True),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', True),
        ('[TOOL_CALLS]f[ARGS]{"b"', None),
        ("[TOOL_CALLS]sorry", None),
    ],
    LLAMA3_JSON: [
        ("hello", True),
        ('{"n": 1}', True),
        ('{"name": "f", "parameters": {"a": 1}}', True),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', True),
        ('{"name": "f", "parameters": {"b"', None),
        ('{"name": "x"', None),
    ],
    QWEN3_CODER: [
        ("hello", True),
        ("a < b <func", True),
        ("hi\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", True),
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", False),
        ("<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\nso", True),
        ("<tool_call>\n<function=g>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\nso", True),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx", None),
        ("<tool_call>\n<function=f>\n<parameter=b>", None),
        ("<tool_call>\n<function=f>\n</function>", None),
        ("hm <function=x", None),
        ("<tool_call>\nsorry", None),
    ],
    PYTHONIC: [
        ("hello", True),
        ("[1, 2]", True),
        ("[f(a=1)]", True),
        ('[f(a=1), g(x=[1, null], y="b"), g()]', True),
        ("<|python_start|>[f(a=1)]<|python_end|>", True),
        ("<|python_start|>\n[f(b", None),
        ("[f(a=1", False),
        ("[f()", None),
        ("[f(b", None),
        ("[f(a=true", None),
        ("[x(", None),
    ],
}


@pytest.mark.parametrize("family", AMID)
def test_text_is_free_until_a_call_begins(tokenizer: Tokenizer, vocabulary: LLTokenizer, family: str) -> None:
    grammar = calls_amid_text(toolbox(True, False), family, opening(tokenizer))
    assert [(text, whole(tokenizer, vocabulary, grammar, text)) for text, _ in AMID[family]] == AMID[family]


def test_one_call_is_all_where_calls_are_not_parallel(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    grammar = calls_amid_text(toolbox(True, parallel=False), HERMES, opening(tokenizer))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert whole(tokenizer, vocabulary, grammar, call) is True
    assert whole(tokenizer, vocabulary, grammar, call + call) is None


def test_calls_in_reasoning_are_no_calls(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    grammar = calls_amid_text(toolbox(True), HERMES, opening(tokenizer, QWEN3, "<think>\n"))
    text = "I could call it</think>\nWell: <tool_call>\n"
    assert whole(tokenizer, vocabulary, grammar, text) is False
    assert whole(tokenizer, vocabulary, grammar, text + "x") is None


def test_where_some_tools_are_allowed_no_other_is_called(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    tools = toolbox(False, False, choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (tools.names, tools.bound, tools.enforced) == (["g"], True, False)
    grammar = calls_amid_text(tools, HERMES, opening(tokenizer))
    assert whole(tokenizer, vocabulary, grammar, '<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>') is True
    assert whole(tokenizer, vocabulary, grammar, '<tool_call>{"name": "f"') is None


MANY_KINDS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "hourly": {"type": "boolean"},
        "where": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["unit", "where"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "integer"}, "name": {"enum": ["x", None]}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
}
BEGUN = {
    HERMES: "<tool_call>",
    LLAMA3_JSON: '{"name"',
    MISTRAL: "[TOOL_CALLS]",
    PYTHONIC: "[f(",
    QWEN3_CODER: "<tool_call>\n<function=",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_a_bound_call_says_is_read_as_arguments_that_validate(family: str, tmp_path) -> None:
    tokenizer = byte_tokenizer(SPELLED)
    vocabulary = grammar_vocabulary(tokenizer, tmp_path)
    tools = toolbox(True, parameters=MANY_KINDS, parallel=False)
    grammar = calls_amid_text(tools, family, opening(tokenizer))
    seen: set[str] = set()
    for seed in range(40):
        text = any_text(tokenizer, vocabulary, grammar, BEGUN[family], random.Random(seed))
        form = MessageForm(tool_calls=family, types=tools.types if family == QWEN3_CODER else {})
        reader = form.reader()
        parts = [*reader.feed(text), *reader.finish()]
        assert [part.name for part in parts if isinstance(part, CallBegin)] == ["f"], text
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        jsonschema_rs.validate(MANY_KINDS, json.loads(arguments))
        seen.add(arguments)
    assert len(seen) > 20


def any_text(tokenizer: Tokenizer, vocabulary: LLTokenizer, grammar: str, begun: str, rng: random.Random) -> str:
    """Goes on with a text at random as a grammar allows, and ends it where it may end."""
    matcher, mask = LLMatcher(vocabulary, grammar, log_level=0), allocate_token_bitmask(1, vocabulary.vocab_size)
    ids = tokenizer.encode(begun).ids
    assert matcher.consume_tokens(ids)
    while not matcher.is_accepting():
        fill_next_token_bitmask(matcher, mask)
        allowed = [at for at in range(vocabulary.vocab_size) if mask[0, at // 32] >> (at % 32) & 1]
        blank = [at for at in allowed if not tokenizer.decode([at]).isspace()]
        ids.append(rng.choice(blank or allowed))
        assert matcher.consume_token(ids[-1])
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize(
    ("family", "text", "ends"),
    [
        (QWEN3_CODER, "<parameter=s>\nany <b>text</b>\nat all\n</parameter>\n</function>", True),
        (QWEN3_CODER, "<parameter=s>\n</parameter>", False),
        (QWEN3_CODER, "<parameter=s>\nx</parameter>y", None),
        (QWEN3_CODER, "<parameter=n>\n1\n</parameter>\n</function>", None),
        (PYTHONIC, 's="any text", n=1)]', True),
        (PYTHONIC, 's="any text")]', True),
        (PYTHONIC, "n=1", None),
        (PYTHONIC, "s='", None),
    ],
)
def test_strings_are_free_and_what_is_required_comes(family: str, text: str, ends: bool | None, tmp_path) -> None:
    tokenizer = byte_tokenizer(SPELLED)
    properties = {"s": {"type": "string"}, "n": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["s"]}
    grammar = calls_amid_text(toolbox(True, parameters=parameters, parallel=False), family, opening(tokenizer))
    begun = {QWEN3_CODER: "<function=f>\n", PYTHONIC: "[f("}[family]
    assert whole(tokenizer, grammar_vocabulary(tokenizer, tmp_path), grammar, begun + text) is ends


@pytest.mark.parametrize("family", [QWEN3_CODER, PYTHONIC])
@pytest.mark.parametrize("parameters", [{"type": "array"}, {"anyOf": [{"type": "object"}]}, {"properties": []}])
def test_arguments_that_have_no_names_are_refused_where_each_is_written(family: str, parameters: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"tools: the parameters of 'f', which is strict, must be"):
        calls_amid_text(toolbox(True, parameters=parameters), family, NO_OPENING)


@pytest.mark.parametrize(("family", "names"), [(PYTHONIC, ("from", "a-b", "é")), (QWEN3_CODER, ("a>b", "", " a"))])
def test_a_strict_tool_whose_call_could_not_be_read_is_refused(family: str, names: tuple[str, ...]) -> None:
    for name in names:
        tools = toolbox(True, parameters={"type": "object", "properties": {name: {"type": "string"}}})
        with pytest.raises(InvalidRequestError, match=f"tools: this model cannot write a call with the name '{name}'"):
            calls_amid_text(tools, family, NO_OPENING)
        assert calls_amid_text(tools, HERMES, NO_OPENING)


NODE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}
SIZED: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"enum": ["S", "L"]}, "other": {"$ref": "#/properties/size"}},
    "required": ["size", "other"],
    "additionalProperties": False,
}
NAMED: dict[str, Any] = {
    "$id": "https://example.org/named",
    "type": "object",
    "properties": {"a": {"$ref": "#size"}, "b": {"$ref": "other"}, "c": {"$ref": "https://example.org/named#/$defs/n"}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
    "$defs": {
        "s": {"$anchor": "size", "enum": [1, 2]},
        "o": {"$id": "other", "type": "boolean", "default": {"$ref": "#/nowhere"}},
        "n": {"type": "null"},
    },
}


@pytest.mark.parametrize("schema", [NODE, SIZED, NAMED])
@pytest.mark.parametrize("family", FAMILIES)
def test_references_of_every_kind_bind_calls_of_every_family(family: str, schema: dict[str, Any], tmp_path) -> None:
    """llama.cpp #16790 and xgrammar #800: a tool whose schema refers to itself."""
    tokenizer = byte_tokenizer(SPELLED)
    vocabulary = grammar_vocabulary(tokenizer, tmp_path)
    tools = toolbox(True, True, parameters=schema, parallel=False)
    grammar = calls_amid_text(tools, family, opening(tokenizer))
    seen: set[str] = set()
    for seed in range(12):
        text = any_text(tokenizer, vocabulary, grammar, BEGUN[family], random.Random(seed))
        form = MessageForm(tool_calls=family, types=tools.types if family == QWEN3_CODER else {})
        reader = form.reader()
        parts = [*reader.feed(text), *reader.finish()]
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        jsonschema_rs.validate(schema, json.loads(arguments))
        seen.add(arguments)
    assert len(seen) > 1


def test_calls_that_have_to_be_made_follow_references_of_each_tool(
    tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    given = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in (("node", NODE), ("sized", SIZED), ("named", NAMED))
    ]
    grammar = enforced_calls(read_toolbox(given, "required", True, UnknownFields(strict=False)))
    for name, arguments, right in (
        ("node", {"value": 1, "next": {"value": 2, "next": None}}, True),
        ("node", {"value": 1, "next": {"value": "x"}}, None),
        ("sized", {"size": "S", "other": "L"}, True),
        ("sized", {"size": "S", "other": "M"}, None),
        ("named", {"a": 1, "b": True, "c": None}, True),
        ("named", {"a": 3}, None),
    ):
        text = json.dumps([{"name": name, "parameters": arguments}])
        assert whole(tokenizer, vocabulary, grammar, text) is right, text


BEYOND: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^(?!x).*$"},
        "b": {"type": "string", "pattern": r"\bfoo\b"},
        "c": {"type": "string", "pattern": "^y$"},
        "d": {"$ref": "https://example.org/elsewhere"},
    },
    "patternProperties": {"^(?=z)": {"type": "string"}},
    "required": ["a", "c"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_what_no_grammar_holds_is_ignored_in_a_loose_tool_and_refused_in_a_strict_one(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, choice: Any
) -> None:
    grammar = enforced_calls(toolbox(False, parameters=BEYOND, choice=choice))
    for arguments, right in (({"a": "x", "c": "y"}, True), ({"a": "x", "c": "z"}, None)):
        calls: Any = [{"name": "f", "parameters": arguments}] if choice == "required" else arguments
        assert whole(tokenizer, vocabulary, grammar, json.dumps(calls)) is right
    strict = {"type": "object", "properties": {"a": BEYOND["properties"]["a"]}}
    with pytest.raises(InvalidRequestError, match=r"grammar: .*look-around"):
        compiled(vocabulary, enforced_calls(toolbox(True, parameters=strict, choice=choice)))


@pytest.mark.parametrize("family", [QWEN3_CODER, PYTHONIC])
def test_arguments_that_refer_to_many_schemas_make_no_grammar_that_is_too_long(family: str) -> None:
    """Each of 2,000 arguments had the 100 schemas that it refers to, before anyone looked at the length of it all."""
    chain = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}]} for at in range(100)}
    names = {f"p{at}": {"$ref": "#/$defs/d0"} for at in range(2000)}
    tools = toolbox(True, parameters={"type": "object", "properties": names, "$defs": chain})
    with pytest.raises(InvalidRequestError, match=r"tools: must make a grammar of at most 131072|tools: .* steps"):
        calls_amid_text(tools, family, NO_OPENING)


UNIONS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "e": {"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}, {"type": "integer"}]},
        "r": {"$ref": "#/$defs/text"},
        "w": {"oneOf": [{"$ref": "#/$defs/word"}, {"type": "boolean"}]},
    },
    "required": ["s", "e", "r", "w"],
    "$defs": {"text": {"type": "string"}, "word": {"const": "or"}},
}


@pytest.mark.parametrize(
    ("values", "right"),
    [
        (("free", "x", "text", "or"), True),
        (("null", "null", "12", "true"), True),
        (("1", "7", "", "or"), True),
        (("1", "z"), None),
        (("1", '"x"'), None),
        (("1", "x", "a", "and"), None),
    ],
)
def test_a_union_of_strings_and_others_is_bare_or_json(values: tuple[str, ...], right: bool | None, tmp_path) -> None:
    tokenizer = byte_tokenizer(SPELLED)
    tools = toolbox(True, parameters=UNIONS, parallel=False)
    grammar = calls_amid_text(tools, QWEN3_CODER, opening(tokenizer))
    written = [f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in zip("serw", values, strict=False)]
    text = f"<function=f>\n{''.join(written)}</function>"
    assert whole(tokenizer, grammar_vocabulary(tokenizer, tmp_path), grammar, text) is right


# Its first key is that of a call as well.
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "boolean"}},
    "required": ["name"],
    "additionalProperties": False,
}
ONE_CALL = {
    HERMES: '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    MISTRAL: '[TOOL_CALLS]f{"a": 1}',
    LLAMA3_JSON: '{"name": "f", "parameters": {"a": 1}}',
    QWEN3_CODER: "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    PYTHONIC: "[f(a=1)]",
}
TWO_CALLS = {
    **{family: f"{call}\n{call}" for family, call in ONE_CALL.items()},
    MISTRAL: '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]f{"a": 1}',
    LLAMA3_JSON: f"{ONE_CALL[LLAMA3_JSON]}; {ONE_CALL[LLAMA3_JSON]}",
    PYTHONIC: "[f(a=1), f(a=1)]",
}


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_has_the_format_or_is_a_call(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, family: str, parallel: bool
) -> None:
    """vLLM #39929: a format beside tools left no room for a call."""
    content = grammar_of_json_schema(PERSON)
    grammar = calls_amid_text(toolbox(True, False, parallel=parallel), family, opening(tokenizer), content)
    bound = ONE_CALL[family].replace("1", '"x"')
    for text, right in (
        ('{"name": "f"}', True),
        ('{"name": "Ada", "n": true}', True),
        ('{"n": true', None),
        ("hello", None),
        (ONE_CALL[family], True),
        (f"{ONE_CALL[family]}\n", True),
        ("\n", None),
        (bound, None),
        (f'{{"name": "Ada"}}{ONE_CALL[family]}', None),
        (TWO_CALLS[family], True if parallel else None),
    ):
        assert whole(tokenizer, vocabulary, grammar, text) is right, text


@pytest.mark.parametrize("family", FAMILIES)
def test_formats_of_other_kinds_leave_room_for_a_call(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, family: str
) -> None:
    for content, text in (
        (grammar_of_json_schema({"type": "object"}), '{"title": {"a": [1]}}'),
        (grammar_of_json_schema({"type": "array", "items": {"type": "boolean"}}), "[false, true]"),
        (grammar_of_choices(["yes", "no"]), "yes"),
        (grammar_of_regex(r"[0-9]{3}"), "123"),
        (grammar_of_lark('start: "ab"+'), "abab"),
    ):
        grammar = calls_amid_text(toolbox(True), family, opening(tokenizer, QWEN3, "<think>"), content)
        assert whole(tokenizer, vocabulary, grammar, f"any <b> thought</think>\n\n{text}") is True
        assert whole(tokenizer, vocabulary, grammar, f"any thought</think>{ONE_CALL[family]}") is True
        assert whole(tokenizer, vocabulary, grammar, "any thought</think>hello") is None


@pytest.mark.parametrize("family", FAMILIES)
def test_without_parallel_calls_one_is_all_in_every_family(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, family: str
) -> None:
    """sglang #9696 and vLLM PR #26233: two calls where one was allowed."""
    grammar = calls_amid_text(toolbox(True, parallel=False), family, opening(tokenizer))
    assert whole(tokenizer, vocabulary, grammar, ONE_CALL[family]) is True
    assert whole(tokenizer, vocabulary, grammar, TWO_CALLS[family]) is None
    assert whole(tokenizer, vocabulary, calls_amid_text(toolbox(True), family, opening(tokenizer)), TWO_CALLS[family])


@pytest.mark.parametrize("content", ["", '{"type": "object"}'])
@pytest.mark.parametrize("prompt_end", ["<think>\n", ""])
@pytest.mark.parametrize("family", [HERMES, MISTRAL, QWEN3_CODER])
def test_a_call_that_begins_in_reasoning_is_bound(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, family: str, prompt_end: str, content: str
) -> None:
    """vLLM PR #35687: a model that calls without closing its reasoning."""
    bound = grammar_of_json_schema(json.loads(content)) if content else ""
    grammar = calls_amid_text(toolbox(True), family, opening(tokenizer, QWEN3, prompt_end), bound)
    begun = f"{'' if prompt_end else '<think>'}I call it. "
    assert whole(tokenizer, vocabulary, grammar, begun + ONE_CALL[family]) is True
    assert whole(tokenizer, vocabulary, grammar, begun + TWO_CALLS[family]) is True
    assert whole(tokenizer, vocabulary, grammar, begun + ONE_CALL[family].replace("1", '"x"')) is None
    # Where the tag is no token, text that begins with it may be content, too.
    may_be_content = not content and not prompt_end and tokenizer.token_to_id("<think>") is None
    assert whole(tokenizer, vocabulary, grammar, begun) is may_be_content


YES_OR_NO = grammar_of_choices(["yes", "no"])
AN_OBJECT = grammar_of_json_schema(SCHEMA)


@pytest.mark.parametrize(
    ("reasoning", "prompt_end", "text", "ends"),
    [
        (QWEN3, "assistant\n", "<think>\nhm, no\n</think>\n\nyes", True),
        (QWEN3, "assistant\n", "yes", True),
        (QWEN3, "assistant\n", "hm", None),
        (QWEN3, "assistant\n<think>\n", "yes", False),
        (QWEN3, "assistant\n<think>\n", "hm</think>", False),
        (QWEN3, "assistant\n<think>\n", "hm</think>hm", None),
        (QWEN3, "assistant\n<think>\n", "hm</think>\n\nno", True),
        (QWEN3, "<think>\n\n</think>\n\n", "no", True),
        (QWEN3, "<think>\n\n</think>\n\n", "<think>", None),
        (DEEPSEEK_R1, "assistant", "hm</think>no", True),
        (GPT_OSS, "assistant", "no", True),
        (GEMMA4, "model\n", "<|channel>thought\nhm\n<channel|>yes", True),
        (GEMMA4, "model\n<|channel>thought\n", "hm<channel|>no", True),
        (GEMMA4, "<|channel>thought\n<channel|>", "<|channel>", None),
    ],
)
def test_reasoning_comes_before_what_is_bound(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, reasoning: str, prompt_end: str, text: str, ends: bool | None
) -> None:
    grammar = after_reasoning(YES_OR_NO, opening(tokenizer, reasoning, prompt_end), field="x")
    assert whole(tokenizer, vocabulary, grammar, text) is ends


def test_a_schema_binds_what_follows_reasoning(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    grammar = after_reasoning(AN_OBJECT, opening(tokenizer, QWEN3, "<think>\n"), field="x")
    assert whole(tokenizer, vocabulary, grammar, 'a {"b": 1} </think>{"a": 1}') is True
    assert whole(tokenizer, vocabulary, grammar, '</think>{"b": 1}') is None

"""What follows reasoning, and calls amid text, are bound once they have begun; all else is free."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.core.errors import InvalidRequestError
from paceline.gateway.fields import UnknownFields
from paceline.gateway.grammars import grammar_of_choices, grammar_of_json_schema
from paceline.gateway.message_form import DEEPSEEK_R1, GPT_OSS, HERMES, LLAMA3_JSON, MISTRAL, QWEN3
from paceline.gateway.partial_grammars import Opening, after_reasoning, calls_amid_text
from paceline.gateway.tools import Toolbox

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["spelled", "tokens", "special tokens"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Bytes, and markers as most models have them: in text, or as tokens of their own."""
    made = Tokenizer(models.BPE({each: at for at, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens([AddedToken("<eos>", special=True)])
    if request.param != "spelled":
        special = request.param == "special tokens"
        made.add_tokens([AddedToken(each, special=special, normalized=False) for each in MARKERS])
    return made


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return LLTokenizer(str(path), eos_token=[tokenizer.get_vocab()["<eos>"]])


def opening(tokenizer: Tokenizer, reasoning: str = "", prompt_end: str = "") -> Opening:
    return Opening(reasoning=reasoning, prompt_end=prompt_end, token_of=tokenizer.token_to_id)


def whole(tokenizer: Tokenizer, vocabulary: LLTokenizer, grammar: str, text: str) -> bool | None:
    """Whether a text may end so; None: it may not begin so."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    ids = tokenizer.encode(text).ids
    taken = matcher.try_consume_tokens(ids)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.is_accepting()) if taken == len(ids) else None


def tools(*strict: bool, parallel: bool = True) -> Toolbox:
    given = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": each}}
        for name, each in zip("fg", strict, strict=False)
    ]
    return Toolbox.read(given, "auto", parallel, UnknownFields(strict=False))


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
}


@pytest.mark.parametrize(("family", "text", "ends"), [(family, *case) for family in AMID for case in AMID[family]])
def test_text_is_free_until_a_call_begins(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, family: str, text: str, ends: bool | None
) -> None:
    grammar = calls_amid_text(tools(True, False), family, opening(tokenizer))
    assert whole(tokenizer, vocabulary, grammar, text) is ends


def test_one_call_is_all_where_calls_are_not_parallel(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    grammar = calls_amid_text(tools(True, parallel=False), HERMES, opening(tokenizer))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert whole(tokenizer, vocabulary, grammar, call) is True
    assert whole(tokenizer, vocabulary, grammar, call + call) is None


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


def test_calls_in_reasoning_are_no_calls(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    grammar = calls_amid_text(tools(True), HERMES, opening(tokenizer, QWEN3, "<think>\n"))
    text = "I could call it</think>\nWell: <tool_call>\n"
    assert whole(tokenizer, vocabulary, grammar, text) is False
    assert whole(tokenizer, vocabulary, grammar, text + "x") is None


def test_a_schema_that_cannot_be_compiled_is_refused_by_the_tools() -> None:
    given = [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}, "strict": True}}]
    toolbox = Toolbox.read(given, "auto", True, UnknownFields(strict=False))
    with pytest.raises(InvalidRequestError, match=r"tools: .*foo"):
        calls_amid_text(toolbox, HERMES, Opening(reasoning="", prompt_end="", token_of=lambda _: None))

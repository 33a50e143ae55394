"""Public recorded outputs of many models, by the package `canitoolcall`: read as it says, however they are cut."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from paceline.gateway.message.form import (
    DEEPSEEK,
    DEEPSEEK_R1,
    DEEPSEEK_V32,
    GEMMA4,
    GLM,
    GPT_OSS,
    HERMES,
    KIMI_K2,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    QWEN3,
    QWEN3_CODER,
    MessageForm,
    begins_thinking,
)
from paceline.gateway.message.growing import Message
from paceline.gateway.message.tools import Toolbox

fixtures = pytest.importorskip("canitoolcall.fixtures")
checks = pytest.importorskip("canitoolcall.checks")
results = pytest.importorskip("canitoolcall.results")

# By the package's families, ours of calls and of reasoning.
FAMILIES: Mapping[str, tuple[str, str]] = {
    "qwen3-hermes": (HERMES, QWEN3),
    "qwen3-xml": (QWEN3_CODER, QWEN3),
    "llama": (LLAMA3_JSON, ""),
    "gpt-oss": ("", GPT_OSS),
    "mistral": (MISTRAL, MISTRAL),
    "deepseek": (DEEPSEEK, DEEPSEEK_R1),
    "glm": (GLM, QWEN3),
    "kimi": (KIMI_K2, QWEN3),
    "gemma4": (GEMMA4, GEMMA4),
}
# Read otherwise than the package says, and why.
OTHERWISE: Mapping[str, str] = {
    # A marker within a text can be told from the token by the token alone.
    "gpt-oss/harmony-marker-in-arguments": "text",
    "gpt-oss/harmony-marker-in-reasoning": "text",
    "qwen3-xml/q38-marker-in-arguments": "text",
    "gpt-oss/llamacpp-builtin-python-recipient": "a call of a tool that was not offered is a call",
    "llama/l3-sglang-text-before-python-tag": "text before a call is no text of this family",
    "qwen3-hermes/truncated-second-parallel-call": "what was there of a call that breaks off has been sent",
    "gemma4/truncated-second-parallel-call": "what was there of a call that breaks off has been sent",
    **dict.fromkeys(
        (f"deepseek/{version}-truncated-second-parallel-call" for version in ("v32", "v4", "v41")),
        "what was there of a call that breaks off has been sent",
    ),
    "deepseek/v31-multi-turn-after-tool-result": "the prompt does not tell that it is not R1's",
    "glm/glm47-missing-last-close-arg-value": "a value ends with its tag",
    **dict.fromkeys(
        (
            f"kimi/k2i-vllm-{name}"
            for name in (
                *("single-call-content-before", "three-tool-calls", "multiline-json", "id-without-functions-prefix"),
                *("noise-between-markers", "empty-tool-section", "content-after-tool-section"),
            )
        ),
        "white space before a call is no content",
    ),
    **dict.fromkeys(
        ("gemma4/sglang-text-before-call", "gemma4/sglang-text-around-call"),
        "white space before a call is no content",
    ),
    "qwen3-xml/q38-truncated-at-tool-call-open": "what is no call is content",
    "qwen3-xml/vllm-coder-missing-close-parameter": "a value ends with its tag",
    "qwen3-xml/bug-missing-close-parameter-before-function": "a value ends with its tag",
}
# Formats of these families that no reader reads.
UNREAD = "x-kimi-k3"
PROMPTS = {
    model.repo: model.default_generation_prompt or ""
    for family in fixtures.load_families().values()
    for model in family.reference_models
}
RECORDED = [
    each
    for each in fixtures.load_fixtures()
    if each.expected is not None and each.family in FAMILIES and UNREAD not in each.tags
]


def form_of(fixture: Any) -> MessageForm:
    calls, reasoning = FAMILIES[fixture.family]
    if "x-llama-pythonic" in fixture.tags:
        calls = PYTHONIC
    if {"x-deepseek-v32", "x-deepseek-v4", "x-deepseek-v41"} & set(fixture.tags):
        calls = DEEPSEEK_V32
    if "x-deepseek-v3" in fixture.tags:
        reasoning = ""
    prompt = (
        PROMPTS.get(fixture.reference_model, "") if fixture.generation_prompt is None else fixture.generation_prompt
    )
    tools = [{"function": {"parameters": {}, **each["function"]}} for each in fixture.tools]
    return MessageForm(
        reasoning=reasoning,
        thinks=bool(reasoning) and begins_thinking(reasoning, prompt),
        tool_calls=calls,
        types=Toolbox(tools=tuple(tools)).types,
    )


def read(form: MessageForm, pieces: Iterable[str]) -> Any:
    reader, message = form.reader(), Message(form, "session")
    for piece in pieces:
        message.take(reader.feed(piece))
    message.take(reader.finish())
    calls = tuple(results.ParsedToolCall(each.name, "".join(each.arguments)) for each in message.calls)
    return results.ParseResult(
        content="".join(message.content) or None, reasoning_content="".join(message.reasoning) or None, tool_calls=calls
    )


@pytest.mark.parametrize("fixture", RECORDED, ids=[each.id for each in RECORDED])
def test_an_output_is_read_as_recorded_however_it_is_cut(fixture: Any) -> None:
    text, form = fixture.raw_output, form_of(fixture)
    whole = read(form, [text])
    right = checks.compare(checks.expected_as_result(fixture.expected), whole) is results.Status.PASS
    assert right == (fixture.id not in OTHERWISE)
    assert read(form, text) == whole
    cuts = sorted(random.Random(text).choices(range(len(text) + 1), k=5))
    assert read(form, [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    # And wherever it breaks off.
    assert all(read(form, text[:cut]) == read(form, [text[:cut]]) for cut in cuts)

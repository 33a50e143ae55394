"""Calls and reasoning in the text of answers: each family's transcripts, whole, in all cuts, and malformed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
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
    Families,
    MessageForm,
    begins_thinking,
    check_families,
)
from paceline.gateway.message.reader import CallArguments, CallBegin, Content, Part, Reasoning, StatefulReader, joined

TYPES = {"f": {"n": ("integer",), "o": ("object",), "b": ("boolean",)}}
ARGUMENTS = '{"a": "}]\\"", "b": [1, {"c": null}]}'
CALL = [CallBegin("f"), CallArguments(ARGUMENTS)]
EMPTY = [CallBegin("g"), CallArguments("{}")]


def form(family: str) -> MessageForm:
    if family in (QWEN3, DEEPSEEK_R1, GPT_OSS):
        return MessageForm(reasoning=family)
    if family == "array":
        return MessageForm(enforced=True)
    if family == "named":
        return MessageForm(enforced=True, named="f")
    return MessageForm(tool_calls=family, types=TYPES)


def read(family: MessageForm, pieces: Sequence[str]) -> list[Part]:
    """What a reader makes of a text in pieces."""
    reader = family.reader()
    return joined([part for piece in pieces for part in reader.feed(piece)] + reader.finish())


HERMES_CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
# Python reads it, and JSON has no such number.
BEYOND_JSON = '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>'
# Family, text, and what it is made of.
TRANSCRIPTS: list[tuple[str, str, list[Part]]] = [
    (HERMES, HERMES_CALL, CALL),
    (HERMES, f"Let me see.\n\n{HERMES_CALL}\n", [Content("Let me see."), *CALL]),
    (HERMES, f'{HERMES_CALL}\n<tool_call>{{"name":"g","arguments":{{}}}}</tool_call>', [*CALL, *EMPTY]),
    (HERMES, f"{HERMES_CALL}\nDone.", [*CALL, Content("\nDone.")]),
    (HERMES, f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "f"}}</tool_call>', CALL),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {ARGUMENTS}, "id": "x}}"}}</tool_call>', CALL),
    (HERMES, '<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', EMPTY),
    # White space that Python knows and JSON does not.
    (HERMES, f'<tool_call>\u00a0{{"arguments": {ARGUMENTS}, "name": "f"}}</tool_call>', CALL),
    (HERMES, BEYOND_JSON, [Content(BEYOND_JSON)]),
    (PYTHONIC, "[f(a=1e999)]", [Content("[f(a=1e999)]")]),
    (PYTHONIC, "[f(a={1: 2})]", [Content("[f(a={1: 2})]")]),
    # A head of more characters than any name has is none.
    (
        QWEN3_CODER,
        "<tool_call>\n<function=f>\n</function>\n<function=g" + 2000 * " " + ">\nThe rest",
        [CallBegin("f"), CallArguments("{}"), Content("<function=g" + 2000 * " " + ">\nThe rest")],
    ),
    # The inner end is missing, and the outer one is no content.
    (
        QWEN3_CODER,
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</tool_call>\nDone.",
        [CallBegin("f"), CallArguments('{"n": 1}'), Content("\nDone.")],
    ),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=f>\n<parameter=n>\nNaN\n</parameter>\n</function>\n</tool_call>",
        [CallBegin("f"), CallArguments('{"n": "NaN"}')],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', [CallBegin("f"), CallArguments('{"a": 1')]),
    (HERMES, "<tool_call>\nwhat?</tool_call>", [Content("<tool_call>\nwhat?</tool_call>")]),
    (HERMES, '<tool_call>{"name": 5}</tool_call> x', [Content('<tool_call>{"name": 5}</tool_call> x')]),
    (HERMES, '<tool_call>{"name": "f", "arg', [Content('<tool_call>{"name": "f", "arg')]),
    (HERMES, "a < b <tool_ <tool_call", [Content("a < b <tool_ <tool_call")]),
    (HERMES, f"<tool_call>{HERMES_CALL}", [Content("<tool_call>"), *CALL]),
    (LLAMA3_JSON, f'{{"name": "f", "parameters": {ARGUMENTS}}}', CALL),
    (
        LLAMA3_JSON,
        f'<|python_tag|>{{"name": "f", "parameters": {ARGUMENTS}}}; {{"name": "g", "parameters": {{}}}}\n',
        [*CALL, *EMPTY],
    ),
    (LLAMA3_JSON, '{"city": "Paris"} is it', [Content('{"city": "Paris"} is it')]),
    (LLAMA3_JSON, ' Hello {"name": "f", "parameters": {}}', [Content(' Hello {"name": "f", "parameters": {}}')]),
    (LLAMA3_JSON, f'{{"name": "f", "parameters": {ARGUMENTS}}}; and more', [*CALL, Content("; and more")]),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]',
        [*CALL, *EMPTY],
    ),
    (MISTRAL, f"So:[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g{{}}", [Content("So:"), *CALL, *EMPTY]),
    (MISTRAL, f"[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{ARGUMENTS}", CALL),
    (MISTRAL, '[TOOL_CALLS]g{}[TOOL_CALLS][{"name": "g", "arguments": {}}]', [*EMPTY, *EMPTY]),
    (MISTRAL, "[TOOL_CALLS] no, wait", [Content("[TOOL_CALLS] no, wait")]),
    (MISTRAL, "[TOOL_CALLS][1, 2] x", [Content("[TOOL_CALLS][1, 2] x")]),
    (MISTRAL, "[TOOL_CAL", [Content("[TOOL_CAL")]),
    (
        QWEN3_CODER,
        "Now.\n<tool_call>\n<function=f>\n<parameter=s>\nline 1\nline 2\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
        '<parameter=o>\n{"x": [1]}\n</parameter>\n<parameter=b>True</parameter>\n</function>\n</tool_call>',
        [
            Content("Now."),
            CallBegin("f"),
            CallArguments('{"s": "line 1\\nline 2", "n": 5, "o": {"x": [1]}, "b": true}'),
        ],
    ),
    (QWEN3_CODER, "<function=g></function>\n<tool_call><function=g>\n</function></tool_call>", [*EMPTY, *EMPTY]),
    (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=s>\nabc", [CallBegin("f"), CallArguments('{"s": "abc')]),
    (QWEN3_CODER, "<tool_call>\nhm <function=", [Content("<tool_call>\nhm <function=")]),
    (
        PYTHONIC,
        '[f(a="x]", b=[1, {"c": None}], d=-1, e=true), g()]',
        [CallBegin("f"), CallArguments('{"a": "x]", "b": [1, {"c": null}], "d": -1, "e": true}'), *EMPTY],
    ),
    (PYTHONIC, "<|python_start|>[g()]<|python_end|>", EMPTY),
    (PYTHONIC, "[1] says so", [Content("[1] says so")]),
    (PYTHONIC, "[see(here)] it", [Content("[see(here)] it")]),
    (PYTHONIC, "[f(a=", [Content("[f(a=")]),
    (
        GEMMA4,
        'So. <|tool_call>call:f{a b:<|"|>}]\\\n"é<|"|>, c:[1,-2.5e+21,{d:null,<|"|>e<|"|>:True}],g:a}<tool_call|> x',
        [
            Content("So."),
            CallBegin("f"),
            CallArguments('{"a b": "}]\\\\\\n\\"é", "c": [1, -2.5e+21, {"d": null, "e": true}], "g": "a"}'),
            Content(" x"),
        ],
    ),
    (GEMMA4, "<|tool_call>call:g{}<tool_call|><|tool_call>call:g{}<tool_call|>\n", [*EMPTY, *EMPTY]),
    (GEMMA4, "<|tool_call>call:g{} <|tool_call>call:g{}", [*EMPTY, *EMPTY]),
    (GEMMA4, '<|tool_call>call:f{a:1,b:<|"|>x', [CallBegin("f"), CallArguments('{"a": 1, "b": "x')]),
    (GEMMA4, "<|tool_call>call:f{a:1,b:12", [CallBegin("f"), CallArguments('{"a": 1, "b": ')]),
    (GEMMA4, "<|tool_call>call:f x<tool_call|>", [Content("<|tool_call>call:f x<tool_call|>")]),
    (
        "array",
        f'[{{"name": "f", "parameters": {ARGUMENTS}}},\n {{"name": "g", "parameters": {{}}}}]\n',
        [*CALL, *EMPTY],
    ),
    ("named", f"{ARGUMENTS}", CALL),
    ("named", '{"a', [CallBegin("f"), CallArguments('{"a')]),
    (QWEN3, "<think>\nHm < 5.\n\n</think>\n\nFive.", [Reasoning("Hm < 5."), Content("Five.")]),
    (QWEN3, "<think>Hm\n", [Reasoning("Hm\n")]),
    (QWEN3, "I <think> so", [Content("I <think> so")]),
    (QWEN3, "<think>\n\n</think>\n\nFive.", [Content("Five.")]),
    (
        GPT_OSS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        [Reasoning("Hm."), *CALL],
    ),
    (
        GPT_OSS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Five.<|return|>",
        [Reasoning("Hm."), Content("Five.")],
    ),
    (GPT_OSS, "Plain.", [Content("Plain.")]),
]


@pytest.mark.parametrize(("family", "text", "parts"), TRANSCRIPTS)
def test_a_transcript_is_read_the_same_however_it_is_cut_and_wherever_it_breaks_off(
    family: str, text: str, parts: list[Part]
) -> None:
    assert read(form(family), [text]) == parts
    assert read(form(family), list(text)) == parts
    for first in range(len(text)):
        for second in range(first, len(text), 7):
            assert read(form(family), [text[:first], text[first:second], text[second:]]) == parts
        assert read(form(family), [text[:first]]) == read(form(family), list(text[:first]))


SHARDS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=n>", "</parameter>", "<think>"),
    *("</think>", "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", ",", ":", '"', "\\", ";", "f", '"name"', '"arguments"'),
    *(" ", "\n", "1", "é", "(", ")", "a=", "<|python_tag|>", "<|channel|>", "<|message|>", "<|end|>", "analysis"),
    *("<|tool_call>call:f{", "<tool_call|>", '<|"|>', "<|"),
    '{"name": "f", "arguments": {"a": 1}}',
]
FAMILIES = sorted({family for family, _, _ in TRANSCRIPTS})


@given(st.sampled_from(FAMILIES), st.lists(st.sampled_from(SHARDS), max_size=12).map("".join), st.data())
def test_any_text_is_read_the_same_however_it_is_cut(family: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form(family), pieces) == read(form(family), [text])


READERS = [*map(form, FAMILIES)] + [
    MessageForm(reasoning=reasoning, thinks=True, tool_calls=family, types=TYPES)
    for reasoning in (QWEN3, GPT_OSS)
    for family in (GEMMA4, HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC, QWEN3_CODER)
]
# What a call, a channel or reasoning begins with, and never ends.
BEGINNINGS = [
    *(
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{\\"',
        '<tool_call>{"',
        '<tool_call>{"a": [',
        "<tool_call>\n<function=",
    ),
    *("<tool_call>{1}", "<tool_call>{<tool_call>}", '<tool_call>{"name": "f", "arguments": ', "<tool_call> "),
    *(
        "<function=f>",
        "<function=f><parameter=n>",
        "<parameter=n>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS][{",
        '[TOOL_CALLS][{\\"',
    ),
    *("[TOOL_CALLS][1", "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[CALL_ID]é", "[f(", "[f", "[", "{", ";"),
    *(
        "<|start|>",
        "<|channel|>",
        "<|end|>",
        "<|start|><|end|>",
        "<|channel|>analysis<|message|>",
        "<think>",
        "</think>",
    ),
    *("<|tool_call>", "<|tool_call>call:f{", "<|tool_call>call:f{a:1}"),
    *(" ", "\n", "a", '{"name": "f", "parameters": {}', '{"name": "f", "parameters": {}}'),
]


@given(
    st.sampled_from(READERS),
    st.lists(st.tuples(st.sampled_from(BEGINNINGS), st.sampled_from((1, 2, 700, 70_000))), max_size=4),
    st.data(),
)
def test_a_hostile_text_is_read_the_same_however_it_is_cut(
    reader: MessageForm, runs: list[tuple[str, int]], data: st.DataObject
) -> None:
    text = "".join((begin * count)[: max(count, len(begin))] for begin, count in runs)
    near = st.sampled_from((512, 1024, 4096, 65_536)).flatmap(lambda at: st.integers(at - 20, at + 40))
    places = st.one_of(st.integers(0, len(text)), near.map(lambda at: min(at, len(text))))
    cuts = sorted(data.draw(st.lists(places, max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(reader, pieces) == read(reader, [text])


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_reading_is_linear_however_many_calls_begin(begin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer of `<tool_call>{` over and over was read anew for each, when it ended: minutes in the event loop."""
    num_seen = 0

    def counted(reader: StatefulReader) -> None:
        nonlocal num_seen
        num_seen += len(reader.held)
        while reader.state():
            num_seen += len(reader.held)

    monkeypatch.setattr(StatefulReader, "_run", counted)
    text = (begin * 50_000)[:50_000]
    for each in READERS:
        for size in (len(text), 100):
            num_seen = 0
            read(each, [text[at : at + size] for at in range(0, len(text), size)])
            # A state may look at all that is held: at most a piece, or the beginning of one call.
            assert num_seen < 2048 * len(text)


@given(st.sampled_from(sorted(set(FAMILIES) - {"named"})), st.text("ab <>[]{}\n"))
def test_text_without_a_call_stays_as_it_is(family: str, text: str) -> None:
    assert "".join(part.text for part in read(form(family), list(text)) if isinstance(part, Content)) == text


def test_reasoning_that_the_prompt_has_begun_needs_no_tag() -> None:
    assert begins_thinking(QWEN3, "<|im_start|>assistant\n<think>\n")
    assert not begins_thinking(QWEN3, "<|im_start|>assistant\n")
    assert begins_thinking(GEMMA4, "<|turn>model\n<|channel>thought\n")
    assert not begins_thinking(GEMMA4, "<|turn>model\n<|channel>thought\n<channel|>")
    assert begins_thinking(DEEPSEEK_R1, "Assistant:")
    assert not begins_thinking(DEEPSEEK_R1, "Assistant:<think>\n\n</think>\n\n")
    thinking = MessageForm(reasoning=QWEN3, thinks=True, tool_calls=HERMES)
    text = f"Hm <tool_call>\n</think>\n\n{HERMES_CALL}"
    for pieces in ([text], list(text)):
        assert read(thinking, pieces) == [Reasoning("Hm <tool_call>"), *CALL]
    assert read(MessageForm(reasoning=DEEPSEEK_R1, thinks=True), list("<think>\nHm</think>5")) == [
        Reasoning("Hm"),
        Content("5"),
    ]
    for begun, text, reasoning in (
        (False, "<|channel>thought\nHm\n<channel|>5", "Hm"),
        (False, "<|channel>thought<channel|>5", ""),
        (True, "thoughts\n<channel|>5", "thoughts"),
        (True, "<|channel>thought\nHm<channel|>5", "Hm"),
    ):
        gemma = MessageForm(reasoning=GEMMA4, thinks=begun)
        assert read(gemma, list(text)) == read(gemma, [text]) == joined([Reasoning(reasoning), Content("5")])


def test_families_are_told_by_the_template() -> None:
    for template, families in (
        ("<tool_call> </think>", (HERMES, QWEN3)),
        ("<tool_call><function=x>", (QWEN3_CODER, "")),
        ("[TOOL_CALLS]", (MISTRAL, "")),
        ("[TOOL_CALLS] [THINK]", (MISTRAL, MISTRAL)),
        ("<tool_call> <arg_key> </think>", (GLM, QWEN3)),
        ("<｜Assistant｜><｜tool▁call▁begin｜>", (DEEPSEEK, "")),  # noqa: RUF001 - its own spelling
        ("<｜Assistant｜><｜tool▁call▁begin｜></think>", (DEEPSEEK, DEEPSEEK_R1)),  # noqa: RUF001
        ("<｜DSML｜function_calls>", (DEEPSEEK_V32, "")),  # noqa: RUF001
        ("<|tool_call_begin|> </think>", (KIMI_K2, QWEN3)),
        ("'<|channel>thought\\n' '<|tool_call>call:' '<tool_call|>'", (GEMMA4, GEMMA4)),
        ("<|python_tag|>", (LLAMA3_JSON, "")),
        ("[func_name1(params_name1=", (PYTHONIC, "")),
        ("<|channel|>", ("", GPT_OSS)),
        ("plain", ("", "")),
    ):
        told = Families.of("auto", "auto", template)
        assert (told.tool_calls, told.reasoning) == families
    assert Families.of("none", "qwen3", "<tool_call>") == Families(reasoning=QWEN3)

    check_families("auto", "none")
    with pytest.raises(ConfigError, match="--tool-call-parser must be auto, none, mistral"):
        check_families("klingon", "auto")


def test_a_form_goes_into_a_record_and_comes_back() -> None:
    for each in map(form, FAMILIES):
        assert MessageForm.from_json(each.to_json()) == each
    assert MessageForm.from_json(None) is None


CODER_CALL = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
# Family of calls, text that begins within reasoning, and what it is made of.
IN_REASONING: list[tuple[str, str, list[Part]]] = [
    (HERMES, f"I call it.\n{HERMES_CALL}", [Reasoning("I call it."), *CALL]),
    (HERMES, f"<think>\n\n{HERMES_CALL}\nso", [*CALL, Content("\nso")]),
    (HERMES, "a\n<tool_call> is how</think>\n\nb", [Reasoning("a\n<tool_call> is how"), Content("b")]),
    (HERMES, f"a<tool_call>{{1}}</think>{HERMES_CALL}", [Reasoning("a<tool_call>{1}"), *CALL]),
    (HERMES, "a\n<tool_call>", [Reasoning("a\n<tool_call>")]),
    (MISTRAL, "a [TOOL_CALLS]g{}", [Reasoning("a "), *EMPTY]),
    (QWEN3_CODER, f"a\n\n{CODER_CALL}", [Reasoning("a"), CallBegin("f"), CallArguments('{"n": 1}')]),
    (GEMMA4, "I call it.\n<|tool_call>call:g{}<tool_call|>", [Reasoning("I call it."), *EMPTY]),
    (GEMMA4, "a <|tool_call> is how</think>b", [Reasoning("a <|tool_call> is how"), Content("b")]),
    (QWEN3_CODER, "a <function=f> b</think>c", [Reasoning("a <function=f> b"), Content("c")]),
    (
        LLAMA3_JSON,
        'a {"name": "f", "parameters": {}}</think>c',
        [Reasoning('a {"name": "f", "parameters": {}}'), Content("c")],
    ),
]


@pytest.mark.parametrize(("family", "text", "parts"), IN_REASONING)
def test_a_call_before_the_end_of_reasoning_is_a_call(family: str, text: str, parts: list[Part]) -> None:
    """vLLM PR #35687: reasoning, then a call without `</think>`; what only looks like its beginning is reasoning."""
    thinking = MessageForm(reasoning=QWEN3, thinks=True, tool_calls=family, types=TYPES)
    assert read(thinking, [text]) == parts
    assert read(thinking, list(text)) == parts
    for at in range(len(text)):
        assert read(thinking, [text[:at], text[at:]]) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"name": "Ada", "parameters": {}}', None),
        ('{"name": "f"}', None),
        ('{"title": "f"}', None),
        ('{"name": "f", "parameters": {}}', [CallBegin("f"), CallArguments("{}")]),
    ],
)
def test_where_content_has_a_format_only_an_offered_tool_is_called(text: str, parts: list[Part] | None) -> None:
    bound = MessageForm(tool_calls=LLAMA3_JSON, only=("f", "g"))
    expected = [Content(text)] if parts is None else parts
    assert read(bound, [text]) == read(bound, list(text)) == expected

"""Templates that demand different things of messages, with transformers as the oracle."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.gateway.text.chat_template import Capabilities, ChatTemplate, SystemPlace
from paceline.gateway.text.codec import TextCodec
from tests.support import tiny_tokenizer
from tests.support.template_chats import BOS, CHATS, EOS, OWN_TEMPLATES, TOOLS, expected

NAMES = sorted(path.stem for path in OWN_TEMPLATES.iterdir())
SPECIAL = {"bos_token": BOS, "eos_token": EOS}
TURNS = frozenset({("user", "user"), ("assistant", "assistant")})
CAPABILITIES = {
    "alternating": Capabilities(system=SystemPlace.NOWHERE, refused_pairs=TURNS),
    "developer_first": Capabilities(system=SystemPlace.FIRST, knows_developers=True),
    "named_default": Capabilities(),
    "named_tool_use": Capabilities(),
    "nine_characters": Capabilities(system=SystemPlace.FIRST, refused_pairs=TURNS | {("tool", "user")}, short_ids=True),
    "parts": Capabilities(in_parts=frozenset({"user", "system", "assistant"})),
    "printed_arguments": Capabilities(system=SystemPlace.NOWHERE, text_arguments=True),
    "system_anywhere": Capabilities(),
    "system_first": Capabilities(system=SystemPlace.FIRST),
    "text_arguments": Capabilities(system=SystemPlace.FIRST, text_arguments=True),
}


def source(name: str) -> str:
    return (OWN_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(source(name), SPECIAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.save_folder(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec.from_folder(folder)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_demands_is_found(name: str) -> None:
    """vLLM #9294, #16219: parts; #9019, mlx-lm #1375: ids."""
    assert template(name).capabilities == CAPABILITIES[name]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", NAMES)
def test_a_chat_becomes_the_tokens_that_transformers_makes_of_it(
    oracle: Any, codec: TextCodec, name: str, chat: str
) -> None:
    messages, with_tools = CHATS[chat]
    tools = TOOLS if with_tools else None

    def render(changed: list[Any]) -> str:
        rendered = oracle.apply_chat_template(
            changed, tools=tools, chat_template=source(name), tokenize=False, add_generation_prompt=True
        )
        return str(rendered)

    wanted = expected(render, messages)
    extra = {"tools": tools} if tools else {}

    def encoded() -> tuple[int, ...]:
        return codec.encode_chat(messages, extra, field="messages", context_len=5000, template=template(name))

    if wanted is None:
        with pytest.raises(InvalidRequestError, match="the chat template refuses them"):
            encoded()
        return
    assert codec.decode(encoded(), special_tokens=True) == wanted
    assert list(encoded()) == oracle(wanted, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["Lorem ipsum?", "x" * 500])
def test_no_template_loses_what_a_user_says(name: str, text: str) -> None:
    """vLLM #9294: the answer was to an empty question."""
    assert text in template(name).render([{"role": "user", "content": text}], {})


def test_a_template_that_loses_what_users_say_in_either_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="renders the text of users neither"):
        ChatTemplate("{% for message in conversation %}{{ message.content }}{% endfor %}", {})


SAID = ("one", "two", "three", "four", "five")
UNRULY = [
    {"role": role, "content": text}
    for role, text in zip(("system", "developer", "user", "system", "user"), SAID, strict=True)
]


@pytest.mark.parametrize(
    ("name", "rendered"),
    [
        (
            "system_anywhere",
            "<|system|>one<|end|>\n<|system|>two<|end|>\n<|user|>three<|end|>\n<|system|>four<|end|>\n",
        ),
        ("system_first", "<|system|>one\n\ntwo\n\nfour<|end|><|user|>three<|end|><|user|>five<|end|>"),
        (
            "developer_first",
            "<|start|>developer<|message|>one\n\ntwo\n\nfour<|end|><|start|>user<|message|>three<|end|>",
        ),
        ("alternating", "<|begin|><|user|>\none\n\ntwo\n\nfour\n\nthree\n\nfive<|end|>\n<|model|>\n"),
        ("nine_characters", "<|begin|>[INST]one\n\ntwo\n\nfour\n\nthree\n\nfive[/INST]"),
        ("text_arguments", "<|begin|>one\n\ntwo\n\nfour<|User|>three<|User|>five"),
        ("printed_arguments", "### user\none\n\ntwo\n\nfour\n\nthree\n### user\nfive\n"),
        ("parts", "System: one\nSystem: two\nUser: three\nSystem: four\nUser: five\n"),
    ],
)
def test_system_messages_in_any_order_are_kept_or_joined_in_order(name: str, rendered: str) -> None:
    """ollama #17774, vLLM #41114, #48874."""
    assert template(name).render(UNRULY, {}).startswith(rendered)


@pytest.mark.parametrize("name", NAMES)
def test_no_template_loses_anything_of_an_unruly_chat(name: str) -> None:
    rendered = template(name).render(UNRULY, {})
    assert all(rendered.count(text) == 1 for text in SAID)


def test_a_chat_of_the_system_alone_is_a_question_to_a_template_that_takes_no_system() -> None:
    assert template("alternating").render([{"role": "system", "content": "Say hello."}], {}) == (
        "<|begin|><|user|>\nSay hello.<|end|>\n<|model|>\n"
    )


def test_a_text_of_the_user_beside_results_joins_the_last_one_where_turns_alternate() -> None:
    messages, _ = CHATS["a result"]
    rendered = template("nine_characters").render([*messages, {"role": "user", "content": "Go on."}], {"tools": TOOLS})
    assert rendered.endswith('fine\\"\\n\\nGo on.", "call_id": "call00000"}[/TOOL_RESULTS]')


def test_calls_stay_apart_from_the_text_before_them() -> None:
    messages, _ = CHATS["a result"]
    before = {"role": "assistant", "content": "I shall look."}
    rendered = template("nine_characters").render([*messages[:2], before, *messages[2:]], {"tools": TOOLS})
    assert "I shall look.<|end|>[TOOL_CALLS]" in rendered


def test_ids_from_elsewhere_become_ones_that_the_template_takes_the_same_for_call_and_result() -> None:
    """vLLM #9019: any other server's ids are refused by Mistral's templates."""
    foreign, own = "toolu_01A09q90qw90lq917835lq9", "abcDEF123"
    calls = [
        {"id": each, "type": "function", "function": {"name": "weather", "arguments": {}}} for each in (foreign, own)
    ]
    results = [{"role": "tool", "tool_call_id": each, "content": "fine"} for each in (foreign, own)]
    rendered = template("nine_characters").render(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results],
        {"tools": TOOLS},
    )
    said = [part[:9] for part in rendered.split('"id": "')[1:]]
    assert said == [part[:9] for part in rendered.split('"call_id": "')[1:]]
    assert said[1] == own
    assert said[0].isalnum()

"""Folders, templates and token spellings, with transformers as the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.gateway.text.chat_template import ChatTemplate
from paceline.gateway.text.codec import TextCodec
from tests.support import tiny_tokenizer

MESSAGES = [
    {"role": "system", "content": "be <b>brief</b>"},
    {"role": "user", "content": "naïve café?\n"},
    {"role": "assistant", "content": " yes "},
    {"role": "user", "content": "日本語 😀"},
]
TEMPLATE = (
    "{{- bos_token }}\n"
    "{%- for message in messages %}\n"
    "    {%- if loop.index0 > 8 %}{% break %}{% endif %}\n"
    "    {% generation %}{{ message.role }}: {{ message.content | trim }}{% endgeneration %}\n"
    "{% endfor %}\n"
    "{%- set ns = namespace(n=0) %}{% set ns.n = messages | length %}\n"
    "{{ ns.n }} {{ messages[0] | tojson }} {{ tools is none }} {{ thinking }}\n"
    "{%- if add_generation_prompt %}{{ eos_token }}assistant:{% endif %}\n"
)


@pytest.mark.parametrize("template", [tiny_tokenizer.CHAT_TEMPLATE, TEMPLATE])
def test_a_chat_becomes_the_tokens_that_transformers_makes_of_it(tmp_path: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tiny_tokenizer.save_folder(tmp_path, chat_template=template)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = oracle.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False, thinking="hard")
    codec = TextCodec.from_folder(folder)
    assert codec.chat_template is not None
    rendered = codec.chat_template.render(MESSAGES, {"thinking": "hard"})
    assert rendered == expected
    token_ids = codec.encode(rendered, field="messages", special_tokens=False, context_len=1000)
    assert list(token_ids) == oracle(rendered, add_special_tokens=False)["input_ids"]
    assert codec.decode(token_ids) == oracle.decode(token_ids, skip_special_tokens=True)
    assert b"".join(map(codec.token_bytes, token_ids)).decode() == rendered


def test_of_several_templates_the_default_one_is_taken_and_one_in_a_file_of_its_own_wins(tmp_path: Path) -> None:
    folder = tiny_tokenizer.save_folder(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert TextCodec.from_folder(folder).template_source == "plain"
    (folder / "chat_template.jinja").write_text("own")
    assert TextCodec.from_folder(folder).template_source == "own"


def test_a_template_runs_in_a_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(InvalidRequestError, match="chat template refuses"):
        template.render([], {})
    with pytest.raises(InvalidRequestError):
        ChatTemplate("{{ messages.append(1) }}", {}).render([], {})


@pytest.mark.parametrize(("knows", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_is_the_system_to_templates_that_do_not_know_one(knows: str, role: str) -> None:
    template = ChatTemplate(knows + "{% for message in messages %}{{ message.role }} {% endfor %}", {})
    messages = [{"role": each, "content": "x"} for each in ("developer", "user")]
    assert template.render(messages, {}) == f"{role} user "


def test_a_folder_with_a_broken_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        TextCodec.from_folder(tmp_path)
    folder = tiny_tokenizer.save_folder(tmp_path)
    for name, content, problem in (
        ("tokenizer_config.json", b"{", "is not JSON"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "cannot be compiled"),
        ("tokenizer.json", b"\xff", "is not a tokenizer"),
    ):
        (folder / name).write_bytes(content)
        with pytest.raises(ConfigError, match=problem):
            TextCodec.from_folder(folder)

"""Templates that packages ship, read from these packages: our prompts are those of transformers, token for token."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.support.template_chats import ASK, CHATS, SYSTEM, TOOLS, expected
from transformers import AutoTokenizer

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.gateway.text.codec import TextCodec


def shipped() -> dict[str, Path]:
    """Returns files of templates by name: TRL's, and vLLM's where it is installed."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    folders = [Path(spec.origin).parent / "chat_templates"]
    vllm = os.environ["PACELINE_CLIENT_SUITE_VLLM"]
    if vllm:
        folders += Path(vllm).parents[1].glob("lib/python*/site-packages/vllm/transformers_utils/chat_templates")
    return {
        f"{folder.parents[0].name}-{path.stem}": path for folder in folders for path in sorted(folder.glob("*.jinja"))
    }


TEMPLATES = shipped()


@pytest.fixture(scope="module")
def codec(served: Any) -> TextCodec:
    return TextCodec.from_folder(served.folder)


@pytest.fixture(scope="module")
def oracle(served: Any) -> Any:
    return AutoTokenizer.from_pretrained(served.folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_become_the_tokens_that_transformers_makes_of_them(oracle: Any, codec: TextCodec, name: str) -> None:
    source = TEMPLATES[name].read_text(encoding="utf-8")
    try:
        template = codec.template(source)
    except ConfigError:
        pytest.skip("it renders no messages")
    for chat, (messages, with_tools) in CHATS.items():
        extra: dict[str, Any] = {"tools": TOOLS} if with_tools else {}

        def render(changed: list[Any], extra: Any = extra) -> str:
            rendered = oracle.apply_chat_template(
                changed, chat_template=source, tokenize=False, add_generation_prompt=True, **extra
            )
            return str(rendered)

        wanted = expected(render, messages)
        try:
            ids = codec.encode_chat(messages, extra, field="messages", context_len=10_000, template=template)
        except InvalidRequestError:
            assert wanted is None, chat
            continue
        assert wanted is not None, chat
        assert codec.decode(ids, special_tokens=True) == wanted, chat
        assert list(ids) == oracle(wanted, add_special_tokens=False)["input_ids"], chat


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_template_loses_a_text_of_a_chat_in_any_order(codec: TextCodec, name: str) -> None:
    try:
        template = codec.template(TEMPLATES[name].read_text(encoding="utf-8"))
    except ConfigError:
        pytest.skip("it renders no messages")
    late = {"role": "developer", "content": "Be kind."}
    rendered = template.render([SYSTEM, late, ASK, {**SYSTEM, "content": "Be quick."}, {**ASK, "content": "Well?"}], {})
    for text in (SYSTEM["content"], "Be kind.", ASK["content"], "Be quick.", "Well?"):
        assert rendered.count(text) == 1, text

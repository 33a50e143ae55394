"""Folders, templates and token spellings, with transformers as the oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers, processors

from paceline.checkpoints.identity import eos_token_ids
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.gateway.text import codec as codec_module
from paceline.gateway.text import spellings
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


PRINTS = "{% for message in messages %}{{ message.content }}{% endfor %}"
NAMED = [{"name": name, "template": f"{PRINTS} {name}"} for name in ("tool_use", "default", "rag")]
CHAT = [{"role": "user", "content": "hello"}]


def rendered(folder: Path, **extra: Any) -> str:
    """Returns the prompt that a folder's own templates make of a chat."""
    codec = TextCodec.from_folder(folder)
    return codec.decode(codec.encode_chat(CHAT, extra, field="messages", context_len=100), special_tokens=True)


def by_transformers(folder: Path, **extra: Any) -> str:
    oracle = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(folder)
    return str(oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **extra))


def write(folder: Path, files: Mapping[str, Any]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "hello default", "hello tool_use"),
        ({"tokenizer_config.json": {"chat_template": NAMED[1:]}}, "hello default", "hello default"),
        (
            {
                "tokenizer_config.json": {"chat_template": NAMED},
                "chat_template.jinja": f"{PRINTS} own",
                "chat_template.json": {"chat_template": f"{PRINTS} processor"},
            },
            "hello own",
            "hello own",
        ),
        (
            {
                "tokenizer_config.json": {"chat_template": f"{PRINTS} old"},
                "chat_template.jinja": f"{PRINTS} own",
                "additional_chat_templates/tool_use.jinja": f"{PRINTS} tools",
                "additional_chat_templates/rag.jinja": f"{PRINTS} rag",
            },
            "hello own",
            "hello tools",
        ),
    ],
)
def test_of_several_templates_the_one_for_tools_is_taken_with_tools_as_transformers_does(
    tmp_path: Path, files: Mapping[str, Any], plain: str, with_tools: str
) -> None:
    """vLLM #5309, transformers #31429: with `default`, tools never reached the prompt."""
    folder = tiny_tokenizer.save_folder(tmp_path)
    write(folder, files)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert (rendered(folder), rendered(folder, tools=tools)) == (plain, with_tools)
    assert (by_transformers(folder), by_transformers(folder, tools=tools)) == (plain, with_tools)
    assert TextCodec.from_folder(folder).template_source.endswith(with_tools.removeprefix("hello"))


def test_a_template_of_a_processor_is_taken_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    folder = tiny_tokenizer.save_folder(tmp_path, chat_template=None)
    write(folder, {"chat_template.json": {"chat_template": f"{PRINTS} processor"}})
    assert rendered(folder) == "hello processor"


def test_one_template_for_tools_serves_all_chats(tmp_path: Path) -> None:
    folder = tiny_tokenizer.save_folder(tmp_path)
    write(folder, {"tokenizer_config.json": {"chat_template": NAMED[:1]}})
    assert rendered(folder) == "hello tool_use"


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, "<|begin|> <|end|>"),
        ({"bos_token": "<|other|>"}, "<|begin|> <|end|>"),
        ({"bos_token": "<|end|>", "added_tokens_decoder": {}}, "<|end|> "),
    ],
)
def test_special_tokens_are_read_where_transformers_reads_them(
    tmp_path: Path, settings: Mapping[str, Any], shown: str
) -> None:
    folder = tiny_tokenizer.save_folder(tmp_path)
    template = PRINTS + "{{ bos_token }} {{ eos_token }}"
    tokens = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>", "lstrip": False}}
    write(
        folder,
        {"tokenizer_config.json": {**settings, "chat_template": template}, "special_tokens_map.json": tokens},
    )
    assert rendered(folder) == f"hello{shown}"
    assert by_transformers(folder) == f"hello{shown}"


def test_a_template_runs_in_a_sandbox() -> None:
    template = ChatTemplate("{{ messages }}{{ messages.__class__.__mro__[0] }}", {})
    with pytest.raises(InvalidRequestError, match="chat template refuses"):
        template.render([], {})
    with pytest.raises(InvalidRequestError):
        ChatTemplate("{{ messages.append(1) }}", {}).render([], {})


@pytest.mark.parametrize(("knows", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_is_the_system_to_templates_that_do_not_know_one(knows: str, role: str) -> None:
    template = ChatTemplate(
        knows + "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}", {}
    )
    messages = [{"role": each, "content": "x"} for each in ("developer", "user")]
    assert template.render(messages, {}) == f"{role} x user x "


def test_a_folder_with_a_broken_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        TextCodec.from_folder(tmp_path)
    folder = tiny_tokenizer.save_folder(tmp_path)
    for name, content, problem in (
        ("tokenizer_config.json", b"{", "cannot be read"),
        ("tokenizer_config.json", b"[]", "must hold a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "cannot be compiled"),
        ("tokenizer.json", b"\xff", "is not a tokenizer"),
    ):
        (folder / name).write_bytes(content)
        with pytest.raises(ConfigError, match=problem):
            TextCodec.from_folder(folder)


MARK, OTHER = "<|im_start|>", "<tool>"
LISTED = {"320": {"content": MARK, "special": True}, "321": {"content": OTHER}}
OUT_OF_ORDER = {"9": {"content": MARK, "special": True, "normalized": False}, "5": {"content": OTHER, "lstrip": True}}
WITH_TYPE = {"__type": "AddedToken", "content": MARK, "normalized": False, "special": False}
FOLDERS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": LISTED}},
    "added_tokens_decoder with other ids": {"tokenizer_config.json": {"added_tokens_decoder": OUT_OF_ORDER}},
    "a known token that only the settings call special": {
        "tokenizer_config.json": {"added_tokens_decoder": {"300": {"content": "the", "special": True}}}
    },
    "a known token that the settings call special no more": {
        "tokenizer_config.json": {"added_tokens_decoder": {"0": {"content": "<|begin|>", "special": False}}}
    },
    "additional_special_tokens": {"tokenizer_config.json": {"additional_special_tokens": [MARK, OTHER]}},
    "extra_special_tokens": {"tokenizer_config.json": {"extra_special_tokens": [MARK, OTHER]}},
    "extra_special_tokens with names": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": MARK}}},
    "both lists": {
        "tokenizer_config.json": {"additional_special_tokens": [OTHER], "extra_special_tokens": [MARK, WITH_TYPE]}
    },
    "eos_token alone": {"tokenizer_config.json": {"eos_token": MARK}},
    "eos_token, an object": {"tokenizer_config.json": {"eos_token": WITH_TYPE, "pad_token": OTHER}},
    "eos_token, a plain word of the vocabulary": {"tokenizer_config.json": {"eos_token": "the"}},
    "a token of the model's own": {"tokenizer_config.json": {"audio_token": MARK}},
    "added_tokens.json": {"added_tokens.json": {OTHER: 321, MARK: 320}},
    "added_tokens.json and a map": {
        "added_tokens.json": {MARK: 320, OTHER: 321},
        "special_tokens_map.json": {"eos_token": MARK, "additional_special_tokens": [OTHER]},
    },
    "a map alone": {"special_tokens_map.json": {"eos_token": {"content": MARK, "lstrip": True, "normalized": False}}},
    "a map that a list makes void": {
        "tokenizer_config.json": {"added_tokens_decoder": LISTED},
        "added_tokens.json": {"<void>": 322},
        "special_tokens_map.json": {"eos_token": "<void>"},
    },
    "special tokens that are split": {
        "tokenizer_config.json": {"added_tokens_decoder": LISTED, "split_special_tokens": True}
    },
    "no token of begin": {"tokenizer_config.json": {"bos_token": "<|begin|>", "add_bos_token": False}},
    "a token of end": {
        "tokenizer_config.json": {"eos_token": "<|end|>", "bos_token": "<|begin|>", "add_eos_token": True}
    },
}
TEXTS = (
    f"the {MARK}user fox {MARK} H{OTHER}I the",
    "the quick<|begin|>brown <|end|> <void> fox",
)


@pytest.mark.parametrize("shape", FOLDERS)
def test_a_folder_s_tokenizer_is_the_one_that_transformers_makes_of_it(tmp_path: Path, shape: str) -> None:
    """Marks of chats that stood in another file than tokenizer.json were cut into letters, silently."""
    transformers = pytest.importorskip("transformers")
    tiny_tokenizer.train().save(str(tmp_path / "tokenizer.json"))
    for name, content in FOLDERS[shape].items():
        (tmp_path / name).write_text(json.dumps(content))
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    codec = TextCodec.from_folder(tmp_path)
    for text in TEXTS:
        for special_tokens in (True, False):
            told = codec.encode(text, field="text", special_tokens=special_tokens, context_len=1000)
            assert list(told) == oracle(text, add_special_tokens=special_tokens)["input_ids"]
            assert codec.decode(told) == oracle.decode(told, skip_special_tokens=True)
            assert codec.decode(told, special_tokens=True) == oracle.decode(told)
    assert codec.vocab_size == len(oracle)
    assert eos_token_ids(tmp_path, None, 10_000) == tuple(each for each in [oracle.eos_token_id] if each is not None)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizerFast", "CodeGenTokenizer"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("settings", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}])
def test_the_space_before_a_text_is_the_one_that_the_settings_of_gpt_2_ask_for(
    tmp_path: Path, kind: str, own: bool, settings: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = tiny_tokenizer.train()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=own)
    tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<|end|>", "eos_token": "<|end|>", "unk_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **named, **settings}))
    oracle = getattr(transformers, kind).from_pretrained(tmp_path)
    told = TextCodec.from_folder(tmp_path).encode("the fox", field="text", special_tokens=False, context_len=99)
    assert list(told) == oracle("the fox", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("settings", [{"added_tokens_decoder": {"one": {}}}, {"extra_special_tokens": [7.5]}])
def test_tokens_that_cannot_be_added_keep_a_gateway_from_starting(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = tiny_tokenizer.save_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"tokenizer_config.json: names tokens that cannot be added"):
        TextCodec.from_folder(folder)


LETTERS = "xq" * (1 << 20)
WORDS = "the fox zj " * 40_000


@pytest.fixture
def most_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each text, or piece of one, that was read."""
    made: list[int] = []

    class Counting:
        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def encode_batch_fast(self, texts: list[str], **settings: Any) -> Any:
            [encoding] = self._tokenizer.encode_batch_fast(texts, **settings)
            made.append(len(encoding))
            return [encoding]

    read = spellings.token_ids
    for module in (spellings, codec_module):
        monkeypatch.setattr(module, "token_ids", lambda tokenizer, *a, **k: read(Counting(tokenizer), *a, **k))
    return made


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokens(most_tokens: list[int], chat: bool) -> None:
    """Two of 4 MiB took 1.7 GiB, more than the chart gives a gateway."""
    codec = TextCodec(tiny_tokenizer.train(), ChatTemplate(PRINTS, {}))
    context_len = len(LETTERS) // 4
    with pytest.raises(InvalidRequestError, match=f"more than the context of {context_len} tokens"):
        if chat:
            content = [{"role": "user", "content": LETTERS + "<|end|>"}]
            codec.encode_chat(content, {}, field="messages", context_len=context_len)
        else:
            codec.encode(LETTERS, field="prompt", special_tokens=True, context_len=context_len)
    assert sum(most_tokens) < 3 * context_len
    assert max(most_tokens) <= spellings.PIECE_CHARACTERS


def test_the_last_tokens_of_a_long_text_are_found_without_all_of_it(most_tokens: list[int]) -> None:
    tokenizer = tiny_tokenizer.train()
    codec = TextCodec(tokenizer, None)
    told = codec.encode(WORDS, field="prompt", special_tokens=True, context_len=1_000_000, keep_last=500)
    assert sum(most_tokens) < 4 * spellings.PIECE_CHARACTERS
    assert list(told) == tokenizer.encode(WORDS).ids[-500:]


@pytest.mark.parametrize("keep_last", [None, 10_000_000])
def test_a_long_text_that_fits_is_read_as_one(keep_last: int | None) -> None:
    tokenizer = tiny_tokenizer.train()
    wanted = tokenizer.encode(WORDS).ids
    given = {"field": "prompt", "special_tokens": True, "keep_last": keep_last}
    assert list(TextCodec(tokenizer, None).encode(WORDS, context_len=len(wanted), **given)) == wanted

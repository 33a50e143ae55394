"""Every field that is read of a checkpoint, absent, null, of a wrong type or out of range: as transformers means it, or
one line that names the file, by transformers or by us."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoints.families import EAGLE3_SIZES, eagle3_refusal, refusal
from paceline.core.errors import ConfigError
from paceline.engine.config import DecoderConfig, LlamaShape, read_transformers_config
from paceline.engine.eagle3 import EagleConfig
from paceline.engine.loading import model_identity
from tests.support.checkpoints import save_tokenizer
from tests.unit.engine.test_config import LLAMA, shape_of, write
from tests.unit.engine.tiny_models import SIZES, save_tiny

ABSENT = object()
# Fields that we read, and some that transformers reads.
FIELDS = (
    "architectures", "model_type", "auto_map", "text_config", "quantization_config", "vocab_size", "hidden_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "rms_norm_eps", "tie_word_embeddings", "hidden_act", "sliding_window", "layer_types", "rope_theta", "rope_scaling",
    "rope_parameters", "dtype", "eos_token_id", "intermediate_size",
)  # fmt: skip
ROPE = ("rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor", "beta_fast", "rope_theta")
VALUES: list[Any] = [ABSENT, None, "257", 1.5, -1, 0, 2**40, [None], {"x": None}, True, math.nan]
FAMILIES = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "gpt_neox": {
        **LLAMA,
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def changed(content: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    rest = {name: known for name, known in content.items() if name != field}
    return rest if value is ABSENT else {**rest, field: value}


def said_of(folder: Path, content: dict[str, Any]) -> str:
    """The one line that refuses a config.json; empty: it is taken."""
    (folder / "config.json").write_text(json.dumps(content))
    try:
        config = DecoderConfig.from_folder(folder)
        if config.architecture != "GPTNeoXForCausalLM":
            LlamaShape.from_transformers(read_transformers_config(folder), config.head_dim)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_of_config_json_is_taken_or_refused_in_a_line(family: str, field: str, tmp_path: Path) -> None:
    """28 of 89 values ended in a traceback."""
    for value in VALUES:
        content = changed(FAMILIES[family], field, value)
        said = said_of(tmp_path, content)
        if said:
            assert "config.json" in said or str(tmp_path) in said
            assert "\n" not in said
        # Our table's words stay as they are.
        if refused := refusal(content):
            assert said == f"{refused} ({tmp_path})"


@pytest.mark.parametrize("field", ROPE)
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_field_of_a_scaling_is_taken_or_named(spelling: str, kind: str, field: str, tmp_path: Path) -> None:
    for value in VALUES:
        content = {**LLAMA, spelling: changed(SCALINGS[kind], field, value)}
        said = said_of(tmp_path, content)
        assert not said or ("config.json" in said and "\n" not in said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rms_norm_eps": 1.5}, r"config.json: rms_norm_eps must be a number from 1e-12 to 0.1, got 1.5"),
        ({"eos_token_id": -1}, r"config.json: each of eos_token_id must be a whole number from 0 to .*, got -1"),
        ({"num_hidden_layers": 2**40}, r"config.json: num_hidden_layers must be a whole number from 1 to 4,096, got 1"),
        ({"num_hidden_layers": "3"}, r"config.json cannot be read by transformers: .*num_hidden_layers.*'3'"),
        ({"architectures": "LlamaForCausalLM"}, r"architectures: must name one causal language model, got none"),
        ({"rope_scaling": {"type": "linear"}}, r"config.json.*factor"),
        ({"rope_scaling": {"type": "new"}}, r"config.json: rope_parameters.rope_type: 'new' is not served"),
        ({"num_key_value_heads": 3}, "config.json: num_key_value_heads must divide the 4 heads, got 3"),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            "hidden size .48. is not a multiple of the number of attention heads .5.",
        ),
    ],
)
def test_the_line_names_file_field_value_and_what_is_needed(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        shape_of(write(tmp_path, **changes))


# End tokens.


def end_tokens_of(folder: Path, *, vocab_size: int = 260, **files: Any) -> tuple[int, ...]:
    write(folder, vocab_size=vocab_size, eos_token_id=files.pop("config", None))
    save_tokenizer(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return DecoderConfig.from_folder(folder).eos_token_ids


def test_end_ids_outside_the_vocabulary_are_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM #54195: `min_tokens` masked an id that the model does not have."""
    assert end_tokens_of(tmp_path, generation_config={"eos_token_id": [257, 300]}) == (257,)
    warning = f"eos_token_id: [300] are ignored, since the vocabulary has 260 ids ({tmp_path})"
    assert [record.getMessage() for record in caplog.records] == [warning]


@pytest.mark.parametrize("spelled", ["<|end|>", {"content": "<|end|>", "special": True}])
@pytest.mark.parametrize(("named", "expected"), [(None, (257,)), (258, (258, 257)), ([257, 258], (257, 258))])
def test_the_tokenizers_own_end_token_ends_a_text(spelled: Any, named: Any, expected: Any, tmp_path: Path) -> None:
    """mlx-vlm #2112, open-r1 #663: other files name the base model's end token only, or none."""
    settings = {"tokenizer_config": {"eos_token": spelled}}
    assert end_tokens_of(tmp_path, generation_config={"eos_token_id": named}, **settings) == expected
    (tmp_path / "generation_config.json").unlink()
    assert end_tokens_of(tmp_path, config=named, **settings) == expected


@pytest.mark.parametrize("value", [5, [], {}, {"content": 5}, True])
def test_an_end_token_that_is_no_text_is_named(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config.json: eos_token must be text or an object with content"):
        end_tokens_of(tmp_path, tokenizer_config={"eos_token": value})


def test_null_and_unknown_end_tokens_of_the_tokenizer_name_none(tmp_path: Path) -> None:
    for settings in ({}, {"eos_token": None}, {"eos_token": "<|nobody knows|>"}):
        assert end_tokens_of(tmp_path, config=5, tokenizer_config=settings) == (5,)


# Context.


def test_linear_scaling_stretches_the_context_and_yarn_does_where_asked(tmp_path: Path) -> None:
    """vLLM #8793, #56446."""

    def lens(**scaling: Any) -> tuple[int, int]:
        config = DecoderConfig.from_folder(write(tmp_path, rope_scaling=scaling))
        return config.context_len, config.longest_context_len

    assert lens(type="linear", factor=4.0) == (1024, 1024)
    assert lens(rope_type="yarn", factor=4.0) == (256, 1024)
    assert lens(rope_type="yarn", factor=4.0, original_max_position_embeddings=64) == (256, 256)
    assert lens(rope_type="llama3", **{name: SCALINGS["llama3"][name] for name in list(SCALINGS["llama3"])[1:]}) == (
        256,
        256,
    )


def test_an_identity_has_the_context_that_was_asked_for_as_far_as_yarn_goes(tmp_path: Path) -> None:
    folder = save_tiny(
        tmp_path / "model", "llama", {**SIZES, "rope_parameters": {**SCALINGS["yarn"], "rope_theta": 1e4}}
    )
    config = json.loads((folder.folder / "config.json").read_text())
    config["max_position_embeddings"] = 64
    (folder.folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder.folder)
    lens = [model_identity(folder.folder, max_model_len=asked).context_len for asked in (0, 40, 100, 256, 1000)]
    assert lens == [64, 64, 100, 256, 256]


# EAGLE-3 heads.

EAGLE3_OPTIONS = ("eagle_aux_hidden_state_layer_ids",)
EAGLE3_FIELDS = ("eagle_config", "draft_vocab_size", *EAGLE3_SIZES, "rms_norm_eps")

SAFEAI = {
    "architectures": ["LlamaForCausalLMEagle3"],
    **{name: LLAMA[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "draft_vocab_size": 50,
    "norm_before_residual": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


@pytest.mark.parametrize("field", [*EAGLE3_FIELDS, *EAGLE3_OPTIONS])
def test_a_field_of_an_eagle3_head_is_taken_or_named(field: str, tmp_path: Path) -> None:
    """sglang #27908."""
    for value in VALUES:
        options = SAFEAI["eagle_config"]
        content = (
            {**SAFEAI, "eagle_config": changed(options, field, value)}
            if field in EAGLE3_OPTIONS
            else changed(SAFEAI, field, value)
        )
        (tmp_path / "config.json").write_text(json.dumps(content))
        refused = eagle3_refusal(content, tmp_path / "config.json")
        if refused:
            assert f": {field} " in refused
            with pytest.raises(ConfigError) as caught:
                EagleConfig.from_folder(tmp_path)
            assert str(caught.value) == refused
        else:
            head = EagleConfig.from_folder(tmp_path)
            assert head.layer_ids is None or all(type(layer) is int for layer in head.layer_ids)

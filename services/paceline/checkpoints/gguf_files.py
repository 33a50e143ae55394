"""Converts a GGUF file into an ordinary checkpoint folder with 16-bit weights.

The library `gguf` reads the file and dequantises its tensors. Names, the order of rotary rows, settings and tokenizer
become those of the checkpoint that the file was made from.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paceline.checkpoints.json_files import CONFIG, TOKENIZER, shown
from paceline.checkpoints.safetensor_files import WEIGHTS_FILE, TensorShape, as_bfloat16, write_tensors
from paceline.checkpoints.tokenizer import TOKENIZER_FILE
from paceline.core.errors import ConfigError
from paceline.service.config import reason

Metadata = Mapping[str, Any]

SUFFIX: Final = ".gguf"
PROGRESS_S: Final = 5.0
# Kinds of tokens in `tokenizer.ggml.token_type`.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
ENDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
NAMED: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Llama 3's scaling of rotary positions, of which a file holds the factors alone.
LOW_FREQ, HIGH_FREQ, ORIGINAL_LEN = 1.0, 4.0, 8192
ROPE_FACTORS: Final = "rope_freqs.weight"
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TENSORS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EVERYWHERE: Final = frozenset(f"{name}.weight" for name in _LAYER_TENSORS if not name.endswith(("q_norm", "k_norm")))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Models that a file calls by one `general.architecture`.

    Attributes:
        rotated: Whether rows of queries and keys are in GGML's order, pairs of rotary rows side by side.
        beside: Tensors of a layer beside those that all families have.
    """

    architecture: str
    model_type: str
    rotated: bool = False
    beside: frozenset[str] = frozenset()


_FAMILIES: Final = {
    "llama": _Family(architecture="LlamaForCausalLM", model_type="llama", rotated=True),
    "qwen2": _Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        beside=frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"}),
    ),
    "qwen3": _Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        beside=frozenset({"attn_q_norm.weight", "attn_k_norm.weight"}),
    ),
}


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Bytes of the kind of an array's entries, before their number.
ARRAY_KIND_BYTES: Final = 4
_BYTES: Final = pre_tokenizers.ByteLevel(add_prefix_space=False)
# By `tokenizer.ggml.pre`, of byte-level BPE.
_PRE_TOKENIZERS: Final[Mapping[str, pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _BYTES,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES]),
    "qwen2": _split(_WORDS.format(digits=r"\p{N}")),
    "llama-bpe": _split(_WORDS.format(digits=r"\p{N}{1,3}")),
}


def convert(file: Path, out: Path, say: Callable[[str], None]) -> None:
    """Writes the checkpoint of a GGUF file into an existing folder.

    Args:
        say: Gets a line now and then, for whoever waits.

    Raises:
        ConfigError: The file is broken or not served, or the folder cannot be written; names the file.
    """
    try:
        _convert(file, out, say)
    except OSError as error:
        raise ConfigError(f"{file} cannot be converted in {out.parent}: {reason(error, file)}") from error
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{file} is broken: {type(error).__name__}: {error}; fetch or copy it again") from error


def _convert(file: Path, out: Path, say: Callable[[str], None]) -> None:
    reader = _open(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    family = _family_of(metadata, file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, family, tensors, file)
    _check_shapes(_names(tensors, config["num_hidden_layers"], family, file), tensors, config, file)
    _write_json(out / CONFIG, config)
    _write_tokenizer(metadata, out, file)
    _write_weights(file, tensors, config, out / WEIGHTS_FILE, say)


def _open(file: Path) -> Any:
    try:
        from gguf import GGUFReader, GGUFValueType
    except ModuleNotFoundError:
        raise ConfigError(f"{file}: reading GGUF needs the package gguf: install paceline[gguf]") from None

    class Reader(GGUFReader):  # type: ignore[misc, unused-ignore]  # the package has no types
        """Refuses arrays that the file cannot hold; the package would look for their entries for ever."""

        def _get_field_parts(self, offset: int, raw_type: int) -> Any:
            if raw_type == GGUFValueType.ARRAY:
                count = int(self._get(offset + ARRAY_KIND_BYTES, np.uint64)[0])
                if count > len(self.data) - offset:
                    raise ValueError(f"an array of {count} entries is longer than the file")
            return super()._get_field_parts(offset, raw_type)

    try:
        return Reader(file)
    except (ValueError, LookupError, OverflowError) as error:
        raise ConfigError(f"{file} cannot be read as GGUF: {error}; fetch or copy it again") from error


def _family_of(metadata: Metadata, file: Path) -> _Family:
    name = metadata.get("general.architecture")
    family = _FAMILIES.get(str(name))
    if family is None:
        raise ConfigError(
            f"{file}: general.architecture {shown(name)} is not converted, only {', '.join(_FAMILIES)} are: name the "
            "checkpoint with safetensors that it was made from"
        )
    if metadata.get("split.count", 0) > 1:
        raise ConfigError(
            f"{file}: split.count is {metadata['split.count']}: join the parts with llama-gguf-split --merge first"
        )
    for key in ("expert_count", "attention.sliding_window"):
        if metadata.get(f"{name}.{key}"):
            raise ConfigError(f"{file}: {name}.{key} must be 0 to be converted, got {metadata[f'{name}.{key}']}")
    return family


def _config(metadata: Metadata, family: _Family, tensors: Mapping[str, Any], file: Path) -> dict[str, Any]:
    name = metadata["general.architecture"]

    def number(key: str, default: float | None = None) -> Any:
        found = metadata.get(f"{name}.{key}", default)
        if type(found) not in (int, float):
            raise ConfigError(f"{file}: {name}.{key} must be one number to be converted, got {shown(found)}")
        # Written as float32: 1e-5 and not 9.999999747378752e-06.
        return found if isinstance(found, int) else float(f"{found:.7g}")

    heads, hidden = number("attention.head_count"), number("embedding_length")
    if type(heads) is not int or heads < 1:
        raise ConfigError(f"{file}: {name}.attention.head_count must be at least 1, got {heads}")
    head_dim = number("attention.key_length", hidden // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if number(key, head_dim) != head_dim:
            raise ConfigError(f"{file}: {name}.{key} must be the size of a head, {head_dim}, got {number(key)}")
    theta = number("rope.freq_base", 10_000.0)
    scaling = _rope_scaling(metadata, tensors, head_dim, theta, file)
    ids = {key: metadata[f"tokenizer.ggml.{key}"] for key in ENDS if f"tokenizer.ggml.{key}" in metadata}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 0,
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        **({"rope_scaling": scaling} if scaling else {}),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ids.values())) or None,
        "dtype": "bfloat16",
    }


def _rope_scaling(
    metadata: Metadata, tensors: Mapping[str, Any], head_dim: int, theta: float, file: Path
) -> dict[str, Any] | None:
    prefix = f"{metadata['general.architecture']}.rope.scaling"
    # Older files have `scale_linear` alone; a factor without a type is llama.cpp's linear.
    factor = metadata.get(f"{prefix}.factor", metadata.get(f"{prefix.removesuffix('scaling')}scale_linear", 1.0))
    kind = metadata.get(f"{prefix}.type", "none" if factor == 1.0 else "linear")
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise ConfigError(f"{file}: {prefix}.factor must be a number above 0, got {shown(factor)}")
    if ROPE_FACTORS in tensors:
        return _llama3_scaling(np.array(tensors[ROPE_FACTORS].data), head_dim, theta, file)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = metadata.get(f"{prefix}.original_context_length")
        if type(original) is not int or f"{prefix}.factor" not in metadata:
            raise ConfigError(f"{file}: yarn needs {prefix}.factor and {prefix}.original_context_length")
        return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    raise ConfigError(f"{file}: {prefix}.type {shown(kind)} is not converted, only none, linear and yarn are")


def _llama3_scaling(found: npt.NDArray[np.float32], head_dim: int, theta: float, file: Path) -> dict[str, Any]:
    """Returns the settings by which transformers computes these factors."""
    factor = round(float(found.max()), 3)
    lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((ORIGINAL_LEN / lengths - LOW_FREQ) / (HIGH_FREQ - LOW_FREQ), 0.0, 1.0)
    if found.shape != smooth.shape or not np.allclose(found, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ConfigError(f"{file}: {ROPE_FACTORS} holds other factors than Llama 3's, which are not converted")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ,
        "high_freq_factor": HIGH_FREQ,
        "original_max_position_embeddings": ORIGINAL_LEN,
    }


def _names(tensors: Mapping[str, Any], num_layers: int, family: _Family, file: Path) -> dict[str, str]:
    """Returns names in a checkpoint by names in the file.

    Raises:
        ConfigError: A tensor is missing, or would be left out.
    """
    if type(num_layers) is not int or not 0 < num_layers <= len(tensors):
        raise ConfigError(f"{file}: block_count must be from 1 to the number of tensors, got {num_layers}")
    wanted = {f"blk.{layer}.{name}" for layer in range(num_layers) for name in _EVERYWHERE | family.beside}
    wanted |= _TENSORS.keys() - {"output.weight"}
    missing = sorted(wanted - tensors.keys())
    unknown = sorted(tensors.keys() - wanted - {"output.weight", ROPE_FACTORS})
    if missing or unknown:
        kind, names = ("lacks", missing) if missing else ("holds", unknown)
        raise ConfigError(
            f"{file} {kind} the tensor {names[0]}, so it is no ordinary {family.architecture} and is not converted"
        )
    return {name: _name_in_checkpoint(name) for name in tensors if name != ROPE_FACTORS}


def _check_shapes(names: Mapping[str, str], tensors: Mapping[str, Any], config: Mapping[str, Any], file: Path) -> None:
    hidden, neurons, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[f"num_{each}_heads"] * size for each in ("attention", "key_value"))
    rows = {"attn_q": queries, "attn_k": keys, "attn_v": keys, "ffn_gate": neurons, "ffn_up": neurons}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (count, hidden) for name, count in rows.items()}
    shapes |= {f"{name}.bias": (count,) for name, count in rows.items()}
    shapes |= {"attn_output.weight": (hidden, queries), "ffn_down.weight": (hidden, neurons)}
    shapes |= {f"{name}.weight": (size,) for name in ("attn_q_norm", "attn_k_norm")}
    shapes |= {f"{name}.weight": (config["vocab_size"], hidden) for name in ("token_embd", "output")}
    for name in names:
        layer = _LAYER_TENSOR.fullmatch(name)
        wanted = shapes.get(f"{layer[2]}.{layer[3]}" if layer else name, (hidden,))
        found = tuple(map(int, tensors[name].shape[::-1]))
        if found != wanted:
            raise ConfigError(f"{file}: the tensor {name} must be of shape {wanted}, got {found}")


def _name_in_checkpoint(name: str) -> str:
    layer = _LAYER_TENSOR.fullmatch(name)
    return f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.{layer[3]}" if layer else _TENSORS[name]


def _write_weights(
    file: Path, tensors: Mapping[str, Any], config: Mapping[str, Any], out: Path, say: Callable[[str], None]
) -> None:
    family = _FAMILIES[config["model_type"]]
    names = _names(tensors, config["num_hidden_layers"], family, file)
    # GGML names the innermost dimension first.
    shapes = {
        each: TensorShape(dtype="BF16", shape=tuple(map(int, tensors[name].shape[::-1])))
        for name, each in names.items()
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def cells() -> Iterator[npt.NDArray[np.uint16]]:
        said_s = time.monotonic()
        for number, (name, each) in enumerate(names.items()):
            values = _dequantised(tensors[name], file).reshape(shapes[each].shape)
            layer = _LAYER_TENSOR.fullmatch(name)
            if family.rotated and layer and layer[2] in heads:
                values = _in_order(values, heads[layer[2]])
            yield as_bfloat16(values)
            if time.monotonic() > said_s + PROGRESS_S:
                said_s = time.monotonic()
                say(f"converted {number + 1} of {len(names)} tensors")

    write_tensors(out, shapes, cells())


def _dequantised(tensor: Any, file: Path) -> npt.NDArray[np.float32]:
    from gguf.quants import dequantize

    kind = tensor.tensor_type
    try:
        found: npt.NDArray[np.float32] = np.ascontiguousarray(dequantize(tensor.data, kind), np.float32)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"{file}: the type {kind.name} of tensor {tensor.name} is not converted: {error}") from error
    return found


def _in_order(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of queries or keys with the halves of a head one after the other, from pairs side by side."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _write_tokenizer(metadata: Metadata, out: Path, file: Path) -> None:
    prefix = "tokenizer.ggml."
    tokens, kinds = metadata.get(f"{prefix}tokens"), metadata.get(f"{prefix}token_type")
    if not (isinstance(tokens, list) and isinstance(kinds, list) and len(tokens) == len(kinds)):
        raise ConfigError(f"{file} lacks {prefix}tokens or {prefix}token_type, so it has no tokenizer to convert")
    vocab = {token: at for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    model = metadata.get(f"{prefix}model")
    for key in (f"{prefix}{each}_token_id" for each in (*NAMED.values(), "eot", "eom")):
        if key in metadata and (type(metadata[key]) is not int or not 0 <= metadata[key] < len(tokens)):
            raise ConfigError(f"{file}: {key} must be an id below {len(tokens)}, got {shown(metadata[key])}")
    if model == "gpt2" and not metadata.get(f"{prefix}merges"):
        raise ConfigError(f"{file} lacks {prefix}merges, which a tokenizer of model gpt2 needs")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, vocab, file)
    elif model == "llama":
        tokenizer = _sentence_pieces(metadata, vocab, tokens)
    else:
        raise ConfigError(f"{file}: {prefix}model {shown(model)} is not converted, only gpt2 and llama are")
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    named = {
        name: tokens[metadata[f"{prefix}{key}_token_id"]]
        for name, key in NAMED.items()
        if f"{prefix}{key}_token_id" in metadata
    }
    begins = metadata.get(f"{prefix}add_bos_token", model == "llama" or metadata.get(f"{prefix}pre") == "llama-bpe")
    if begins and "bos" in named:
        _begin_with(tokenizer, named["bos"], vocab[named["bos"]])
    tokenizer.save(str(out / TOKENIZER_FILE))
    templates = _templates(metadata)
    _write_json(
        out / TOKENIZER,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": token for name, token in named.items()},
            "add_bos_token": bool(begins),
            "clean_up_tokenization_spaces": False,
            **({"chat_template": templates} if templates else {}),
        },
    )


def _byte_level(metadata: Metadata, vocab: dict[str, int], file: Path) -> Tokenizer:
    pre = str(metadata.get("tokenizer.ggml.pre"))
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{file}: tokenizer.ggml.pre {pre!r} is not converted, only {', '.join(sorted(_PRE_TOKENIZERS))} are: "
            "name the checkpoint with safetensors that it was made from"
        )
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(_bpe(vocab, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _bpe(vocab: dict[str, int], merges: Sequence[tuple[str, str]], **settings: Any) -> models.BPE:
    """Raises ValueError where tokens and merges do not fit; the package raises plain exceptions."""
    try:
        return models.BPE(vocab=vocab, merges=list(merges), **settings)
    except Exception as error:
        raise ValueError(f"tokenizer.ggml.merges: {error}") from error


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentence_pieces(metadata: Metadata, vocab: dict[str, int], tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece's BPE: of all pairs that are tokens, the one with the best score is merged first."""
    scores = metadata["tokenizer.ggml.scores"]
    merges = sorted(
        (
            (token[:at], token[at:])
            for token in vocab
            for at in range(1, len(token))
            if {token[:at], token[at:]} <= vocab.keys()
        ),
        key=lambda pair: (-scores[vocab["".join(pair)]], vocab[pair[0]], vocab[pair[1]]),
    )
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(_bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaced = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if spaced else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if spaced else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return tokenizer


def _begin_with(tokenizer: Tokenizer, token: str, token_id: int) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, token_id)]
    )


def _templates(metadata: Metadata) -> str | list[dict[str, str]]:
    """The chat template; where there are several, all of them by name, as tokenizer_config.json holds them."""
    key = "tokenizer.chat_template"
    named = {
        name: metadata[f"{key}.{name}"]
        for name in metadata.get("tokenizer.chat_templates", ())
        if f"{key}.{name}" in metadata
    }
    default = str(metadata.get(key, ""))
    if not named:
        return default
    return [{"name": name, "template": str(each)} for name, each in ({"default": default} | named).items() if each]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

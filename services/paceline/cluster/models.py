"""`paceline models check` and `fetch`: which engine serves a model; fetching one of the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.checkpoints.families import (
    GENERIC,
    LEAN,
    Config,
    architectures,
    context_lens,
    describes_eagle3,
    eagle3_refusal,
    family_of,
    quant_method,
    refusal,
    text_config,
    vllm_refusal,
)
from paceline.checkpoints.identity import IGNORED, end_tokens
from paceline.checkpoints.json_files import read_object
from paceline.checkpoints.source import CONFIG_FILES, MODEL_FILES, TEXT_FILES, folder_of, parse
from paceline.cluster.checkpoints import num_parameters
from paceline.cluster.foreground import say
from paceline.core.errors import ConfigError
from paceline.service.config import as_called, setting
from paceline.service.config import parse as parse_settings

KV_BYTES: Final = 2
_WIDE: Final = ("float32", "float64")
# A group of quantised weights has a 16-bit scale and a zero point.
_SCALE_BITS: Final = 16
_GROUP: Final = 128
# Bits of a weight by method, where config.json gives no number: 8-bit floats, 4-bit floats in groups of 32.
_METHOD_BITS: Final = {"fp8": 8.0, "fbgemm_fp8": 8.0, "modelopt": 8.0, "mxfp4": 4.25}
# Keys of architectures in which only every n-th layer has KV.
_ATTENTION_EVERY: Final = ("attn_layer_period", "full_attention_interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a decoder of text.

    Attributes:
        num_parameters: None: unknown from config.json.
        weight_bytes: As stored; None: likewise.
        kv_layer_bytes: KV of one token in one layer, in 16 bits.
        full_layers: Layers whose KV grows with the text.
        window_layers: Layers that look back no further than `window` tokens.
        context_len: None: unknown from config.json.
        longest_context_len: Where scaled positions are asked for; None likewise.
    """

    num_layers: int
    num_parameters: int | None
    weight_bytes: int | None
    kv_layer_bytes: int
    full_layers: int
    window_layers: int
    window: int
    context_len: int | None
    longest_context_len: int | None

    def kv_bytes(self, num_tokens: int) -> int:
        """KV of a session with this number of tokens."""
        return self.kv_layer_bytes * (
            self.full_layers * num_tokens + self.window_layers * min(num_tokens, self.window or num_tokens)
        )


def sizes_of(config: Config) -> Sizes | None:
    """Reads the sizes of a decoder of text; None: config.json does not have them.

    Sums of matrices; norms and biases are left out, so counts are a little low. State other than KV (as in Mamba) is
    not counted.
    """
    text = {**config, **text_config(config)}
    layers = _first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    hidden = _first(text, "hidden_size", "n_embd", "d_model")
    if not layers or not hidden:
        return None
    full, window_layers, window = _layer_kinds(text, layers)
    limit = _first(text, "max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    lens = limit and context_lens(limit, str(text.get("model_type")), scaling if isinstance(scaling, Mapping) else {})
    mixed = any(text.get(name) for name in _ATTENTION_EVERY) or not _heads(text)
    counted = None if mixed else _parameters(text, layers, hidden)
    return Sizes(
        num_layers=layers,
        num_parameters=None if counted is None else sum(counted),
        weight_bytes=None if counted is None else _weight_bytes(config, text, *counted),
        kv_layer_bytes=_kv_layer_bytes(text, hidden),
        full_layers=full,
        window_layers=window_layers,
        window=window,
        context_len=lens[0] if lens else None,
        longest_context_len=lens[1] if lens else None,
    )


def _first(config: Config, *names: str) -> int | None:
    return next((int(value) for name in names if isinstance(value := config.get(name), int | float) and value), None)


def _heads(text: Config) -> int | None:
    return _first(text, "num_attention_heads", "n_head", "n_heads", "num_heads")


def _kv_heads(text: Config) -> int:
    one = text.get("multi_query") and not text.get("new_decoder_architecture")
    return 1 if one else _first(text, "num_key_value_heads", "num_kv_heads") or _heads(text) or 0


def _head_dim(text: Config, hidden: int) -> int:
    return _first(text, "head_dim") or hidden // (_heads(text) or hidden)


def _kv_layer_bytes(text: Config, hidden: int) -> int:
    latent = _first(text, "kv_lora_rank")
    if latent:
        return KV_BYTES * (latent + (_first(text, "qk_rope_head_dim") or 0))
    return 2 * KV_BYTES * _kv_heads(text) * _head_dim(text, hidden)


def _layer_kinds(text: Config, layers: int) -> tuple[int, int, int]:
    """Returns how many layers see the whole text, how many a window of it, and the window."""
    every = _first(text, *_ATTENTION_EVERY)
    if every or not _heads(text):
        return (layers // every if every else 0), 0, 0
    window = 0 if text.get("use_sliding_window") is False else _first(text, "sliding_window") or 0
    kinds, pattern = text.get("layer_types"), _first(text, "sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(kinds, list):
        windowed = kinds.count("sliding_attention")
        return kinds.count("full_attention"), windowed, window if windowed else 0
    if not window or window >= (_first(text, "max_position_embeddings") or 0):
        return layers, 0, 0
    if text.get("model_type") == "gemma2":
        pattern = 2
    full = layers // pattern if pattern else 0
    return full, layers - full, window


def _parameters(text: Config, layers: int, hidden: int) -> tuple[int, int, int]:
    """Returns how many parameters embeddings and head have, the attention of all layers, and their MLPs."""
    family = family_of(text)
    vocab, tied = _first(text, "vocab_size") or 0, text.get("tie_word_embeddings", family is not None and family.tied)
    positions = (_first(text, "n_positions") or 0) * hidden
    embedding = vocab * hidden * (1 if tied else 2) + positions
    matrices = 3 if family is None or family.gated else 2
    default = matrices * hidden * (_first(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden)
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
    if not experts:
        return embedding, layers * _attention(text, hidden), layers * default
    dense = _first(text, "first_k_dense_replace") or 0
    width = _first(text, "moe_intermediate_size", "intermediate_size") or 4 * hidden
    shared = (_first(text, "n_shared_experts") or 0) * width + (_first(text, "shared_expert_intermediate_size") or 0)
    if "llama4" in str(text.get("model_type")):
        shared = width
    mixture = hidden * experts + matrices * hidden * (experts * width + shared)
    return embedding, layers * _attention(text, hidden), dense * default + (layers - dense) * mixture


def _attention(text: Config, hidden: int) -> int:
    heads, rank = _heads(text) or 0, _first(text, "kv_lora_rank")
    if not rank:
        head_dim = _head_dim(text, hidden)
        return 2 * hidden * head_dim * (heads + _kv_heads(text))
    plain, turned = _first(text, "qk_nope_head_dim") or 0, _first(text, "qk_rope_head_dim") or 0
    value, low = _first(text, "v_head_dim") or 0, _first(text, "q_lora_rank")
    queries = heads * (plain + turned)
    asking = hidden * low + low * queries if low else hidden * queries
    return asking + hidden * (rank + turned) + rank * heads * (plain + value) + heads * value * hidden


def _weight_bytes(config: Config, text: Config, embedding: int, attention: int, mlps: int) -> int:
    kept = 4 if str(text.get("dtype") or text.get("torch_dtype")) in _WIDE else 2
    quantised = config.get("quantization_config") or text.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return kept * (embedding + attention + mlps)
    bits = _bits(quantised)
    # gpt-oss quantises its experts only.
    whole = embedding + (attention if quantised.get("quant_method") == "mxfp4" else 0)
    return round(kept * whole + (embedding + attention + mlps - whole) * bits / 8)


def _bits(quantised: Mapping[str, Any]) -> float:
    """Bits of a quantised weight, scales included."""
    method = str(quantised.get("quant_method"))
    if method == "bitsandbytes":
        return 4 + 0.13 if quantised.get("load_in_4bit") else 8
    groups = quantised.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        weights = next(iter(groups.values())).get("weights") or {}
        return _grouped(weights.get("num_bits") or 8, weights.get("group_size"))
    if "bits" in quantised:
        return _grouped(quantised["bits"], quantised.get("group_size", _GROUP))
    return _METHOD_BITS.get(method, 8.0)


def _grouped(bits: int, group: int | None) -> float:
    return float(bits) if not group or group < 0 else bits + (_SCALE_BITS + bits) / group


PROG = "paceline models"
CHECK_DESCRIPTION = (
    "Says which engine serves a model, what it takes of memory and what limits it; reads its JSON settings alone."
)
FETCH_DESCRIPTION = (
    "Fetches a checkpoint of the Hugging Face Hub into its cache (HF_HOME), with the token HF_TOKEN, and prints the "
    "folder. What is there already is not fetched again."
)
GB = 1e9
KIB = 1024
DECODERS = {
    LEAN: "serves it, by the decoder made for it",
    GENERIC: "serves it, by transformers' modules (slower), if a trial at start gives transformers' own logits",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig:
    name: str = setting(help="ORG/NAME or hf://ORG/NAME@REVISION of the Hugging Face Hub, or a checkpoint folder.")
    context: int | None = setting(None, help="Length of a session to count.", unit="tokens", low=1, high=100_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    name: str = setting(help="ORG/NAME or hf://ORG/NAME@REVISION of the Hugging Face Hub.")
    tokenizer_only: bool = setting(False, help="Fetch what a gateway reads: tokenizer, templates and settings.")


def main(argv: Sequence[str]) -> None:
    """Entry point of `paceline models`.

    Raises:
        ConfigError: There is no such action, or a checkpoint cannot be fetched; says what to do.
    """
    actions = {"check": check, "fetch": fetch}
    if not argv or argv[0] not in actions:
        raise ConfigError(f"needs one of {', '.join(actions)}, such as: {as_called(PROG)} check ORG/NAME")
    actions[argv[0]](argv[1:])


def fetch(argv: Sequence[str]) -> None:
    settings = parse_settings(FetchConfig, argv, os.environ, f"{PROG} fetch", FETCH_DESCRIPTION, first="name")
    files = TEXT_FILES if settings.tokenizer_only else MODEL_FILES
    say(str(folder_of(settings.name, "NAME", files=files, say=say)))


def check(argv: Sequence[str]) -> None:
    """Prints what serves a model; ends with status 1 if neither engine does."""
    settings = parse_settings(CheckConfig, argv, os.environ, f"{PROG} check", CHECK_DESCRIPTION, first="name")
    folder = folder_of(settings.name, "NAME", files=CONFIG_FILES)
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{settings.name} holds no config.json: name a checkpoint in Hugging Face layout")
    config = read_object(path)
    # Half a download; of the Hub only the configuration was fetched.
    num_parameters(folder)
    say("\n".join([*answer(str(parse(settings.name)), config, settings.context), *remarks(folder, config)]))
    refused = eagle3_refusal(config) if describes_eagle3(config) else refusal(config) and vllm_refusal(config)
    if refused:
        raise SystemExit(1)


def remarks(folder: Path, config: Config) -> Iterator[str]:
    """Lines on what our engine warns of, or refuses, in the other files of a checkpoint folder."""
    vocab_size = text_config(config).get("vocab_size")
    try:
        ends = end_tokens(folder, config.get("eos_token_id"), vocab_size if isinstance(vocab_size, int) else 2**31)
    except ConfigError as error:
        yield f"our engine  no: {error}"
        return
    if ends.ignored:
        yield f"warning     {IGNORED.format(list(ends.ignored), vocab_size, folder)}"


def answer(name: str, config: Config, context: int | None = None) -> Iterator[str]:
    """Lines on one model.

    Args:
        name: What the user has named.
        context: Length of a session whose KV is counted, beside that of the longest.
    """
    if describes_eagle3(config):
        refused = eagle3_refusal(config)
        yield f"{name}  an EAGLE-3 head"
        yield f"our engine  {'no: ' + refused if refused else 'drafts with it, beside its target'}"
        return
    family, sizes = family_of(config), sizes_of(config)
    yield f"{name}  {', '.join(architectures(config) or ('no architecture',))}{_size(sizes)}"
    why, vllm_why = refusal(config), vllm_refusal(config)
    trial = DECODERS[family.decoder] if family is not None and family.decoder else DECODERS[GENERIC]
    yield f"our engine  {'no: ' + why if why else trial}"
    yield f"vLLM        {'no: ' + vllm_why if vllm_why else _vllm(config, known=family is not None)}"
    if sizes is not None and not (why and vllm_why):
        yield from _memory(config, sizes, context)
        yield f"limits      {_limits(sizes, ours=not why)}"


def _size(sizes: Sizes | None) -> str:
    if sizes is None:
        return ""
    count = "" if sizes.num_parameters is None else f", {_billions(sizes.num_parameters)} parameters"
    return f", {sizes.num_layers} layers{count}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 0.9995e9 else f"{count / 1e6:.3g} M"


def _vllm(config: Config, *, known: bool) -> str:
    images = ", its text alone" if "vision_config" in config else ""
    return f"serves it with --engine vllm{images}" if known else "is not known to serve it; try --engine vllm"


def _memory(config: Config, sizes: Sizes, context: int | None) -> Iterator[str]:
    if sizes.weight_bytes is None:
        yield "weights     config.json does not tell: the sizes of the *.safetensors do"
    else:
        kind = quant_method(config) or "as stored"
        yield f"weights     {sizes.weight_bytes / GB:.3g} GB ({kind})"
    if not sizes.full_layers and not sizes.window_layers:
        yield "KV          none: a state of fixed size for each session"
        return
    lengths = [length for length in (1000, context, sizes.context_len) if length]
    counted = ", ".join(f"{sizes.kv_bytes(length) / GB:.3g} GB for {length:,}" for length in dict.fromkeys(lengths))
    yield f"KV          {sizes.kv_bytes(1) / KIB:.4g} KiB a token, {counted} tokens (16 bits)"


def _limits(sizes: Sizes, *, ours: bool) -> str:
    context = (
        "a context that config.json does not tell" if sizes.context_len is None else f"{sizes.context_len:,} tokens"
    )
    if sizes.context_len and sizes.longest_context_len and sizes.longest_context_len > sizes.context_len:
        context += f", {sizes.longest_context_len:,} where --max-model-len asks for them (YaRN)"
    if not sizes.window_layers:
        return context
    if ours:
        return f"{context}; {sizes.window:,} in our engine, which serves no further than the sliding window"
    return f"{context}; {sizes.window_layers} layers look back {sizes.window:,} tokens"

"""JSON objects that strangers wrote, files of checkpoint folders and values of flags, and the fields that we read.

Fields have names, kinds and ranges; the first that does not fit gets a line that says so. Others may hold anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import ConfigError, shortened

MAX_VALUE_CHARS: Final = 80


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Attributes:
        wanted: What it is, to follow "must be".
        fits: Whether a value is one.
    """

    wanted: str
    fits: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        return Kind(f"{self.wanted} or {other.wanted}", lambda value: self.fits(value) or other.fits(value))


Kinds = Mapping[str, Kind]


def whole(low: int, high: int) -> Kind:
    """A whole number between two, inclusively."""
    return Kind(f"a whole number from {low:,} to {high:,}", lambda value: type(value) is int and low <= value <= high)


def number(low: float, high: float) -> Kind:
    """A number between two, inclusively."""
    return Kind(
        f"a number from {low:g} to {high:g}",
        lambda value: type(value) in (int, float) and math.isfinite(value) and low <= value <= high,
    )


def listed(of: Kind, plural: str) -> Kind:
    return Kind(f"a list of {plural}", lambda value: isinstance(value, list) and all(map(of.fits, value)))


def holding(**fields: Kind) -> Kind:
    """An object that has these fields, among others."""
    names = " and ".join(fields)
    return Kind(
        f"an object with {names}",
        lambda value: isinstance(value, dict) and all(kind.fits(value.get(name)) for name, kind in fields.items()),
    )


BOOLEAN: Final = Kind("true or false", lambda value: isinstance(value, bool))
TEXT: Final = Kind("text", lambda value: isinstance(value, str))
OBJECT: Final = Kind("an object", lambda value: isinstance(value, dict))
NULL: Final = Kind("null", lambda value: value is None)


def problem(content: Mapping[str, Any], kinds: Kinds, where: object, required: tuple[str, ...] = ()) -> str:
    """What is wrong with an object, in one line that names the place, the field and the value; empty: nothing.

    Args:
        kinds: Of its fields; others may be anything.
        where: File, or file and place in it.
        required: Fields that must be there.
    """
    for name in required:
        if name not in content:
            return f"{where}: {name} is missing; it must be {kinds[name].wanted}"
    for name, kind in kinds.items():
        if name in content and not kind.fits(content[name]):
            value = shortened(json.dumps(content[name], ensure_ascii=True), MAX_VALUE_CHARS)
            return f"{where}: {name} must be {kind.wanted}, got {value}"
    return ""


def check(content: Mapping[str, Any], kinds: Kinds, where: object, required: tuple[str, ...] = ()) -> None:
    """Refuses an object with a `problem`.

    Raises:
        ConfigError: Says which.
    """
    if found := problem(content, kinds, where, required):
        raise ConfigError(found)


CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SIZE: Final = whole(1, 2**24)
LENGTH: Final = whole(1, 2**31 - 1)
TOKEN_ID: Final = whole(0, 2**31 - 1)
DTYPE: Final = Kind(
    "a type such as bfloat16",
    lambda value: (
        isinstance(value, str) and re.fullmatch(r"auto|(torch\.)?(b?float(16|32|64)|float8_\w+)", value) is not None
    ),
)
THETA: Final = number(1, 1e12)
FACTOR: Final = number(1e-6, 1e6)

# What decides who serves a model.
DESCRIPTION: Final[Kinds] = {
    "architectures": listed(TEXT, "names") | NULL,
    "model_type": TEXT,
    "auto_map": OBJECT,
    "text_config": OBJECT | NULL,
    "quantization_config": OBJECT | NULL,
}
QUANTISATION: Final[Kinds] = {
    "quant_method": TEXT,
    "bits": whole(1, 64) | NULL,
    "group_size": whole(-1, 2**24) | NULL,
    "config_groups": OBJECT | NULL,
}
DECODER: Final[Kinds] = {
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "num_hidden_layers": whole(1, 4096),
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE | NULL,
    "head_dim": SIZE | NULL,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": number(1e-12, 0.1),
    "tie_word_embeddings": BOOLEAN,
    "attention_bias": BOOLEAN,
    "mlp_bias": BOOLEAN,
    "hidden_act": TEXT,
    "sliding_window": LENGTH | NULL,
    "use_sliding_window": BOOLEAN,
    "max_window_layers": whole(0, 4096),
    "layer_types": listed(TEXT, "names") | NULL,
    "partial_rotary_factor": number(1e-6, 1) | NULL,
    "rope_theta": THETA | NULL,
    "rope_scaling": OBJECT | NULL,
    "rope_parameters": OBJECT | NULL,
    "dtype": DTYPE | NULL,
    "torch_dtype": DTYPE | NULL,
}
END_TOKENS: Final[Kinds] = {
    "eos_token_id": Kind("a token id or a list of them", (TOKEN_ID | listed(TOKEN_ID, "them") | NULL).fits)
}
ROPE: Final[Kinds] = {
    "rope_type": TEXT | NULL,
    "type": TEXT | NULL,
    "rope_theta": THETA,
    "factor": FACTOR,
    "original_max_position_embeddings": LENGTH | NULL,
    "low_freq_factor": FACTOR,
    "high_freq_factor": FACTOR,
    "beta_fast": FACTOR | NULL,
    "beta_slow": FACTOR | NULL,
    "attention_factor": FACTOR | NULL,
    "mscale": FACTOR | NULL,
    "mscale_all_dim": FACTOR | NULL,
    "truncate": BOOLEAN | NULL,
}
# Fields without which a scaling cannot be computed.
ROPE_NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
SPELLING: Final[Kinds] = {"eos_token": TEXT | holding(content=TEXT) | NULL}
# Of an EAGLE-3 head, beside the sizes of its layer.
EAGLE3: Final[Kinds] = {
    "transformer_layer_config": OBJECT,
    "eagle_config": OBJECT | NULL,
    "draft_vocab_size": SIZE | NULL,
    "norm_before_residual": BOOLEAN | NULL,
    "eagle_aux_hidden_state_layer_ids": listed(whole(0, 4096), "layers") | NULL,
}
EAGLE3_SIZES: Final[Kinds] = {
    **{name: DECODER[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")},
    "intermediate_size": SIZE,
    "rms_norm_eps": DECODER["rms_norm_eps"],
    "vocab_size": SIZE,
}
EAGLE3_NEEDS: Final = ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")


def description_problem(config: Mapping[str, Any]) -> str:
    """What is wrong with the fields that say what a model is; empty: nothing."""
    quantised = config.get("quantization_config")
    return problem(config, DESCRIPTION, CONFIG) or (
        problem(quantised, QUANTISATION, f"{CONFIG}: quantization_config") if isinstance(quantised, dict) else ""
    )


def decoder_problem(config: Mapping[str, Any]) -> str:
    """What is wrong with the fields of a decoder that our engine serves; empty: nothing."""
    return (
        problem(config, {**DECODER, **END_TOKENS}, CONFIG)
        or _rope_problem(config, "rope_scaling")
        or _rope_problem(config, "rope_parameters")
        or _theta_problem(config)
    )


def lean_problem(config: Mapping[str, Any]) -> str:
    """What the decoder made for the Llama family does not compute; empty: nothing. The fields are of their kinds."""
    act, heads = config.get("hidden_act", "silu"), config.get("num_attention_heads")
    kv_heads, hidden = config.get("num_key_value_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim") or (hidden // heads if hidden and heads else 2)
    if act not in ("silu", "swish"):
        return f"{CONFIG}: hidden_act: only silu is served for {config.get('model_type')}, got {act!r}"
    if heads and kv_heads and heads % kv_heads:
        return f"{CONFIG}: num_key_value_heads must divide the {heads} heads, got {kv_heads}"
    if head_dim % 2 or not head_dim:
        return f"{CONFIG}: head_dim must be even, or hidden_size by num_attention_heads without it, got {head_dim}"
    return ""


def eagle3_problem(config: Mapping[str, Any], where: object = CONFIG) -> str:
    """What is wrong with the fields of an EAGLE-3 head; empty: nothing."""
    inner, options = config.get("transformer_layer_config"), config.get("eagle_config")
    return (
        problem(config, EAGLE3, where)
        or (problem(options, EAGLE3, f"{where}: eagle_config") if isinstance(options, dict) else "")
        or (
            problem(inner, EAGLE3_SIZES, f"{where}: transformer_layer_config", EAGLE3_NEEDS)
            if isinstance(inner, dict)
            else problem(config, EAGLE3_SIZES, where, EAGLE3_NEEDS)
        )
    )


def _theta_problem(config: Mapping[str, Any]) -> str:
    """Older files have null beside newer fields."""
    newer = config.get("rope_parameters") or {}
    given = config.get("rope_theta", 1)
    return "" if given is not None or newer else f"{CONFIG}: rope_theta must be {THETA.wanted}, got null"


def _rope_problem(config: Mapping[str, Any], name: str) -> str:
    """Newer files may have one scaling for each kind of layer."""
    found = config.get(name) or {}
    for part in (found, *(value for value in found.values() if isinstance(value, dict))):
        kind = part.get("rope_type") or part.get("type") or "default"
        needed = ROPE_NEEDS.get(kind, ()) if isinstance(kind, str) else ()
        if wrong := problem(part, ROPE, f"{CONFIG}: {name}", needed):
            return wrong
    return ""


# Newer checkpoints list all added tokens in their settings, and then the older file does not count.
LISTED_TOKENS, SPECIAL_TOKENS_FILE = "added_tokens_decoder", "special_tokens_map.json"
EXTRA_TOKENS, OLD_EXTRA_TOKENS = "extra_special_tokens", "additional_special_tokens"


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        ConfigError: It is missing, broken, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def parse_object(flag: str, text: str) -> dict[str, Any]:
    """Returns the JSON object in the value of a flag.

    Raises:
        ConfigError: It is broken, or not an object; names the flag.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} must be a JSON object: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {type(content).__name__}")
    return content


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json, with the special tokens of an older folder.

    Raises:
        ConfigError: A file cannot be read.
    """
    settings, older = (
        read_object(path) if path.is_file() else {} for path in (folder / TOKENIZER, folder / SPECIAL_TOKENS_FILE)
    )
    if OLD_EXTRA_TOKENS in settings and not settings.get(EXTRA_TOKENS):
        settings[EXTRA_TOKENS] = settings.pop(OLD_EXTRA_TOKENS)
    return settings if LISTED_TOKENS in settings else {**settings, **older}

"""The fields of a checkpoint's JSON files that we read, by name and kind; other fields may hold anything."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from paceline.checkpoints.fields import (
    BOOLEAN,
    NULL,
    OBJECT,
    TEXT,
    Kind,
    Kinds,
    holding,
    listed,
    number,
    problem,
    whole,
)

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

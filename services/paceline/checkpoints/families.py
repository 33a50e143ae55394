"""Models that our engine refuses by their config.json. Needs nothing but the standard library.

The types of other fields are transformers' affair, and whether a family can be served is found by a trial at start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.checkpoints.json_files import CONFIG, number, read_object, shown, whole
from paceline.core.errors import ConfigError

Config = Mapping[str, Any]

# Positions turned by frequencies that depend on the longest sequence of a batch.
LENGTH_DEPENDENT: Final = frozenset({"dynamic", "longrope"})
SERVED_SCALINGS: Final = frozenset({"default", "linear", "llama3", "yarn"})

EAGLE3_ARCHITECTURE: Final = "LlamaForCausalLMEagle3"

# Whole numbers of a head's layer, and those that must be there.
EAGLE3_NEEDS: Final = ("hidden_size", "intermediate_size", "num_attention_heads")
EAGLE3_SIZES: Final = (*EAGLE3_NEEDS, "num_key_value_heads", "head_dim", "vocab_size")
# Epsilon of norms, from and to.
NORM_EPS: Final = (1e-12, 0.1)

_SPECULATORS: Final = "speculators_model_type"
# Options of some heads that change what is computed.
_UNSERVED_IN_EAGLE3: Final = ("norm_before_fc", "norm_before_residual", "norm_output", "fc_norm")

# Architectures of our own decoder; others go through transformers' modules, which are tried at start.
LEAN_ARCHITECTURES: Final = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)


def refusal(config: Config) -> str:
    """Why our engine does not serve a model, by its config.json, and what to use instead; empty: it tries."""
    names = architectures(config)
    if len(names) != 1 or not names[0].endswith(("ForCausalLM", "LMHeadModel")):
        named = ", ".join(names) or "none is named"
        return f"architectures: must name one causal language model, got {named}: use --engine vllm"
    quantised = quant_method(config)
    if quantised:
        return (
            f"quantization_config: quantised checkpoints ({quantised}) are not served by our engine: name the one with "
            "bf16 weights, or serve this one with --engine vllm"
        )
    scaled = rope_types(config) & LENGTH_DEPENDENT
    if scaled:
        return (
            f"rope_scaling: {sorted(scaled)[0]!r} is not served by our engine, since it depends on the longest "
            "sequence of a batch: use --engine vllm"
        )
    unknown = rope_types(config) - SERVED_SCALINGS
    if unknown and names[0] in LEAN_ARCHITECTURES:
        served = sorted(SERVED_SCALINGS)
        return f"{CONFIG}: rope_parameters.rope_type: {sorted(unknown)[0]!r} is not served, one of {served} is"
    return ""


def eagle3_refusal(config: Config, where: object = CONFIG) -> str:
    """Why our engine does not draft with an EAGLE-3 head, by its config.json; empty: it does."""
    if _SPECULATORS in config:
        return f"{where}: {_SPECULATORS}: heads of speculators are not served; SpecForge's and SafeAILab's are"
    unserved = [name for name in _UNSERVED_IN_EAGLE3 if config.get(name)]
    if unserved:
        return f"{where}: {unserved[0]}: EAGLE-3 heads with this option are not served"
    try:
        _check_eagle3(config, where)
    except ConfigError as error:
        return str(error)
    return ""


def _check_eagle3(config: Config, where: object) -> None:
    options = config.get("eagle_config") or {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}: eagle_config must be an object, got {shown(options)}")
    for name in EAGLE3_SIZES:
        if name in EAGLE3_NEEDS or config.get(name) is not None:
            whole(config.get(name), f"{where}: {name}")
    number(config.get("rms_norm_eps"), f"{where}: rms_norm_eps", *NORM_EPS)
    if config.get("draft_vocab_size") is not None:
        whole(config["draft_vocab_size"], f"{where}: draft_vocab_size")
    ids = options.get("eagle_aux_hidden_state_layer_ids")
    if not (ids is None or (isinstance(ids, list) and all(type(each) is int for each in ids))):
        place = f"{where}: eagle_config: eagle_aux_hidden_state_layer_ids"
        raise ConfigError(f"{place} must be a list of layers, got {shown(ids)}")


def architectures(config: Config) -> tuple[str, ...]:
    """Names of the classes that config.json gives."""
    names = config.get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def quant_method(config: Config) -> str:
    """How the weights are quantised; empty: they are not."""
    found = config.get("quantization_config") or text_config(config).get("quantization_config")
    return str(found.get("quant_method", "unknown")) if isinstance(found, Mapping) else ""


def rope_types(config: Config) -> frozenset[str]:
    """Names of the scalings of rotary positions, in old and new spellings."""
    text = text_config(config)
    found = [part for name in ("rope_scaling", "rope_parameters") if isinstance(part := text.get(name), Mapping)]
    parts = [*found, *(each for part in found for each in part.values() if isinstance(each, Mapping))]
    return frozenset(str(part.get("rope_type") or part.get("type") or "default") for part in parts)


def context_lens(limit: int, model_type: str, scaling: Config) -> tuple[int, int]:
    """How far a model reads in tokens, as its author set it and at most.

    Linear scaling stretches the positions that config.json names. YaRN may stretch them in the file or leave that to
    whoever serves the model, since it costs quality in short texts; it is used when asked for.

    Args:
        model_type: As in config.json; Gemma 3's limit is that after scaling.
        scaling: rope_scaling or rope_parameters.
    """
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor") or 1
    if kind == "linear" and not model_type.startswith("gemma3"):
        return int(limit * factor), int(limit * factor)
    if kind == "yarn":
        return limit, max(limit, int((scaling.get("original_max_position_embeddings") or limit) * factor))
    return limit, limit


def text_config(config: Config) -> Config:
    """The part of config.json that describes the decoder of text."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def is_eagle3(folder: Path) -> bool:
    """Whether a checkpoint folder holds an EAGLE-3 head."""
    return (folder / "config.json").is_file() and describes_eagle3(read_object(folder / "config.json"))


def describes_eagle3(config: Config) -> bool:
    """Whether a config.json is that of an EAGLE-3 head."""
    return EAGLE3_ARCHITECTURE in architectures(config) or config.get(_SPECULATORS) == "eagle3"

"""Reads from a checkpoint folder what its model is: sizes, end tokens, vocabulary. Loads no weights.

transformers reads config.json, so that old and new spellings (`rope_theta` and `rope_scaling`, or
`rope_parameters`) mean what their authors meant; everything this engine would compute wrongly is refused
here, by name.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from paceline.checkpoints.families import NORM_EPS, architectures, context_lens, refusal, text_config
from paceline.checkpoints.identity import eos_token_ids
from paceline.checkpoints.json_files import CONFIG, MOST_LENGTH, MOST_SIZE, number, read_object, whole
from paceline.core.errors import ConfigError
from paceline.engine.layers import RopeFrequencies, rope_frequencies

MOST_LAYERS = 4096
# Configs of transformers check the names of activations, which import kernels of its hub, and these torch's compilers:
# 120 MiB of every process, for a decorator that we never use.
_HUB_KERNELS, _ACTIVATIONS = "transformers.integrations.hub_kernels", "transformers.activations"


def _import_activations() -> None:
    """Imports transformers' activations without the kernels of its hub, unless these are there already."""
    if _ACTIVATIONS in sys.modules or _HUB_KERNELS in sys.modules:
        return
    without = ModuleType(_HUB_KERNELS)
    without.use_kernel_forward_from_hub = lambda *_: lambda layer: layer  # type: ignore[attr-defined]
    sys.modules[_HUB_KERNELS] = without
    try:
        import_module(_ACTIVATIONS)
    except ImportError:
        # Another version needs more of them, and imports them itself.
        sys.modules.pop(_ACTIVATIONS, None)
    finally:
        del sys.modules[_HUB_KERNELS]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Settings that every decoder has.

    Attributes:
        model_type: transformers' name of the family, e.g. "llama".
        architecture: Class named in config.json, e.g. "LlamaForCausalLM".
        vocab_size: Rows of the head, padding included.
        context_len: Longest sequence; a sliding window shortens it, since beyond it results would differ.
        longest_context_len: With the scaling of positions that config.json has, where that is asked for.
        eos_token_ids: See `eos_token_ids`; may be empty.
    """

    model_type: str
    architecture: str
    vocab_size: int
    context_len: int
    longest_context_len: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def from_folder(cls, folder: Path) -> DecoderConfig:
        """Reads a checkpoint folder.

        Raises:
            ConfigError: Unreadable, or not served; names the field.
        """
        return cls.from_transformers(read_transformers_config(folder), folder)

    @classmethod
    def from_transformers(cls, config: PretrainedConfig, folder: Path) -> DecoderConfig:
        """Takes what is needed from a config that transformers has read."""
        num_heads, vocab_size = _size(config, "num_attention_heads"), _size(config, "vocab_size")
        context_len, longest = _context_lens(config)
        return cls(
            model_type=config.model_type,
            architecture=next(iter(config.architectures or ()), "unknown"),
            vocab_size=vocab_size,
            context_len=context_len,
            longest_context_len=longest,
            eos_token_ids=eos_token_ids(folder, config.eos_token_id, vocab_size),
            num_layers=_size(config, "num_hidden_layers", MOST_LAYERS),
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads") if _has(config, "num_key_value_heads") else num_heads,
            head_dim=_size(config, "head_dim")
            if _has(config, "head_dim")
            else whole(_size(config, "hidden_size") // num_heads, f"{CONFIG}: hidden_size by num_attention_heads"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Shape settings of the lean decoder beyond `DecoderConfig`."""

    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    tied_head: bool
    rope: RopeFrequencies

    @classmethod
    def from_transformers(cls, config: PretrainedConfig, head_dim: int) -> LlamaShape:
        """Takes the shape from a config of one of `LEAN_ARCHITECTURES`.

        Raises:
            ConfigError: An option that the lean decoder does not compute; names the field.
        """
        if config.hidden_act not in ("silu", "swish"):
            raise ConfigError(
                f"config.json: hidden_act: only silu is served for {config.model_type}, got {config.hidden_act!r}"
            )
        heads, kv_heads = _size(config, "num_attention_heads"), _size(config, "num_key_value_heads")
        if heads % kv_heads:
            raise ConfigError(f"{CONFIG}: num_key_value_heads must divide the {heads} heads, got {kv_heads}")
        rope = rope_frequencies(config, head_dim)
        if 2 * len(rope.inverse) != head_dim:
            raise ConfigError(
                f"config.json: {config.model_type} is served with full rotary heads of an even size only (head_dim, "
                f"num_attention_heads, partial_rotary_factor), got {head_dim}, of which {2 * len(rope.inverse)} turn"
            )
        return cls(
            hidden_size=_size(config, "hidden_size"),
            intermediate_size=_size(config, "intermediate_size"),
            rms_norm_eps=number(config.rms_norm_eps, f"{CONFIG}: rms_norm_eps", *NORM_EPS),
            tied_head=bool(config.tie_word_embeddings),
            rope=rope,
        )


def read_transformers_config(folder: Path) -> PretrainedConfig:
    """config.json of a local folder, read by transformers; remote code is never run.

    Raises:
        ConfigError: Says what is missing or wrong.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: give a folder in the Hugging Face checkpoint format")
    given = read_object(folder / "config.json")
    if refused := refusal(given):
        raise ConfigError(f"{refused} ({folder})")
    (architecture,) = architectures(given)
    if given.get("auto_map") and architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ConfigError(
            f"auto_map: the model brings Python code of its own ({architecture}), which is never run here: name one "
            f"that transformers knows, or serve it with --engine vllm --vllm-arg=--trust-remote-code ({folder})"
        )
    # Some families list their layers as they are read: 2**40 took all memory.
    if isinstance(layers := text_config(given).get("num_hidden_layers"), int):
        whole(layers, f"{CONFIG}: num_hidden_layers", 1, MOST_LAYERS)
    _import_activations()
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Each family has checks of its own, which raise what they like.
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{folder / 'config.json'} cannot be read by transformers: {said}") from error
    return config


def _has(config: PretrainedConfig, name: str) -> bool:
    return bool(getattr(config, name, None))


def _size(config: PretrainedConfig, name: str, most: int = MOST_SIZE) -> int:
    return whole(getattr(config, name, None), f"{CONFIG}: {name}", 1, most)


def _context_lens(config: PretrainedConfig) -> tuple[int, int]:
    """How far the model reads, and how far at most."""
    limit = _size(config, "max_position_embeddings", MOST_LENGTH)
    scaling = getattr(config, "rope_parameters", None) or {}
    try:
        lens = [
            whole(each, "a scaled context", 1, MOST_LENGTH) for each in context_lens(limit, config.model_type, scaling)
        ]
    except (ArithmeticError, TypeError, ValueError, ConfigError) as error:
        raise ConfigError(f"{CONFIG}: rope_parameters: {scaling} cannot be computed: {error}") from error
    layer_types = getattr(config, "layer_types", None)
    if _has(config, "sliding_window") and (layer_types is None or "sliding_attention" in layer_types):
        window = _size(config, "sliding_window", MOST_LENGTH)
        return min(lens[0], window), min(lens[1], window)
    return lens[0], lens[1]

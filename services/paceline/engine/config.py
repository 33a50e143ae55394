"""Reads from a checkpoint folder what its model is: sizes, end tokens, vocabulary. Loads no weights.

transformers reads config.json, so that old and new spellings (`rope_theta` and `rope_scaling`, or
`rope_parameters`) mean what their authors meant; everything this engine would compute wrongly is refused
here, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from paceline.checkpoints.families import context_lens, refusal
from paceline.checkpoints.identity import eos_token_ids
from paceline.checkpoints.json_files import read_object
from paceline.core.errors import ConfigError
from paceline.engine.layers import RopeFrequencies, rope_frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What every decoder has.

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
        head_dim = getattr(config, "head_dim", None) or _size(config, "hidden_size") // num_heads
        return cls(
            model_type=config.model_type,
            architecture=next(iter(config.architectures or ()), "unknown"),
            vocab_size=vocab_size,
            context_len=context_len,
            longest_context_len=longest,
            eos_token_ids=eos_token_ids(folder, config.eos_token_id, vocab_size),
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
            head_dim=int(head_dim),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """What the lean decoder needs beyond `DecoderConfig`."""

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
        if config.num_attention_heads % config.num_key_value_heads:
            raise ConfigError(
                f"config.json: num_key_value_heads must divide the {config.num_attention_heads} heads, got "
                f"{config.num_key_value_heads}"
            )
        rope = rope_frequencies(config, head_dim)
        if 2 * len(rope.inverse) != head_dim:
            raise ConfigError(
                f"config.json: {config.model_type} is served with full rotary heads of an even size only (head_dim, "
                f"num_attention_heads, partial_rotary_factor), got {head_dim}, of which {2 * len(rope.inverse)} turn"
            )
        return cls(
            hidden_size=int(config.hidden_size),
            intermediate_size=int(config.intermediate_size),
            rms_norm_eps=float(config.rms_norm_eps),
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
    if refused := refusal(read_object(folder / "config.json")):
        raise ConfigError(f"{refused} ({folder})")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Each family has checks of its own, which raise what they like.
    except Exception as error:
        raise ConfigError(f"{folder / 'config.json'} cannot be read by transformers: {error}") from error
    return config


def _size(config: PretrainedConfig, name: str) -> int:
    size = getattr(config, name, None)
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{name}: config.json of a {config.model_type} must give it as a positive number, got {size}")
    return size


def _context_lens(config: PretrainedConfig) -> tuple[int, int]:
    """How far the model reads, and how far at most."""
    limit = _size(config, "max_position_embeddings")
    scaling = getattr(config, "rope_parameters", None) or {}
    lens = context_lens(limit, config.model_type, scaling)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window and (layer_types is None or "sliding_attention" in layer_types):
        return min(lens[0], int(window)), min(lens[1], int(window))
    return lens

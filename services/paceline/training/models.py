"""The few calls into transformers, whose own annotations strict checking does not accept."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def load_model(folder: Path) -> PreTrainedModel:
    """A checkpoint folder as a float32 model in evaluation mode.

    Raises:
        FileNotFoundError: the folder holds no config.json.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    return cast(PreTrainedModel, cast(Any, model).eval())


def new_model(config: PretrainedConfig) -> PreTrainedModel:
    """A float32 model with random weights."""
    build = cast(Any, AutoModelForCausalLM).from_config
    return cast(PreTrainedModel, build(config, dtype=torch.float32))


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head; gives the normed final hidden states."""
    return cast(nn.Module, cast(Any, model).get_decoder())


def head_weight(model: PreTrainedModel) -> nn.Parameter:
    """Weight `[vocab, hidden]` of the output head, which may be the embedding's."""
    return cast(nn.Parameter, cast(Any, model).get_output_embeddings().weight)


def embedding_weight(model: PreTrainedModel) -> nn.Parameter:
    """Weight `[vocab, hidden]` of the token embeddings."""
    return cast(nn.Parameter, cast(Any, model).get_input_embeddings().weight)


def rotations(config: PretrainedConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[positions, head_dim]` of a Llama config's rotary embedding."""
    rotary = cast(Any, LlamaRotaryEmbedding)(config)
    cosines, sines = rotary(torch.empty(0), torch.arange(num_positions).unsqueeze(0))
    return cosines[0], sines[0]


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits `[batch, sequence, vocab]` of ids `[batch, sequence]`."""
    return cast(torch.Tensor, model(input_ids=ids, use_cache=False).logits)


def moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The same model, on the device."""
    return nn.Module.to(model, device)

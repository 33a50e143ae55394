"""A new EAGLE-3 head: its shape, and the weights that it begins with."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from paceline.acceptance.eagle3 import ARCHITECTURE, Eagle3
from paceline.acceptance.models import head_weight

NEW_WEIGHT_STD = 0.02


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers of the target whose outputs are read: one early, one middle, one late.

    Raises:
        ValueError: the target is too shallow for three of them below its last layer.
    """
    if num_layers < 4:
        raise ValueError(f"the target has {num_layers} layers, needs at least 4")
    return (1, num_layers // 2 - 1, num_layers - 4)


def eagle3_config(target: PreTrainedModel, draft_vocab_size: int, aux_layers: Sequence[int]) -> PretrainedConfig:
    """The head's config: the target's Llama shape with one layer, and what EAGLE-3 adds.

    Raises:
        ValueError: a size or a layer the target does not have.
    """
    shape = target.config.to_dict()
    vocab, layers = int(shape["vocab_size"]), int(shape["num_hidden_layers"])
    if not 1 <= draft_vocab_size <= vocab:
        raise ValueError(f"draft_vocab_size is {draft_vocab_size}, but the target's vocabulary has {vocab} ids")
    if any(not 0 <= layer < layers - 1 for layer in aux_layers):
        # The output of the last layer is the final state, which the target shows normed only.
        raise ValueError(f"aux_layers are {tuple(aux_layers)}, must be in 0..{layers - 2}")
    shape.pop("layer_types", None)
    shape |= {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux_layers), "use_aux_hidden_state": True},
    }
    return LlamaConfig(**shape)


def begin_from(head: Eagle3, target: PreTrainedModel) -> None:
    """Start a head where the target is: its last layer and head, on the last of the fused features.

    What reads embeddings is new, so it begins small and random.
    """
    hidden, state = head.config.hidden_size, target.state_dict()
    last = f"model.layers.{target.config.num_hidden_layers - 1}."
    layer = {name.removeprefix(last): value for name, value in state.items() if name.startswith(last)}
    with torch.no_grad():
        head.fc.weight.zero_()[:, -hidden:] = torch.eye(hidden)
        head.norm.weight.copy_(state["model.norm.weight"])
        head.lm_head.weight.copy_(head_weight(target)[head.draft_ids])
        for name, parameter in head.midlayer.named_parameters():
            source = layer.get(name.replace("hidden_norm", "input_layernorm"))
            if name == "input_layernorm.weight" or source is None:
                continue
            if parameter.shape == source.shape:
                parameter.copy_(source)
            else:
                nn.init.normal_(parameter[:, :hidden], std=NEW_WEIGHT_STD)
                parameter[:, hidden:] = source

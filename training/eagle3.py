"""An EAGLE-3 head on a frozen target (Li et al. 2025, arXiv 2503.01840, section 3).

A single decoder layer reads, at row `i`, token `i + 1` and a feature: the fused outputs of three layers of
the target at `i` in the first step of a chain, its own output afterwards. It is trained as it drafts
("training-time test"): step `s` reads the features of step `s - 1`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from training.models import Drafted, embedding_weight, head_weight, rotations

ARCHITECTURE = "LlamaForCausalLMEagle3"
NEW_WEIGHT_STD = 0.02

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one step, each `[batch, heads, rows, head_dim]`."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a step's positions, each `[rows, head_dim]`."""


class _Norm(nn.RMSNorm):
    """In float32 like its weight, whatever mixed precision made of its input."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.float())


class Attention(nn.Module):
    """Attention of a chain's step: over the first step's rows, and its own row in the steps since."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, self._head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._groups = heads // kv_heads
        self.q_proj = nn.Linear(2 * hidden, heads * self._head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * self._head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * self._head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self._head_dim, hidden, bias=False)

    def forward(self, inputs: torch.Tensor, rotation: Rotation, past: list[KeysAndValues]) -> torch.Tensor:
        """Attend, and append this step's keys and values to `past`.

        Args:
            inputs: `[batch, rows, 2 * hidden]`.
            rotation: of the rows' positions.
            past: the steps before, with at least as many rows.
        """
        rows = inputs.shape[1]
        query = _rotated(self._split(self.q_proj(inputs)), rotation)
        key = _rotated(self._split(self.k_proj(inputs)), rotation).repeat_interleave(self._groups, dim=1)
        past.append((key, self._split(self.v_proj(inputs)).repeat_interleave(self._groups, dim=1)))
        (first_keys, first_values), since = past[0], past[1:]
        ahead = torch.ones(rows, rows, dtype=torch.bool, device=inputs.device).triu(1)
        scores = (query @ first_keys[:, :, :rows].mT).masked_fill(ahead, -torch.inf)
        own = [(query * keys[:, :, :rows]).sum(dim=-1, keepdim=True) for keys, _ in since]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1) * self._head_dim**-0.5, dim=-1)
        mixed = weights[..., :rows] @ first_values[:, :, :rows]
        for step, (_, values) in enumerate(since):
            mixed = mixed + weights[..., rows + step, None] * values[:, :, :rows]
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, joined: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = joined.shape
        return joined.view(batch, rows, -1, self._head_dim).transpose(1, 2)


def _rotated(states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotary embedding of `[batch, heads, rows, head_dim]` (halves paired, as in Llama checkpoints)."""
    low, high = states.chunk(2, dim=-1)
    return states * rotation[0] + torch.cat([-high, low], dim=-1) * rotation[1]


class FeedForward(nn.Module):
    """The gated feed-forward of Llama."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """States of the same shape, `[..., hidden]`."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class MidLayer(nn.Module):
    """The decoder layer: attention over embedding and feature side by side, then feed-forward."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = _Norm(hidden, epsilon)
        self.hidden_norm = _Norm(hidden, epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = _Norm(hidden, epsilon)
        self.mlp = FeedForward(config)

    def forward(
        self, embedded: torch.Tensor, feature: torch.Tensor, rotation: Rotation, past: list[KeysAndValues]
    ) -> torch.Tensor:
        """The next feature `[batch, rows, hidden]`, from embeddings and features of that shape."""
        inputs = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)
        states = feature + self.self_attn(inputs, rotation, past)
        out: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class Eagle3(nn.Module):
    """The head; parameters are named as in the published layout.

    Args:
        config: the target's Llama shape with one layer, and what EAGLE-3 adds.
        target: its embeddings are used.
        draft_ids: token ids of the logits, ascending, `[draft_vocab_size]`.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    embeddings: torch.Tensor

    def __init__(self, config: PretrainedConfig, target: PreTrainedModel, draft_ids: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.taps: tuple[int, ...] = tuple(config.eagle_config["eagle_aux_hidden_state_layer_ids"])
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = _Norm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, draft_ids, True))
        self.register_buffer("embeddings", embedding_weight(target).detach(), persistent=False)

    @property
    def layout(self) -> dict[str, object]:
        """Content of config.json."""
        # Only what differs from transformers' general defaults, and no word of where the target lay.
        shape: dict[str, object] = self.config.to_diff_dict()
        shape.pop("_name_or_path", None)
        return shape | {"model_type": "llama", "tie_word_embeddings": False}

    @property
    def draft_ids(self) -> torch.Tensor:
        """Token ids of the logits, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def chain(self, ids: torch.Tensor, states: torch.Tensor, positions: int) -> list[Drafted]:
        """Guesses along a text by the unrolled head, each step on the features of the one before.

        Row `i` of step `s` reads token `i + 1 + s` and stands at position `i + s` (section 3.1, with
        the attention of figure 6: the first step's rows up to its own, and its own row since).
        """
        hidden, rows = self.config.hidden_size, ids.shape[1] - 1
        cosines, sines = (part.to(ids.device) for part in rotations(self.config, rows))
        embedded = functional.embedding(ids[:, 1:], self.embeddings)
        feature, past = self.fc(states[:, :rows, hidden:]), list[KeysAndValues]()
        drafted = []
        for step in range(min(positions, rows)):
            rotation = (cosines[step:], sines[step:])
            feature = self.midlayer(embedded[:, step:], feature[:, : rows - step], rotation, past)
            drafted.append(Drafted(states=self.norm(feature), head=self.lm_head.weight))
        return drafted


def load_eagle3(folder: Path, target: PreTrainedModel) -> Eagle3:
    """A head of a folder, float32, for this target.

    Raises:
        FileNotFoundError: the folder lacks config.json or weights.
        ValueError: it was made for a target of another shape, or its vocabulary maps disagree.
    """
    shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = LlamaConfig(**shape)
    for name in ("hidden_size", "vocab_size"):
        own, wanted = getattr(config, name), getattr(target.config, name)
        if own != wanted:
            raise ValueError(f"{name} of the head is {own}, of the target {wanted}")
    weights = load_file(folder / "model.safetensors")
    draft_ids = weights["t2d"].nonzero().squeeze(1)
    offsets = weights["d2t"]
    if len(draft_ids) != len(offsets) or not torch.equal(draft_ids, offsets + torch.arange(len(offsets))):
        raise ValueError("d2t and t2d of the head name different ids")
    head = Eagle3(config, target, draft_ids)
    head.load_state_dict(
        {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}
    )
    return head.eval()


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

    The embedding inputs are new, so they begin small and random.
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

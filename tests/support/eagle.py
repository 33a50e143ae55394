"""Random EAGLE-3 heads in the published layout, and their forward pass written down once more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

EPS = 1e-6


def save_eagle3(
    folder: Path,
    target: Path,
    *,
    draft_vocab: int | None = 61,
    layer_ids: tuple[int, int, int] | None = (0, 1, 1),
    seed: int = 0,
) -> Path:
    """Writes a random head for a target; `layer_ids` are outputs of layers, None leaves them out."""
    sizes = json.loads((target / "config.json").read_text())
    vocab, hidden, inner = sizes["vocab_size"], sizes["hidden_size"], sizes["intermediate_size"]
    heads = sizes["num_attention_heads"]
    head_dim = sizes.get("head_dim") or hidden // heads
    kv = sizes.get("num_key_value_heads", heads) * head_dim
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def norm() -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(hidden, generator=generator)

    layer = {
        "input_layernorm.weight": norm(),
        "hidden_norm.weight": norm(),
        "post_attention_layernorm.weight": norm(),
        "self_attn.q_proj.weight": matrix(heads * head_dim, 2 * hidden),
        "self_attn.k_proj.weight": matrix(kv, 2 * hidden),
        "self_attn.v_proj.weight": matrix(kv, 2 * hidden),
        "self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
        "mlp.gate_proj.weight": matrix(inner, hidden),
        "mlp.up_proj.weight": matrix(inner, hidden),
        "mlp.down_proj.weight": matrix(hidden, inner),
    }
    tensors = {f"midlayer.{name}": value for name, value in layer.items()}
    tensors |= {"fc.weight": matrix(hidden, 3 * hidden), "norm.weight": norm()}
    tensors["lm_head.weight"] = 3.0 * matrix(draft_vocab or vocab, hidden)
    if draft_vocab is not None:
        known = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = known - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": draft_vocab or vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv // head_dim,
        "head_dim": head_dim,
        "rms_norm_eps": EPS,
        "vocab_size": vocab,
        # Configs of heads carry wrong ones: it must not be read.
        "rope_theta": 123.0,
    }
    if layer_ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def eagle_forward(
    folder: Path,
    embedding: torch.Tensor,
    token_ids: list[int],
    features: torch.Tensor,
    *,
    rope_theta: float,
    num_own: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [rows, draft_vocab] and own features [rows, hidden] of one sequence, row by row.

    Args:
        folder: Of the head.
        embedding: [vocab, hidden], the target's.
        token_ids: One a row: the token after the feature's position.
        features: [rows - num_own, hidden], the target's fused ones.
        rope_theta: The target's.
        num_own: Last rows that take the head's own output for the row before.
    """
    sizes = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    weight = {name.removeprefix("midlayer.").removesuffix(".weight"): value for name, value in tensors.items()}
    head_dim, heads, groups = sizes["head_dim"], sizes["num_attention_heads"], sizes["num_key_value_heads"]
    hidden = sizes["hidden_size"]

    def norm(row: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(row, (hidden,), weight[name], sizes["rms_norm_eps"])

    def rotate(vectors: torch.Tensor, position: int) -> torch.Tensor:
        half = head_dim // 2
        angles = position / rope_theta ** (torch.arange(half) / half)
        first, second = vectors[:, :half], vectors[:, half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=1
        )

    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    for row, token_id in enumerate(token_ids):
        feature = features[row] if row < len(token_ids) - num_own else outputs[-1]
        normed = norm(feature, "hidden_norm")
        both = torch.cat([norm(embedding[token_id], "input_layernorm"), normed])
        query = rotate((weight["self_attn.q_proj"] @ both).view(heads, head_dim), row)
        keys.append(rotate((weight["self_attn.k_proj"] @ both).view(groups, head_dim), row))
        values.append((weight["self_attn.v_proj"] @ both).view(groups, head_dim))
        attended = []
        for head in range(heads):
            group = head * groups // heads
            scores = torch.stack([key[group] for key in keys]) @ query[head] / head_dim**0.5
            attended.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
        stream = feature + weight["self_attn.o_proj"] @ torch.cat(attended)
        inner = norm(stream, "post_attention_layernorm")
        gated = functional.silu(weight["mlp.gate_proj"] @ inner) * (weight["mlp.up_proj"] @ inner)
        stream = stream + weight["mlp.down_proj"] @ gated
        outputs.append(stream)
        logits.append(weight["lm_head"] @ norm(stream, "norm"))
    return torch.stack(logits), torch.stack(outputs)

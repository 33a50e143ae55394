"""A checkpoint whose next tokens are fixed: what follows a token is looked up, and its chat template says whence.

The template ends a prompt with one of a few tokens, by what the chat holds; each begins a text of its own. So real
engines and real clients can go through a conversation that no small model would find the words for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

NUM_HEADS, HEAD_DIM = 2, 64
# Far from what all other tokens get, at any temperature.
CERTAIN = 10.0
# Of the end, where a grammar forbids what the script has.
OTHERWISE = 0.01
LEAST_WIDTH = 5
# Characters of a piece at which a longer token might begin.
GUARDED = 24


def save_scripted(
    folder: Path,
    tokenizer_of: Path,
    template: str,
    said: Mapping[str, str | tuple[str, ...]],
    *,
    sampling: Mapping[str, Any] | None = None,
    context_len: int = 2048,
) -> None:
    """Writes the checkpoint.

    Args:
        folder: Where to.
        tokenizer_of: A checkpoint whose tokenizer it has, and some tokens more.
        template: Its chat template.
        said: What is said, by the token that ends a prompt: a text, which is cut up, or its tokens. Of a text that a
            grammar binds, what the grammar may force must lie within one token, or it would be cut in another way.
        sampling: The model's own, where a request is silent.
        context_len: Its longest text, in tokens.
    """
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_of / "tokenizer.json"))
    tokenizer.add_special_tokens(list(said))
    chains = _chains(said.values())
    pieces = dict.fromkeys(piece for chain in chains.values() for piece in chain)
    # What a grammar forces comes in the tokenizer's own tokens, less those at the end that might become longer ones.
    # Such longer ones stand beside each piece, so that the piece itself is never forced apart.
    guarded = [piece for text in said.values() if isinstance(text, tuple) for piece in text]
    guards = {piece[cut:] for piece in guarded for cut in range(1, min(GUARDED, len(piece)))}
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in dict.fromkeys([*pieces, *sorted(guards)])])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((tokenizer_of / "tokenizer_config.json").read_text())
    settings |= {"chat_template": template, "model_max_length": context_len}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    end = tokenizer.token_to_id(settings["eos_token"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, **(sampling or {})}))
    begun = {(begin, chains[text][0]) for begin, text in said.items()}
    joined = {pair for chain in chains.values() for pair in pairwise([*chain, settings["eos_token"]])}
    follows = {tokenizer.token_to_id(before): tokenizer.token_to_id(after) for before, after in begun | joined}
    assert len(follows) == len(begun | joined), "a token has two that follow it"
    _save_model(folder, tokenizer.get_vocab_size(), follows, end, context_len)


def _chains(texts: Iterable[str | tuple[str, ...]]) -> dict[str | tuple[str, ...], tuple[str, ...]]:
    """Cuts texts so that no two pieces are alike: a piece tells where in which text it stands."""
    chains: dict[str | tuple[str, ...], tuple[str, ...]] = {each: each for each in texts if isinstance(each, tuple)}
    seen = {piece for chain in chains.values() for piece in chain}
    for text in dict.fromkeys(each for each in texts if isinstance(each, str)):
        widths = range(LEAST_WIDTH, len(text) + 1)
        cuts = (tuple(text[at : at + width] for at in range(0, len(text), width)) for width in widths)
        chains[text] = next(cut for cut in cuts if len({*cut} - seen) == len(cut))
        seen |= {*chains[text]}
    return chains


def _save_model(folder: Path, vocab_size: int, follows: Mapping[int, int], end: int, context_len: int) -> None:
    """Writes a Llama whose only layer adds nothing: a token has a dimension of its own, and the head looks it up."""
    size = 64 * (len(follows) // 64 + 1)
    embedding = np.zeros((vocab_size, size), np.float32)
    head = np.zeros((vocab_size, size), np.float32)
    embedding[:, -1] = 1.0
    head[end] = OTHERWISE
    head[end, -1] = CERTAIN
    for at, (before, after) in enumerate(follows.items()):
        embedding[before, [at, -1]] = 1.0, 0.0
        head[after, at] = CERTAIN
    inner, ones = np.zeros((NUM_HEADS * HEAD_DIM, size), np.float32), np.ones(size, np.float32)
    layer = {f"self_attn.{name}_proj.weight": inner for name in "qkv"}
    layer |= {"self_attn.o_proj.weight": inner.T.copy()}
    layer |= {f"mlp.{name}_proj.weight": np.zeros((size, size), np.float32) for name in ("gate", "up", "down")}
    layer |= {f"{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    weights = {f"model.layers.0.{name}": value for name, value in layer.items()}
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": ones}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context_len,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "bos_token_id": 0,
        "eos_token_id": end,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))

"""A checkpoint that says given texts: its chat template ends a prompt with one of a few tokens, and each begins a text.

So real engines and real clients can go through a conversation that no small model would find the words for. The model
knows its place by the number of bytes since that token. Whatever tokens a text is cut into, by a grammar or by a
drafter, it goes on where the text stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer

Floats = npt.NDArray[np.float32]
NUM_HEADS, HEAD_DIM = 2, 64
# The pair of dimensions that turns least with the position, and so slowly that it does not matter.
STEADY, ROPE_THETA = HEAD_DIM // 2 - 1, 1e12
# What a key adds to the score of a token that is looked for; the others' scores are 0.
FOUND = 60.0
# Logits of the text's next token, and of the end where a grammar forbids that token; all others' are near 0.
CERTAIN, OTHERWISE = 100.0, 10.0
# The lengths of tokens are scaled by it, so that none is longer than 1.
BYTE = 1 / 64
# Steepness of the steps between places, and weight of what they add up to: a step is far above 1 up to MOST_TOKENS.
STEEP, WEIGHT = 1e6, 100.0
MOST_TOKENS = 400
# Dimensions of the residual stream: a constant; the bytes of a token; what fills its norm up; behind the second
# attention, the mean length of the tokens since the text began, and one over their number. Then come the tokens that
# begin texts, those found by the first attention, and what the head looks up.
ONE, LENGTH, FILL, MEAN, SHARE, FIXED = range(6)


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a text.

    Attributes:
        text: Number of the text.
        at: Bytes before it.
        token_id: What is said next.
    """

    text: int
    at: int
    token_id: int


def save_scripted(
    folder: Path,
    tokenizer_of: Path,
    template: str,
    said: Mapping[str, str],
    *,
    sampling: Mapping[str, Any] | None = None,
    context_len: int = 2048,
) -> None:
    """Writes the checkpoint.

    Args:
        folder: Where to.
        tokenizer_of: A checkpoint whose tokenizer it has, with the tokens that begin texts added.
        template: Its chat template.
        said: What is said, in ASCII, by the token that ends a prompt.
        sampling: The model's own, where a request is silent.
        context_len: Its longest text, in tokens.
    """
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_of / "tokenizer.json"))
    tokenizer.add_special_tokens(list(said))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((tokenizer_of / "tokenizer_config.json").read_text())
    settings |= {"chat_template": template, "model_max_length": context_len}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    end = tokenizer.token_to_id(settings["eos_token"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, **(sampling or {})}))
    places = [place for number, text in enumerate(said.values()) for place in _places(tokenizer, number, text, end)]
    lengths = [len(tokenizer.id_to_token(each)) for each in range(tokenizer.get_vocab_size())]
    weights = _weights(lengths, [*map(tokenizer.token_to_id, said)], places, end)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(weights, end, context_len)))


def _places(tokenizer: Tokenizer, number: int, text: str, end: int) -> Iterator[Place]:
    """Yields what follows each byte of a text: the tokenizer's own cut of the rest, whatever came before."""
    assert text.isascii(), "a character must be a byte"
    for at in range(len(text)):
        yield Place(number, at, tokenizer.encode(text[at:], add_special_tokens=False).ids[0])
    yield Place(number, len(text), end)


def _weights(lengths: Sequence[int], begins: Sequence[int], places: Sequence[Place], end: int) -> dict[str, Floats]:
    """Returns a Llama of two layers.

    The first attention tells every token which text has begun before it. The second one, over the tokens of that text,
    finds their mean length and one over their number. Times a place, the latter is the mean length that belongs there,
    and a hat over each place is linear between its neighbours. So the second MLP finds the place, and what follows it.
    """
    texts = slice(FIXED, FIXED + len(begins))
    found = slice(texts.stop, texts.stop + len(begins))
    outs = {each: found.stop + at for at, each in enumerate(dict.fromkeys(place.token_id for place in places))}
    size = 64 * ((found.stop + len(outs)) // 64 + 1)
    embedding, head = np.zeros((2, len(lengths), size), np.float32)
    embedding[:, ONE] = 1.0
    embedding[:, LENGTH] = np.minimum(1.0, BYTE * np.array(lengths))
    embedding[begins, LENGTH] = 0.0
    embedding[begins, texts] = np.eye(len(begins))
    # All norms are alike, so that normalizing changes nothing.
    embedding[:, FILL] = np.sqrt(size - np.square(embedding).sum(axis=1))
    for token_id, out in outs.items():
        head[token_id, out] = CERTAIN / np.sqrt(size)
    head[end, ONE] = CERTAIN
    # The share is as small as the steps, and the norm is theirs.
    head[end, SHARE] = OTHERWISE / np.sqrt(size) * WEIGHT * STEEP * BYTE
    first = _attention(size, texts, [*range(texts.start, texts.stop)], [*range(found.start, found.stop)])
    second = _attention(size, found, [LENGTH, texts], [MEAN, SHARE])
    mlp = _mlp(size, places, found, outs)
    nothing = {name: np.zeros_like(each) for name, each in mlp.items()}
    layers = [first | nothing, second | mlp]
    weights = {f"model.layers.{at}.{name}": each for at, layer in enumerate(layers) for name, each in layer.items()}
    return weights | {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": _ones(size)}


def _attention(size: int, keys: slice, values: Sequence[int | slice], into: Sequence[int]) -> dict[str, Floats]:
    """Returns an attention to the tokens that have one of the keys; their mean values are added to dimensions."""
    query, key, value = np.zeros((3, NUM_HEADS * HEAD_DIM, size), np.float32)
    out = np.zeros((size, NUM_HEADS * HEAD_DIM), np.float32)
    query[STEADY, ONE] = FOUND
    key[STEADY, keys] = np.sqrt(HEAD_DIM)
    for at, (source, target) in enumerate(zip(values, into, strict=True)):
        value[at, source] = 1.0
        out[target, at] = 1.0
    weights = {"q": query, "k": key, "v": value, "o": out}
    return {f"self_attn.{name}_proj.weight": each for name, each in weights.items()} | {
        f"{name}_layernorm.weight": _ones(size) for name in ("input", "post_attention")
    }


def _mlp(size: int, places: Sequence[Place], found: slice, outs: Mapping[int, int]) -> dict[str, Floats]:
    """Returns an MLP with a bend at each place and at its neighbours; three bends make a hat over the place."""
    bends = dict.fromkeys((place.text, place.at + step) for place in places for step in (-1, 0, 1))
    numbers = {bend: at for at, bend in enumerate(bends)}
    gate, up = np.zeros((2, len(bends), size), np.float32)
    down = np.zeros((size, len(bends)), np.float32)
    up[:, ONE] = 1.0
    for (text, at), number in numbers.items():
        gate[number, [MEAN, SHARE]] = STEEP, -STEEP * BYTE * at
        # No bend of another text.
        gate[number, ONE] = -2 * STEEP
        gate[number, found.start + text] = 2 * STEEP
    for place in places:
        for step, slope in ((-1, 1.0), (0, -2.0), (1, 1.0)):
            down[outs[place.token_id], numbers[place.text, place.at + step]] += WEIGHT * slope
    return {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": down}


def _ones(size: int) -> Floats:
    return np.ones(size, np.float32)


def _config(weights: Mapping[str, Floats], end: int, context_len: int) -> dict[str, Any]:
    vocab_size, size = weights["model.embed_tokens.weight"].shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": weights["model.layers.0.mlp.up_proj.weight"].shape[0],
        "num_hidden_layers": 2,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context_len,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": ROPE_THETA,
        "bos_token_id": 0,
        "eos_token_id": end,
        "dtype": "float32",
    }

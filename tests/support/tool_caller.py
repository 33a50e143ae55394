"""A checkpoint that calls tools when it is asked to: what follows a token is fixed, and its chat template says whence.

The template ends a prompt with one of a few tokens, by what the chat holds; each begins a text of its own. So real
engines and real clients can go through a conversation with tools that no small model would find the words for.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

HIDDEN_SIZE = 128
# Far from what all other tokens get, at any temperature.
CERTAIN = 10.0
CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
WEATHER = CALL.format(name="get_weather", arguments='{"city": "Paris"}')
ADD = CALL.format(name="add", arguments='{"a": 20, "b": 1}')
# The model's own, where a request is silent.
SAMPLING = {"do_sample": True, "temperature": 0.625, "top_p": 0.75, "top_k": 20}
# By the token that ends a prompt.
SAID = {
    "<|first|>": f"<think>\nWhat is the weather?\n</think>\n\n{WEATHER}",
    "<|second|>": f"<think>\nOne degree warmer.\n</think>\n\n{ADD}",
    "<|both|>": f"<think>\nBoth at once.\n</think>\n\nLet me see.\n{WEATHER}\n{ADD}",
    "<|last|>": "<think>\nI know it now.\n</think>\n\nTomorrow it will be 21 degrees in Paris.",
}
# A user who says "both" gets two calls in one turn, others one after another; after two results comes the answer.
TEMPLATE = """{{ bos_token }}
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- set seen = namespace(results=0, both=false) %}
{%- for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- if message.role == 'tool' %}{% set seen.results = seen.results + 1 %}{% endif %}
{%- if message.role == 'user' and 'both' in message.content %}{% set seen.both = true %}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if not tools or seen.results > 1 %}<|last|>
{%- elif seen.both %}<|both|>
{%- elif seen.results %}<|second|>
{%- else %}<|first|>{% endif %}{% endif %}"""


def save_tool_caller(folder: Path, tokenizer_of: Path) -> None:
    """Writes the checkpoint.

    Args:
        folder: Where to.
        tokenizer_of: A checkpoint whose tokenizer it has, and some tokens more.
    """
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_of / "tokenizer.json"))
    tokenizer.add_special_tokens(list(SAID))
    chains = _chains()
    pieces = [piece for chain in chains.values() for piece in chain]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((tokenizer_of / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    end = settings["eos_token"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(end), **SAMPLING}))
    follows = [pair for begin, chain in chains.items() for pair in zip([begin, *chain], [*chain, end], strict=True)]
    ids = [(tokenizer.token_to_id(before), tokenizer.token_to_id(after)) for before, after in follows]
    _save_model(folder, tokenizer.get_vocab_size(), ids, tokenizer.token_to_id(end))


def _chains() -> dict[str, list[str]]:
    """Cuts the texts so that no two pieces are alike: a piece tells where in which text it stands."""
    chains: dict[str, list[str]] = {}
    seen: set[str] = set()
    for begin, text in SAID.items():
        cuts = ([text[at : at + width] for at in range(0, len(text), width)] for width in range(5, len(text) + 1))
        chains[begin] = next(cut for cut in cuts if len({*cut} - seen) == len(cut))
        seen |= {*chains[begin]}
    return chains


def _save_model(folder: Path, vocab_size: int, follows: list[tuple[int, int]], end: int) -> None:
    """Writes a Llama whose only layer adds nothing: a token has a dimension of its own, and the head looks it up."""
    assert len(follows) < HIDDEN_SIZE
    embedding = np.zeros((vocab_size, HIDDEN_SIZE), np.float32)
    head = np.zeros((vocab_size, HIDDEN_SIZE), np.float32)
    embedding[:, -1] = 1.0
    head[end, -1] = CERTAIN
    for at, (before, after) in enumerate(follows):
        embedding[before, [at, -1]] = 1.0, 0.0
        head[after, at] = CERTAIN
    square, ones = np.zeros((HIDDEN_SIZE, HIDDEN_SIZE), np.float32), np.ones(HIDDEN_SIZE, np.float32)
    layer = {f"self_attn.{name}_proj.weight": square for name in "qkvo"}
    layer |= {f"mlp.{name}_proj.weight": square for name in ("gate", "up", "down")}
    layer |= {f"{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    weights = {f"model.layers.0.{name}": value for name, value in layer.items()}
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": ones}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": HIDDEN_SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HIDDEN_SIZE // 2,
        "max_position_embeddings": 2048,
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

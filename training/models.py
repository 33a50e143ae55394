"""Models of transformers as measuring and training use them, and the guesses that drafters make along a text.

transformers' own annotations do not pass strict checking, so its calls are made here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Chooser = Callable[[torch.Tensor], torch.Tensor]
"""Picks the next ids `[batch]` from float32 logits `[batch, vocab]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """The guesses of all chains along a text, at one position in their chain.

    A guess after a chain's first counts only if all before it were the target's tokens. So each chain may read the text
    itself, and a few passes give the chains of all places.

    At position `s` (0-based) of chains along a text of `n` tokens there are `n - 1 - s` places; place `i` guesses token
    `i + 2 + s` and knows the tokens up to `i + 1 + s` and the target's states up to `i`.

    Attributes:
        states: `[rows, places, draft hidden]`; times the head, logits.
        head: `[ids, draft hidden]`.
    """

    states: torch.Tensor
    head: torch.Tensor


def load_model(folder: Path) -> PreTrainedModel:
    """A checkpoint folder as a float32 model in evaluation mode.

    Raises:
        FileNotFoundError: The folder holds no config.json.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    return cast(PreTrainedModel, cast(Any, model).eval())


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder.

    Raises:
        FileNotFoundError: The folder holds no tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no tokenizer.json")
    return Tokenizer.from_file(str(path))


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head; gives the normed final hidden states."""
    return cast(nn.Module, cast(Any, model).get_decoder())


def head_weight(model: PreTrainedModel) -> nn.Parameter:
    """Weight `[vocab, hidden]` of the output head, which may be that of the embeddings."""
    return cast(nn.Parameter, cast(Any, model).get_output_embeddings().weight)


def embedding_weight(model: PreTrainedModel) -> nn.Parameter:
    """Weight `[vocab, hidden]` of the token embeddings."""
    return cast(nn.Parameter, cast(Any, model).get_input_embeddings().weight)


def rotations(config: PretrainedConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[positions, head_dim]` of a Llama config's rotary embedding."""
    rotary = cast(Any, LlamaRotaryEmbedding)(config)
    cosines, sines = rotary(torch.empty(0), torch.arange(num_positions).unsqueeze(0))
    return cosines[0], sines[0]


def hidden_states(model: PreTrainedModel, ids: torch.Tensor, taps: Sequence[int] = ()) -> torch.Tensor:
    """Normed final states `[batch, sequence, hidden]` of ids `[batch, sequence]`; gradients may flow.

    Args:
        model: Any causal model.
        ids: Token ids.
        taps: Layers whose outputs (0-based, before the final norm) follow on the last axis, which then has
            `(1 + taps) * hidden` numbers.
    """
    return _states_of(decoder_of(model)(input_ids=ids, use_cache=False, output_hidden_states=bool(taps)), taps)


def _states_of(output: Any, taps: Sequence[int]) -> torch.Tensor:
    # `hidden_states[0]` are the embeddings, and the last of them is already normed.
    outputs = [output.last_hidden_state, *(output.hidden_states[layer + 1] for layer in taps)]
    return torch.cat(outputs, dim=-1)


@torch.no_grad()
def continue_rows(
    model: PreTrainedModel,
    prefix: torch.Tensor,
    num_new: int,
    choose: Chooser,
    taps: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write rows onwards, under the autocast of the caller if any; an end token does not stop a row.

    Args:
        model: The target.
        prefix: Ids `[batch, prefix]`.
        num_new: Tokens to add to each row.
        choose: Picks each next id.
        taps: As in `hidden_states`.

    Returns:
        Ids `[batch, prefix + num_new]` and the states `[batch, prefix + num_new - 1, hidden]` that
        chose each next token, with those of the taps behind them.
    """
    decoder, cache = decoder_of(model), DynamicCache(config=model.config)
    weight = head_weight(model).float().T
    rows, states, inputs = [prefix], [], prefix
    for _ in range(num_new):
        output = decoder(input_ids=inputs, past_key_values=cache, use_cache=True, output_hidden_states=bool(taps))
        states.append(_states_of(output, taps))
        with torch.autocast(prefix.device.type, enabled=False):
            logits = output.last_hidden_state[:, -1].float() @ weight
        inputs = choose(logits).unsqueeze(1)
        rows.append(inputs)
    return torch.cat(rows, dim=1), torch.cat(states, dim=1)

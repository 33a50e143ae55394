"""Models of transformers as measuring and training use them, and the guesses that drafters make along a text.

transformers' own annotations do not pass strict checking, so its calls are made here.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRows:
    """Rows that a model wrote.

    Attributes:
        ids: `[rows, length + 1]`, prompts included.
        states: As `hidden_states` returns them for all ids but the last.
        best: The most likely next ids, `[rows, length]`; defined where `taught`.
        taught: Whether the next id is of the model's choice, not of a prompt, `[rows, length]`.
    """

    ids: torch.Tensor
    states: torch.Tensor
    best: torch.Tensor
    taught: torch.Tensor


@torch.no_grad()
def write_rows(
    model: PreTrainedModel,
    prompts: Iterator[Sequence[int]],
    num_rows: int,
    length: int,
    choose: Chooser,
    taps: Sequence[int] = (),
    end_ids: Collection[int] = (),
    advance: Callable[[int], object] = lambda _: None,
) -> WrittenRows:
    """Write rows, under the autocast of the caller if any.

    Each row begins with a prompt, and goes on with a further one behind an end token. So no row waits for others, and
    prompts of any length stand in the same batch. Where no prompt is left, a row writes on and is no longer taught;
    writing ends with the last row that is.

    Args:
        model: The target.
        prompts: Ids of each; the first `num_rows` must be there.
        num_rows: Rows at once.
        length: Ids that the model reads a row, at least the shortest first prompt.
        choose: Picks each next id.
        taps: As in `hidden_states`.
        end_ids: Ids behind which a text has ended.
        advance: Is told the number of ids that all rows have read since the last call.
    """
    decoder, cache = decoder_of(model), DynamicCache(config=model.config)
    weight = head_weight(model).float().T
    waiting = [list(next(prompts)) for _ in range(num_rows)]
    common = min(map(len, waiting))
    inputs = torch.tensor([ids[:common] for ids in waiting], device=model.device)
    waiting = [ids[common:] for ids in waiting]
    rows, states = [inputs], []
    best = torch.zeros(num_rows, length, dtype=torch.int64, device=model.device)
    taught = torch.zeros(num_rows, length, dtype=torch.bool)
    ended = [False] * num_rows
    for place in range(common - 1, length):
        output = decoder(input_ids=inputs, past_key_values=cache, use_cache=True, output_hidden_states=bool(taps))
        states.append(_states_of(output, taps))
        with torch.autocast(inputs.device.type, enabled=False):
            logits = output.last_hidden_state[:, -1].float() @ weight
        best[:, place] = logits.argmax(dim=-1)
        chosen = choose(logits).tolist()
        for row, ids in enumerate(waiting):
            if ids:
                chosen[row] = ids.pop(0)
                continue
            taught[row, place] = not ended[row]
            if chosen[row] in end_ids and not ended[row]:
                ids.extend(next(prompts, ()))
                ended[row] = not ids
        advance(inputs.shape[1])
        inputs = torch.tensor(chosen, device=model.device).unsqueeze(1)
        rows.append(inputs)
        if all(ended):
            break
    read, num_read = torch.cat(states, dim=1), place + 1
    taught = taught[:, :num_read].to(model.device)
    return WrittenRows(ids=torch.cat(rows, dim=1), states=read, best=best[:, :num_read], taught=taught)

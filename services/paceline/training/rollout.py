"""Text by the target itself, in one batch of equal rows with a KV cache."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from paceline.training.loop import precision
from paceline.training.models import decoder_of, head_weight

MIN_TEMPERATURE = 1e-6


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Standard Gumbel noise, float32, drawn on the generator's device."""
    uniform = torch.rand(shape, generator=generator, device=generator.device)
    return -torch.log(-torch.log(uniform.clamp(1e-10, 1 - 1e-7)))


def hidden_states(model: PreTrainedModel, ids: torch.Tensor, taps: Sequence[int] = ()) -> torch.Tensor:
    """Normed final states `[batch, sequence, hidden]` of ids `[batch, sequence]`; gradients may flow.

    Args:
        model: any causal model.
        ids: token ids.
        taps: layers whose outputs (0-based, before the final norm) follow on the last axis, which
            then has `(1 + taps) * hidden` numbers.
    """
    return _states_of(decoder_of(model)(input_ids=ids, use_cache=False, output_hidden_states=bool(taps)), taps)


def _states_of(output: Any, taps: Sequence[int]) -> torch.Tensor:
    # `hidden_states[0]` are the embeddings, and the last of them is already normed.
    outputs = [output.last_hidden_state, *(output.hidden_states[layer + 1] for layer in taps)]
    return torch.cat(outputs, dim=-1)


Chooser = Callable[[torch.Tensor], torch.Tensor]
"""Next ids `[batch]` from float32 logits `[batch, vocab]`."""


def gumbel_chooser(temperature: float, generator: torch.Generator) -> Chooser:
    """Argmax of logits over temperature plus Gumbel noise; noise is drawn for greedy rows too."""

    def choose(logits: torch.Tensor) -> torch.Tensor:
        noise = gumbel((logits.shape[0], logits.shape[1]), generator).to(logits.device)
        if temperature == 0:
            return logits.argmax(dim=-1)
        return (logits / temperature + noise).argmax(dim=-1)

    return choose


def sampling_chooser(temperatures: torch.Tensor, generator: torch.Generator) -> Chooser:
    """Plain sampling at a temperature per row `[batch]`; one random number a row, so it is cheap."""
    scale = temperatures.unsqueeze(1).clamp_min(MIN_TEMPERATURE)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        mass = torch.softmax(logits / scale, dim=-1).cumsum(dim=-1)
        uniform = torch.rand(len(logits), 1, generator=generator, device=generator.device)
        # The sum may end a little below 1; scaling by it keeps the last id reachable and no other.
        place = torch.searchsorted(mass, uniform.to(mass.device) * mass[:, -1:])
        return place.squeeze(1).clamp_max(mass.shape[1] - 1)

    return choose


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """KV of one layer in memory that is there from the start: growing it costs no copy of the rest.

    Args:
        max_tokens: the longest row.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._max_tokens = max_tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, heads, new, head_dim]`; returns all there is."""
        first = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            batch, heads = key_states.shape[:2]
            self._all_keys = key_states.new_empty(batch, heads, self._max_tokens, key_states.shape[3])
            self._all_values = value_states.new_empty(batch, heads, self._max_tokens, value_states.shape[3])
        length = first + key_states.shape[2]
        self._all_keys[:, :, first:length] = key_states
        self._all_values[:, :, first:length] = value_states
        self.keys, self.values = self._all_keys[:, :, :length], self._all_values[:, :, :length]
        return self.keys, self.values


def _roomy_cache(model: PreTrainedModel, max_tokens: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = [RoomyLayer(max_tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@torch.no_grad()
def continue_rows(
    model: PreTrainedModel,
    prefix: torch.Tensor,
    num_new: int,
    choose: Chooser,
    taps: Sequence[int] = (),
    use_bfloat16: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write rows onwards; an end token does not stop a row.

    Args:
        model: the target.
        prefix: ids `[batch, prefix]`.
        num_new: tokens to add to each row.
        choose: picks each next id.
        taps: as in `hidden_states`.
        use_bfloat16: run the decoder under autocast.

    Returns:
        Ids `[batch, prefix + num_new]` and the states `[batch, prefix + num_new - 1, hidden]` that
        chose each next token, with those of the taps behind them.
    """
    decoder, cache = decoder_of(model), _roomy_cache(model, prefix.shape[1] + num_new)
    weight = head_weight(model).float().T
    rows, states, inputs = [prefix], [], prefix
    # One autocast context around all steps, so that weights are converted once.
    with precision(prefix.device, use_bfloat16):
        for _ in range(num_new):
            output = decoder(input_ids=inputs, past_key_values=cache, use_cache=True, output_hidden_states=bool(taps))
            states.append(_states_of(output, taps))
            with torch.autocast(prefix.device.type, enabled=False):
                logits = output.last_hidden_state[:, -1].float() @ weight
            inputs = choose(logits).unsqueeze(1)
            rows.append(inputs)
    return torch.cat(rows, dim=1), torch.cat(states, dim=1)

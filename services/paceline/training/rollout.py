"""Text by the target itself, in one batch of equal rows with a KV cache."""

from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel

from paceline.training.loop import precision
from paceline.training.models import decoder_of, head_weight

MIN_TEMPERATURE = 1e-6


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Standard Gumbel noise, float32, drawn on the generator's device."""
    uniform = torch.rand(shape, generator=generator, device=generator.device)
    return -torch.log(-torch.log(uniform.clamp(1e-10, 1 - 1e-7)))


@torch.no_grad()
def hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Normed final hidden states `[batch, sequence, hidden]` of ids `[batch, sequence]`."""
    hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    assert isinstance(hidden, torch.Tensor)
    return hidden


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


@torch.no_grad()
def continue_rows(
    model: PreTrainedModel,
    prefix: torch.Tensor,
    num_new: int,
    choose: Chooser,
    use_bfloat16: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write rows onwards; an end token does not stop a row.

    Args:
        model: the target.
        prefix: ids `[batch, prefix]`.
        num_new: tokens to add to each row.
        choose: picks each next id.
        use_bfloat16: run the decoder under autocast.

    Returns:
        Ids `[batch, prefix + num_new]` and the hidden states `[batch, prefix + num_new - 1,
        hidden]` that chose each next token.
    """
    decoder, cache = decoder_of(model), DynamicCache(config=model.config)
    weight = head_weight(model).float().T
    rows, states, inputs = [prefix], [], prefix
    # One autocast context around all steps, so that weights are converted once.
    with precision(prefix.device, use_bfloat16):
        for _ in range(num_new):
            output = decoder(input_ids=inputs, past_key_values=cache, use_cache=True)
            states.append(output.last_hidden_state)
            with torch.autocast(prefix.device.type, enabled=False):
                logits = output.last_hidden_state[:, -1].float() @ weight
            inputs = choose(logits).unsqueeze(1)
            rows.append(inputs)
    return torch.cat(rows, dim=1), torch.cat(states, dim=1)

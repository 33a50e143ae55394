"""Makes a drafter for any Llama-family target: its first layers, distilled on its probabilities."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from paceline.service.config import setting
from training.export import export_model, publish
from training.loop import moved, new_model
from training.models import head_weight, hidden_states, load_model
from training.runs import Lesson, RunConfig, frozen_target, train_drafter
from training.text import Batch, TextSource

# The matrices whose outputs a layer adds to the residual stream.
_CLOSING = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig(RunConfig):
    """A distillation."""

    layers: int = setting(2, help="Layers that the drafter has, the first ones of the target.", low=1)
    start: Path | None = setting(
        None,
        help="Folder of a drafter to go on from: it keeps what it has learnt and all its layers; layers that it lacks "
        "are added such that they change nothing at first.",
    )


def first_layers(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A float32 drafter: the target's first layers with its embeddings, final norm and head.

    Raises:
        ValueError: the target has fewer layers.
    """
    total = int(target.config.num_hidden_layers)
    if not 1 <= layers <= total:
        raise ValueError(f"layers is {layers}, but the target has {total}")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    drafter = new_model(config)
    wanted = drafter.state_dict().keys()
    state = {name: value.float() for name, value in target.state_dict().items() if name in wanted}
    drafter.load_state_dict(state)
    return moved(drafter, target.device)


def grown(start: PreTrainedModel, layers: int, target: PreTrainedModel) -> PreTrainedModel:
    """A float32 drafter that computes what `start` does, with `layers` layers of the target's shape.

    The layers that `start` lacks are the target's, but what they add to the residual stream is zero, so that training
    goes on from what has been learnt (Chen et al. 2016, Net2Net).

    Raises:
        ValueError: `start` has matrices of another shape than the target's, or the target has fewer layers.
    """
    drafter = first_layers(target, layers)
    wanted, learnt = drafter.state_dict(), start.state_dict()
    for name, weight in learnt.items():
        if wanted[name].shape != weight.shape:
            raise ValueError(
                f"only a drafter of the target's shape can grow: its {name} is {list(weight.shape)}, "
                f"the target's {list(wanted[name].shape)}"
            )
    closing = [name for name in wanted.keys() - learnt.keys() if name.endswith(_CLOSING)]
    drafter.load_state_dict(learnt | {name: torch.zeros_like(wanted[name]) for name in closing}, strict=False)
    return drafter


def _drafter_of(config: DistillConfig, target: PreTrainedModel) -> PreTrainedModel:
    if config.start is None:
        return first_layers(target, config.layers)
    start = moved(load_model(config.start).requires_grad_(True), target.device)
    sizes = int(start.config.vocab_size), int(target.config.vocab_size)
    if sizes[0] != sizes[1]:
        raise ValueError(f"the drafter to start from has {sizes[0]} token ids, but the target {sizes[1]}")
    return start if config.layers <= start.config.num_hidden_layers else grown(start, config.layers, target)


def distill(config: DistillConfig) -> PreTrainedModel:
    """Run (or resume) the distillation; leaves a checkpoint in `config.run_folder`.

    Raises:
        FileNotFoundError: no target there, no drafter to start from, or no checkpoint to resume from.
        ValueError: the target has fewer layers than `config.layers`, or another vocabulary than the drafter.
    """
    target = frozen_target(config)
    drafter = _drafter_of(config, target)

    def lessons(batch: Batch) -> list[Lesson]:
        states = hidden_states(drafter, batch.ids)
        head, target_head = head_weight(drafter), head_weight(target)
        return [Lesson(draft=states, head=head, target=batch.states, target_head=target_head, kept=batch.taught)]

    train_drafter(config, TextSource(config, target), drafter, int(drafter.config.vocab_size), lessons)
    return drafter


def make_drafter(config: DistillConfig) -> None:
    """Distil a draft model, and export it with its acceptance in the card.

    Raises:
        FileNotFoundError: as `distill`.
        ValueError: as `distill`.
    """
    drafter = distill(config)
    origin = f"its first {config.layers} layers" if config.start is None else f"`{config.start.name}`, gone on from"
    summary = (
        f"Drafter for `{config.target.name}`: {origin}, distilled on its probabilities over the corpus and over text "
        "the target wrote, by `python -m training distill`."
    )
    publish(config, "Drafter", summary, lambda card: export_model(drafter, config.target, config.out, card))

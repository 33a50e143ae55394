"""Makes a drafter for any Llama-family target: its first layers, distilled on its probabilities."""

import copy
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from paceline.training.models import head_weight, load_model, moved, new_model
from paceline.training.rollout import hidden_states
from paceline.training.runs import Batch, Lesson, RunConfig, TextSource, frozen_target, train_drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig(RunConfig):
    """One distillation.

    Attributes:
        layers: What the drafter keeps of the target.
        start: Folder of a drafter to go on from instead, whatever its layers; all that it has learnt is kept.
    """

    layers: int = 2
    start: Path | None = None


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


def _drafter_of(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    drafter = moved(load_model(folder).requires_grad_(True), target.device)
    sizes = int(drafter.config.vocab_size), int(target.config.vocab_size)
    if sizes[0] != sizes[1]:
        raise ValueError(f"the drafter to start from has {sizes[0]} token ids, but the target {sizes[1]}")
    return drafter


def distill(config: DistillConfig) -> PreTrainedModel:
    """Run (or resume) the distillation; leaves a checkpoint under `config.out`.

    Raises:
        FileNotFoundError: no target there, no drafter to start from, or no checkpoint to resume from.
        ValueError: the target has fewer layers than `config.layers`, or another vocabulary than the drafter.
    """
    target = frozen_target(config)
    drafter = first_layers(target, config.layers) if config.start is None else _drafter_of(config.start, target)

    def lessons(batch: Batch) -> list[Lesson]:
        states = hidden_states(drafter, batch.ids)
        head, target_head = head_weight(drafter), head_weight(target)
        return [Lesson(draft=states, head=head, target=batch.states, target_head=target_head)]

    train_drafter(config, TextSource(config, target), drafter, int(drafter.config.vocab_size), lessons)
    return drafter

"""Shared parts of all training runs: optimizers, learning-rate schedule, checkpoints, precision."""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

CHECKPOINT_NAME = "checkpoint.pt"
MOMENTUM, WEIGHT_DECAY = 0.95, 0.02
# Coefficients and steps as published: they grow small singular values fast, and end between 0.7 and 1.2.
NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, LEAST_NORM = (3.4445, -4.775, 2.0315), 5, 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning-rate factor over a run: linear warm-up, flat, then linear decay to `floor`."""

    steps: int
    warmup_steps: int
    decay_from: int
    floor: float = 0.02

    def factor(self, step: int) -> float:
        """Multiplier of the base rate at this step, in (0, 1]."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if step < self.decay_from:
            return 1.0
        share = (step - self.decay_from) / max(1, self.steps - self.decay_from)
        return 1.0 - (1.0 - self.floor) * min(1.0, share)


def walk(first: int, steps: int) -> Iterator[tuple[int, tqdm]]:
    """The steps still to do, each with the bar that shows them."""
    with tqdm(initial=first, total=steps, unit="step", mininterval=10) as bar:
        for step in range(first, steps):
            yield step, bar
            bar.update()


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal for each matrix (Jordan et al. 2024, "Muon").

    torch's own class computes in bfloat16 everywhere. On a CPU without such products a step of it took four times as
    long as the rest of a training step.

    Args:
        parameters: Matrices.
        lr: Base rate, times the root of rows over columns where there are more rows.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1.0 - MOMENTUM)
                    update = orthogonal(parameter.grad.lerp(momentum, MOMENTUM))
                    rows, columns = parameter.shape
                    parameter.mul_(1.0 - group["lr"] * WEIGHT_DECAY)
                    parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix with the same singular vectors whose singular values are near 1, by Newton and Schulz."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    found = wide.to(torch.bfloat16 if has_fast_bfloat16(matrix.device) else torch.float32)
    found = found / found.norm().clamp_min(LEAST_NORM)
    first, second, third = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = found @ found.T
        found = first * found + (second * gram + third * gram @ gram) @ found
    result: torch.Tensor = (found if wide is matrix else found.T).to(matrix.dtype)
    return result


class MixedOptimizer:
    """Muon for the hidden matrices, AdamW for embeddings, heads and norms.

    Args:
        model: its matrices go to Muon, apart from those with a row for each token id.
        num_ids: rows of its embeddings and of its head.
        muon_lr: base rate of Muon (Keller's scaling).
        adamw_lr: base rate of AdamW.
    """

    def __init__(self, model: nn.Module, num_ids: int, muon_lr: float, adamw_lr: float) -> None:
        hidden: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for parameter in model.parameters():
            is_hidden = parameter.ndim == 2 and parameter.shape[0] != num_ids
            (hidden if is_hidden else rest).append(parameter)
        self.parameters = hidden + rest
        self._muon = Muon(hidden, muon_lr)
        self._adamw = torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._rates = (muon_lr, adamw_lr)

    def step(self, factor: float, max_grad_norm: float = 1.0) -> float:
        """Clip, update at `factor` times the base rates, clear; returns the norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self.parameters, max_grad_norm))
        for optimizer, rate in zip((self._muon, self._adamw), self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """State of both optimizers."""
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])


def new_model(config: PretrainedConfig) -> PreTrainedModel:
    """A float32 model with random weights."""
    build = cast(Any, AutoModelForCausalLM).from_config
    return cast(PreTrainedModel, build(config, dtype=torch.float32))


def moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The same model, on the device."""
    return nn.Module.to(model, device)


def pick_device() -> torch.device:
    """A CUDA GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def precision(device: torch.device, use_bfloat16: bool) -> AbstractContextManager[Any]:
    """Autocast to bfloat16, or nothing."""
    if not use_bfloat16:
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products are native here; emulated ones are slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported())  # noqa: SLF001 - no public query exists


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: MixedOptimizer) -> None:
    """Write model, optimizer, finished steps and random state; a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (CHECKPOINT_NAME + ".partial")
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "torch_rng": torch.get_rng_state(),
    }
    torch.save(state, partial)
    os.replace(partial, folder / CHECKPOINT_NAME)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: MixedOptimizer) -> int:
    """Restore a run; returns its number of finished steps.

    Raises:
        FileNotFoundError: The folder holds no checkpoint.
    """
    require_checkpoint(folder)
    state = torch.load(folder / CHECKPOINT_NAME, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"])
    return int(state["step"])


def has_checkpoint(folder: Path) -> bool:
    """Whether there is something to resume in this folder."""
    return (folder / CHECKPOINT_NAME).is_file()


def require_checkpoint(folder: Path) -> None:
    """Refuse to resume from nothing.

    Raises:
        FileNotFoundError: The folder holds no checkpoint.
    """
    if not has_checkpoint(folder):
        raise FileNotFoundError(f"{folder} holds no {CHECKPOINT_NAME} to resume from")

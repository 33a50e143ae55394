"""Which platform computes: the one place where CPU and CUDA part."""

from __future__ import annotations

import torch

from paceline.core.errors import ConfigError
from paceline.engine.backends.cpu.platform import CpuPlatform
from paceline.engine.backends.interface import Platform
from paceline.engine.backends.torch.platform import TorchPlatform


def choose_platform(device: str) -> Platform:
    """The platform of a setting: "cpu", "cuda" or "auto" (CUDA if there is one).

    Raises:
        ConfigError: The name is none of those known, or there is no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu, cuda or auto, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine has no usable GPU; use cpu or auto")
    return platform_of(torch.device(device))


def platform_of(device: torch.device) -> Platform:
    return CpuPlatform() if device.type == "cpu" else TorchPlatform(device)

"""Which platform computes: the one place where CPU and CUDA part."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from paceline.core.errors import ConfigError
from paceline.engine.backends.cpu.platform import CpuPlatform
from paceline.engine.backends.interface import Platform


def choose_platform(device: str) -> Platform:
    """The platform of a setting: "cpu", "cuda" or "auto" (CUDA if there is one).

    Raises:
        ConfigError: The name is none of those known, there is no such device, or what it needs is not installed.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu, cuda or auto, got {device!r}")
    if device == "cpu":
        return CpuPlatform()
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine has no usable GPU; use cpu or auto")
    if find_spec("triton") is None:
        raise ConfigError("--device cuda: needs Triton, which torch for CUDA brings along; use cpu, or install triton")
    # Kernels are compiled by Triton, which nobody needs who has no GPU.
    from paceline.engine.backends.cuda.platform import CudaPlatform

    return CudaPlatform(torch.device(device))

"""How Triton kernels are written and launched: what all that compute on CUDA have in common.

Kernels take tensors as addresses, are compiled for the kinds and the constants that they meet first, and look at no
shape on the host. Their functions carry no types, since the values in them are not Python's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import triton

# Programs that fill a Hopper chip: two for each of its 132 multiprocessors.
PROGRAMS: Final = 264


def kernel(function: Callable[..., Any], changing: tuple[str, ...] = ()) -> Any:
    """Compiles a function by Triton where it is launched, or called by another one that is.

    Args:
        changing: Names of whole numbers that differ from launch to launch. The compiler makes use of others that are 1
            or divisible by 16, and so compiles anew for the first that is not.
    """
    return triton.jit(function, do_not_specialize=changing)


def launch(compiled: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launches a program for each place of a grid.

    All launches go through here, and from here through `run`: they do not pass torch, so code that watches a step or
    keeps what it launches for later puts something else in place of `run`.
    """
    run(compiled, grid, arguments, constants)


def run(compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    compiled[grid](*arguments, **constants)


def require_contiguous(**tensors: torch.Tensor) -> None:
    """Refuses tensors whose memory is not in the order of their indices; kernels take that as given."""
    for name, tensor in tensors.items():
        assert tensor.is_contiguous(), f"{name} must be contiguous, its strides are {tensor.stride()}"


def power_of_two(count: int, least: int = 1) -> int:
    """The least power of two from `count` up, as sizes of tiles must be, and no less than `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())

"""How the forest's loops are compiled: on their first call, with bounds and types as they come, without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from paceline.kernel_cache import FOREST, kept_with, njit

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def kernel(function: FunctionT) -> FunctionT:
    """Compiles a loop on its first call; with NUMBA_DISABLE_JIT=1 it runs as Python."""
    with kept_with(FOREST):
        return cast(FunctionT, njit(cache=True, nogil=True)(function))

"""How the forest's loops are compiled."""

from __future__ import annotations

from paceline.kernel_cache import FOREST, FunctionT, compiled


def kernel(function: FunctionT) -> FunctionT:
    """Compiles a loop of the forest on its first call."""
    return compiled(function, FOREST)

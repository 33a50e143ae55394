"""Kernels without a GPU: Triton's interpreter, which runs a program after another in numpy, and what it needs for that.

Where there is a GPU the same tests run the compiled kernels on it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def mend() -> None:
    """Mends what the interpreter of Triton 3.6 gets wrong; what changes results has its case in `test_interpreted`."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    replace, replaced_for = interpreter._patch_lang, set[Any]()

    def patched(tensor: Any, scope: Any) -> None:
        """Loops run to a bound that is read from memory: numpy 2.4 makes no number of an array of one element."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        """Products are those of numbers: the interpreter holds bfloat16 as its bits, and multiplies these."""
        return dot(self, widened(a), widened(b), *others)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def call(self: Any, *arguments: Any, **constants: Any) -> Any:
        """Functions call one another: the interpreter replaces its language at each call, which takes half its time."""
        if self.fn not in replaced_for:
            replace(self.fn)
            replaced_for.add(self.fn)
        return self.rewrite()(*arguments, **constants)

    interpreter.InterpretedFunction.__call__ = call
    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot

"""A CUDA graph as far as a CPU can play one: operations are recorded once, then run again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What a graph cannot hold: a value read on the host, or a shape that depends on one.
FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "lift_fresh")


def tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Runs operations and remembers them with their very tensors; all of these must lie on `device`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func.overloadpacket.__name__ not in FORBIDDEN, f"{func} cannot be recorded"
        out = func(*args, **kwargs)
        assert all(each.device.type == self.device for each in tensors((args, kwargs, out))), func
        self.calls.append((func, args, kwargs, out))
        return out


class TapeCapture:
    """A `Capture` that replays what it recorded: values the host put in while recording never change again."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with Recorder("cpu") as recorder:
            work()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            for func, args, kwargs, out in recorder.calls:
                for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                    # Views and results in place are there already.
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay

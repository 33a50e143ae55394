"""CUDA calls of a step, in one place: memory, asynchronous copies, recorded work, and the wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Work = Callable[[], None]


class Mark:
    """A place in the order of a stream's work; `wait` returns once all before it is done.

    Args:
        event: A recorded `torch.cuda.Event`; None: work runs at once, as on a CPU.
    """

    def __init__(self, event: Any = None) -> None:
        self._event = event

    def wait(self) -> None:
        if self._event is not None and not self._event.query():
            self._event.synchronize()


class Stream:
    """Does in order what it is given, while the host goes on; on a CPU, at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cuda = device.type == "cuda"

    def host_buffer(self, *shape: int, kind: torch.dtype = torch.uint8) -> torch.Tensor:
        """Pinned memory of the host; torch gives it to the next who asks once copies from it, or to it, are done."""
        return torch.empty(shape, dtype=kind, pin_memory=self._on_cuda)

    def run(self, work: Work) -> None:
        """Has work done that launches kernels and looks at no value."""
        work()

    def copy(self, target: torch.Tensor, source: Callable[[], torch.Tensor]) -> None:
        """Copies between host and device what `source` returns when its turn comes."""
        target.copy_(source(), non_blocking=True)

    def mark(self) -> Mark:
        if not self._on_cuda:
            return Mark()
        event = torch.cuda.Event()
        event.record()
        return Mark(event)

    def record(self, works: Iterable[Work]) -> list[Work]:
        """Records work as CUDA graphs, and returns what runs each; other threads may go on using CUDA.

        Each runs once before: kernels are compiled and libraries choose their ways at the first time.

        Args:
            works: The largest first, so that the others fit the memory that it takes.
        """
        if not self._on_cuda:
            return list(works)
        # They share their memory: never two run at once, and none needs what another has left.
        pool, recording = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
        return [self._recorded(work, pool, recording) for work in works]

    def _recorded(self, work: Work, pool: Any, recording: torch.cuda.Stream) -> Work:
        """The default stream cannot be recorded."""
        current = torch.cuda.current_stream(self.device)
        recording.wait_stream(current)
        with torch.cuda.stream(recording):
            work()
        current.wait_stream(recording)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=recording, capture_error_mode="thread_local"):
            work()
        return graph.replay

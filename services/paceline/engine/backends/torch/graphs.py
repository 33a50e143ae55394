"""When a step is recorded and when it is replayed: one graph a bucket, the least recently used one goes.

The policy knows no CUDA; `CudaCapture` does the recording. A bucket's first step runs as it is, which warms up
libraries and allocator; its second is recorded. Where recording fails, steps run unrecorded for good.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from typing_extensions import override

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class Capture(Protocol):
    """Records work of which every run touches the same memory in the same way."""

    def warm_up(self, work: Work) -> None:
        """Runs the work once, as it will be recorded."""
        ...

    def record(self, work: Work) -> Work:
        """Records the work, which need not run, and returns what replays it."""
        ...


class Unrecorded(Capture):
    """Runs the work anew every time: what a CPU does."""

    @override
    def warm_up(self, work: Work) -> None:
        work()

    @override
    def record(self, work: Work) -> Work:
        return work


class CudaCapture(Capture):
    """CUDA graphs that share one memory pool: never two run at once, and none needs what another has left."""

    def __init__(self, device: torch.device) -> None:
        """Takes a stream of its own, since the default one cannot be recorded."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @override
    def warm_up(self, work: Work) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Work) -> Work:
        """Records the work; other threads may go on using CUDA."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


class GraphCache:
    """Recorded steps by bucket.

    Args:
        capture: How to record.
        limit: Most graphs that are kept.

    Attributes:
        failed: Recording failed; nothing is recorded any more.
    """

    def __init__(self, capture: Capture, limit: int) -> None:
        self.failed = False
        self._capture = capture
        self._limit = limit
        # None: ran once, is recorded when it comes again.
        self._replays: OrderedDict[Hashable, Work | None] = OrderedDict()

    @property
    def num_recorded(self) -> int:
        return sum(replay is not None for replay in self._replays.values())

    def run(self, bucket: Hashable, work: Work) -> None:
        """Runs the work of a bucket: as it is, or by its graph; the work of one bucket must always be the same."""
        if self.failed:
            work()
            return
        if bucket not in self._replays:
            self._make_room()
            self._capture.warm_up(work)
            self._replays[bucket] = None
            return
        replay = self._replays[bucket] or self._record(bucket, work)
        if not self.failed:
            self._replays.move_to_end(bucket)
        replay()

    def _make_room(self) -> None:
        while len(self._replays) >= self._limit:
            self._replays.popitem(last=False)

    def _record(self, bucket: Hashable, work: Work) -> Work:
        try:
            replay = self._replays[bucket] = self._capture.record(work)
        except RuntimeError:
            logger.exception("a step of %s cannot be recorded as a graph; steps run unrecorded from now on", bucket)
            self.failed = True
            self._replays.clear()
            return work
        return replay

"""A device that works when somebody waits for it, and not before: whoever reads too early, or writes, gets rubbish."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from paceline.engine.backends.cuda.stream import Mark, Stream, Work
from tests.unit.engine.cuda.interpreted import DEVICE

RUBBISH = 0xA5


class LazyMark(Mark):
    """A place in the work of a `LazyStream`."""

    def __init__(self, stream: LazyStream, place: int) -> None:
        super().__init__()
        self._stream, self._place = stream, place

    def wait(self) -> None:
        """Counts as a wait if there is anything to wait for."""
        if self._stream.num_done < self._place:
            self._stream.leads.append(self._stream.num_launched - self._place)
            self._stream.work_until(self._place)


class LazyStream(Stream):
    """Counts what a step costs, and answers as late as it may.

    Attributes:
        leads: For each time that the host waited, how much work was launched behind what it waited for.
        sent: Bytes of each copy to the device; and fetched, of those to the host.
        num_replayed: Recorded pieces of work that ran again.
    """

    def __init__(self) -> None:
        super().__init__(DEVICE)
        self.num_done = self.num_replayed = 0
        self.leads: list[int] = []
        self.sent: list[int] = []
        self.fetched: list[int] = []
        self._work: deque[Work] = deque()
        self._host: set[int] = set()

    def host_buffer(self, *shape: int, kind: torch.dtype = torch.uint8) -> torch.Tensor:
        buffer = super().host_buffer(*shape, kind=kind)
        buffer.view(torch.uint8).fill_(RUBBISH)
        self._host.add(buffer.untyped_storage().data_ptr())
        return buffer

    @property
    def num_waits(self) -> int:
        return len(self.leads)

    @property
    def num_launched(self) -> int:
        return self.num_done + len(self._work)

    def run(self, work: Work) -> None:
        self._work.append(work)

    def copy(self, target: torch.Tensor, source: Callable[[], torch.Tensor]) -> None:
        to_host = target.untyped_storage().data_ptr() in self._host
        (self.fetched if to_host else self.sent).append(target.nbytes)

        def copy() -> None:
            found = source()
            target.copy_(found)
            if not to_host:
                # Nobody may count on what the host once wrote there.
                found.view(torch.uint8).fill_(RUBBISH)

        self._work.append(copy)

    def mark(self) -> Mark:
        return LazyMark(self, self.num_launched)

    def work_until(self, place: int) -> None:
        with torch.inference_mode():
            while self.num_done < place:
                self._work.popleft()()
                self.num_done += 1

    def record(self, works: Iterable[Work]) -> list[Work]:
        return [self._recorded(work) for work in works]

    def _recorded(self, work: Work) -> Work:
        self.run(work)
        self.work_until(self.num_launched)

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay

    def forget(self) -> None:
        """Counts from here on."""
        self.num_replayed = 0
        for counts in (self.leads, self.sent, self.fetched):
            counts.clear()

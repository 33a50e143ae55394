"""The ranks of one tensor parallel model: what they compute together, and how the end of one is the end of all.

Sums are gathered and added in the order of the ranks, so that they have the same bits on every rank and a row's do not
depend on the other rows; a reduction of the library may take another order for another size. Knows no model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from paceline.core.errors import MAX_PROBLEM_CHARS, UnavailableError, shortened
from paceline.engine.rendezvous import Rendezvous, own_address

logger = logging.getLogger(__name__)

SILENCE_S: Final = 30.0
BEAT_S: Final = 0.5
# A rank that lives and beats, but has not come to a sum by then, hangs.
_STUCK = timedelta(minutes=10)
# Between calls there may be nothing to do for days; a rank that is gone or silent is found by the beats.
_IDLE = timedelta(days=365)
# A message of up to so many bytes is one broadcast, a longer one two.
_FIRST_BYTES: Final = 4096

Bytes = npt.NDArray[np.uint8]
# torch's stubs know neither the operations of these classes nor all that makes them.
Group = Any
_gloo: Any = distributed.ProcessGroupGloo
_prefix_store: Any = distributed.PrefixStore  # type: ignore[attr-defined]


class Ranks:
    """This process's place among the ranks; they have met.

    One thread at a time computes and talks; beats have a thread of their own.

    Args:
        rendezvous: Where they met.
        rank: This one, from 0.
        size: How many there are.
        device: Where this one computes.
        on_lost: Called once, in a thread of its own, when a rank is gone or silent.
        silence_s: How long a rank may be silent.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        rank: int,
        size: int,
        device: torch.device,
        on_lost: Callable[[UnavailableError], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._rendezvous = rendezvous
        self._on_lost = on_lost
        self._silence = timedelta(seconds=silence_s)
        self._stopping = threading.Event()
        with self._loud():
            beats = self._gloo_group("beats", _STUCK)
            self._beats = threading.Thread(target=self._beat, args=(beats,), name="ranks", daemon=True)
            self._beats.start()
            self._calls = self._gloo_group("calls", _IDLE)
            self._data = self._gloo_group("data", _STUCK) if device.type == "cpu" else self._nccl_group("data", _STUCK)

    def _gloo_group(self, name: str, timeout: timedelta) -> Group:
        options = _gloo._Options()  # noqa: SLF001 - the only way to say where it listens
        options._timeout = timeout  # noqa: SLF001 - and how long it waits
        host = own_address(self._rendezvous.host, self._rendezvous.port)
        options._devices = [_gloo.create_device(hostname=host)]  # noqa: SLF001
        store = _prefix_store(name, self._rendezvous.store)
        return _gloo(store, self.rank, self.size, options)

    def _nccl_group(self, name: str, timeout: timedelta) -> Group:
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 - the only way to say how long it waits
        store = _prefix_store(name, self._rendezvous.store)
        return distributed.ProcessGroupNCCL(store, self.rank, self.size, options)

    # Computing together

    def sum(self, summand: torch.Tensor) -> torch.Tensor:
        """The float32 sum of all ranks' tensors of one shape; the same bits on every rank."""
        parts = summand.new_empty((self.size, *summand.shape))
        with self._loud():
            self._data.allgather([list(parts.unbind())], [summand.contiguous()]).wait()
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors of one shape, [size, *shape], on rank 0; none, [0, *shape], elsewhere."""
        parts = part.new_empty((self.size if self.rank == 0 else 0, *part.shape))
        places = [list(parts.unbind())] if self.rank == 0 else []
        with self._loud():
            self._data.gather(places, [part.contiguous()], distributed.GatherOptions()).wait()
        return parts

    # Telling and hearing

    def tell(self, message: Bytes) -> None:
        """Rank 0 says something to all others."""
        first = np.zeros(_FIRST_BYTES, np.uint8)
        first[:8] = np.array([len(message)], np.int64).view(np.uint8)
        room = _FIRST_BYTES - 8
        first[8 : 8 + len(message)] = message[:room]
        self._broadcast(first)
        if len(message) > room:
            self._broadcast(np.ascontiguousarray(message[room:]))

    def hear(self) -> Bytes:
        """What rank 0 says next; waits as long as the other ranks are well."""
        first = np.empty(_FIRST_BYTES, np.uint8)
        self._broadcast(first)
        length, room = int(first[:8].view(np.int64)[0]), _FIRST_BYTES - 8
        message = np.empty(length, np.uint8)
        message[:room] = first[8 : 8 + length]
        if length > room:
            self._broadcast(message[room:])
        return message

    def _broadcast(self, content: Bytes) -> None:
        with self._loud():
            self._calls.broadcast([torch.from_numpy(content)], distributed.BroadcastOptions()).wait()

    # Living and ending together

    def stop(self) -> None:
        """Ends the beats on all ranks at once, so that none takes another's end for a death; all call it."""
        self._stopping.set()
        self._beats.join()

    def _beat(self, group: Group) -> None:
        """Rank 0 asks every other rank for a sign, in turn, until it stops; they give it."""
        stopping = torch.zeros(1, dtype=torch.int64)
        while not stopping:
            if self.rank == 0:
                self._stopping.wait(BEAT_S)
                stopping[0] = self._stopping.is_set()
            for peer in range(1, self.size) if self.rank == 0 else (0,):
                try:
                    self._give_sign(group, peer, stopping)
                except RuntimeError as error:
                    self._on_lost(lost(f"rank {peer}", error))
                    return

    def _give_sign(self, group: Group, peer: int, stopping: torch.Tensor) -> None:
        if self.rank == 0:
            group.send([stopping], peer, 0).wait(self._silence)
            group.recv([torch.zeros_like(stopping)], peer, 0).wait(self._silence)
        else:
            group.recv([stopping], peer, 0).wait(self._silence)
            group.send([stopping], peer, 0).wait(self._silence)

    @contextmanager
    def _loud(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise lost("another rank", error) from error


def lost(who: str, error: RuntimeError) -> UnavailableError:
    """The error that all ranks end with."""
    why = shortened(str(error), MAX_PROBLEM_CHARS)
    return UnavailableError(f"{who} of the tensor parallel model is gone or silent, so all of them end: {why}")

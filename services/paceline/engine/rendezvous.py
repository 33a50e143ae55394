"""How the ranks of one model find one another, and make sure that they are ranks of the same one.

Rank 0 keeps a small store at an address that the others know. Each lays down there what it is; nobody goes on before
all have come and agree.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Final

import torch
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

import paceline
from paceline.core.errors import ConfigError, UnavailableError

# Time for all ranks to come: those on other hosts may have a model's image to fetch first.
JOIN_S: Final = 300.0
_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What all ranks of a model must have in common.

    Attributes:
        size: How many ranks there are.
        model: Fingerprint of checkpoint, weight type and number of ranks.
        device: Kind of device.
        version: Of this package.
        torch: Version of torch.
    """

    size: int
    model: str
    device: str
    version: str = paceline.__version__
    torch: str = str(torch.__version__)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens for the other ranks; port 0 takes a free one.

    Raises:
        ConfigError: The address is not of this machine, or in use.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"the rendezvous of the ranks cannot listen on {host}:{port}: {error}") from error


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to the rendezvous, where it can be reached from there."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(address)
        return str(way.getsockname()[0])


class Rendezvous:
    """One rank's place at the store.

    Args:
        host: Of the store.
        port: Of the store.
        rank: Which one this is.
        listener: Rank 0's socket there; None elsewhere.

    Raises:
        UnavailableError: Nobody listens there, for `JOIN_S`.
    """

    def __init__(self, host: str, port: int, rank: int, listener: socket.socket | None = None) -> None:
        self.host, self.port = host, port
        self._rank = rank
        try:
            # The store listens where it is told to, not on all interfaces, as it would by itself.
            self.store = TCPStore(
                host_name=host,
                port=port,
                is_master=listener is not None,
                timeout=timedelta(seconds=JOIN_S),
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        except DistNetworkError as error:
            raise UnavailableError(f"rank 0 does not answer at {host}:{port} after {JOIN_S:g} s") from error

    def meet(self, facts: RankFacts, check: Callable[[], None] = lambda: None, join_s: float = JOIN_S) -> None:
        """Waits for all ranks and compares them.

        Args:
            facts: What this one is.
            check: Called now and then while others are awaited; may raise.
            join_s: How long to wait.

        Raises:
            ConfigError: Another rank is not of this model, or there twice; says which and why.
            UnavailableError: Some did not come, or rank 0 went; says which.
        """
        try:
            if self.store.add(f"came/{self._rank}", 1) > 1:
                raise ConfigError(f"--rank {self._rank}: another rank {self._rank} has come to {self.host}:{self.port}")
            self.store.set(f"facts/{self._rank}", json.dumps(asdict(facts)))
            until_s = time.monotonic() + join_s
            for rank in range(facts.size):
                self._await(rank, until_s, join_s, check)
                self._compare(rank, facts)
        except DistNetworkError as error:
            raise UnavailableError(f"rank 0 at {self.host}:{self.port} has gone: {error}") from error

    def _await(self, rank: int, until_s: float, join_s: float, check: Callable[[], None]) -> None:
        while not self.store.check([f"facts/{rank}"]):
            check()
            if time.monotonic() > until_s:
                raise UnavailableError(f"rank {rank} has not come to {self.host}:{self.port} within {join_s:g} s")
            time.sleep(_LOOK_S)

    def _compare(self, rank: int, own: RankFacts) -> None:
        found = json.loads(self.store.get(f"facts/{rank}"))
        for field in fields(own):
            theirs, ours = found.get(field.name), getattr(own, field.name)
            if theirs != ours:
                raise ConfigError(
                    f"rank {rank} has another {field.name} than rank {self._rank}: {theirs} and {ours}; "
                    "all ranks need the same checkpoint, --dtype, --tensor-parallel-size and versions"
                )

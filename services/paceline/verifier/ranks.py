"""The other ranks of a tensor parallel verifier: started here or awaited, and ended with this one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NoReturn

import torch

from paceline.core.errors import ConfigError, UnavailableError
from paceline.engine.backends.choice import choose_platform
from paceline.engine.config import DecoderConfig
from paceline.engine.process import parse_cpus
from paceline.engine.ranks import Ranks
from paceline.engine.rendezvous import RankFacts, Rendezvous, listen
from paceline.engine.sharded_backend import dismiss
from paceline.engine.shards import FLAG, check_shares
from paceline.verifier.config import VerifierConfig

logger = logging.getLogger(__name__)

# A rank that was told to end has nothing left to do.
LAST_S: Final = 10.0
Join = Callable[[], Ranks | None]


@contextmanager
def other_ranks(config: VerifierConfig, model: str) -> Iterator[tuple[VerifierConfig, Join]]:
    """Has the other ranks there for the time of the block; none, where the model is computed by this process alone.

    Yields:
        The settings of rank 0, and what waits for all ranks and returns them, to be called before the model is loaded.

    Raises:
        ConfigError: The model cannot be cut into so many parts, or there are too few devices.
    """
    if config.tensor_parallel_size == 1:
        yield config, lambda: None
        return
    others = OtherRanks(config, model)
    try:
        yield others.config, others.join
        others.stop()
    finally:
        others.end()


class OtherRanks:
    """The ranks from 1 on; started at once, unless somebody else does.

    To be made in the main thread: the kernel ends what is started here when the thread ends that started it.

    Args:
        config: Of the verifier, of at least two ranks.
        model: Weights hash of the model.

    Attributes:
        config: The same, with rank 0's part of threads and CPUs.

    Raises:
        ConfigError: The model cannot be cut into so many parts, or there are too few devices.
    """

    def __init__(self, config: VerifierConfig, model: str) -> None:
        size, given = config.tensor_parallel_size, config.tensor_parallel_rendezvous
        check_shares(DecoderConfig.from_folder(config.model), size)
        self._device = rank_device(config.device, 0)
        if not given and self._device.type == "cuda" and torch.cuda.device_count() < size:
            raise ConfigError(f"{FLAG} {size}: needs as many GPUs, this machine has {torch.cuda.device_count()}")
        self._host, port = split_address(given) if given else ("127.0.0.1", 0)
        self._listener = listen(self._host, port)
        self._port = int(self._listener.getsockname()[1])
        self._model = model
        self._ranks: Ranks | None = None
        self._dismissed = False
        self.config = config if given else share_cpus(config, 0)
        started = () if given else range(1, size)
        self._children = [subprocess.Popen(self._command(share_cpus(config, rank), rank)) for rank in started]

    def _command(self, config: VerifierConfig, rank: int) -> list[str]:
        flags = {
            "model": config.model,
            "dtype": config.dtype,
            "device": config.device,
            "threads": config.threads,
            "cpus": config.cpus,
            "rank": rank,
            "tensor-parallel-size": config.tensor_parallel_size,
            "tensor-parallel-rendezvous": f"{self._host}:{self._port}",
            "tensor-parallel-silence-s": config.tensor_parallel_silence_s,
        }
        # The first process becomes the second, and is ended by the kernel if this one is killed.
        python = (sys.executable, "-m")
        child = [*python, "paceline.cluster.child", str(os.getpid()), *python, "paceline.verifier.rank"]
        return [*child, *(f"--{name}={value}" for name, value in flags.items())]

    def join(self) -> Ranks:
        """Waits for all ranks.

        Raises:
            ConfigError: One of them is not of this model, or ended.
            UnavailableError: One did not come in time.
        """
        size = self.config.tensor_parallel_size
        logger.info("waiting for the other ranks", extra={"address": f"{self._host}:{self._port}", "size": size})
        rendezvous = Rendezvous(self._host, self._port, 0, self._listener)
        rendezvous.meet(RankFacts(size=size, model=self._model, device=self._device.type), self._check)
        self._ranks = Ranks(
            rendezvous,
            rank=0,
            size=size,
            device=self._device,
            on_lost=end_process,
            silence_s=self.config.tensor_parallel_silence_s,
        )
        return self._ranks

    def _check(self) -> None:
        for rank, child in enumerate(self._children, 1):
            if child.poll() is not None:
                raise ConfigError(f"rank {rank} ended with exit status {child.returncode}; it has said why")

    def stop(self) -> None:
        """Lets the other ranks go; the engine has ended."""
        if self._ranks is not None:
            dismiss(self._ranks)
            self._ranks.stop()
            self._dismissed = True

    def end(self) -> None:
        """Returns when the processes started here are gone; those that were not let go are killed."""
        for child in self._children:
            try:
                child.wait(LAST_S if self._dismissed else 0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def share_cpus(config: VerifierConfig, rank: int) -> VerifierConfig:
    """Settings with a rank's part of threads and CPUs; CPUs too few to be shared out are everybody's."""
    size = config.tensor_parallel_size
    threads = max(1, config.threads // size)
    cpus = sorted(parse_cpus(config.cpus)) if config.cpus else []
    own = cpus[rank * len(cpus) // size : (rank + 1) * len(cpus) // size] if len(cpus) >= size else cpus
    # Lent CPUs would speed up one rank, and the others would let it wait.
    return replace(config, threads=threads, cpus=",".join(map(str, own)), spare_cpus="")


def rank_device(device: str, rank: int) -> torch.device:
    """Where a rank computes: one GPU each, of those that it sees; ranks of several hosts count on from host to host.

    Raises:
        ConfigError: There is no such device.
    """
    place = choose_platform(device).device
    return torch.device(place.type, rank % torch.cuda.device_count()) if place.type == "cuda" else place


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of `host:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def end_process(error: UnavailableError) -> NoReturn:
    """Ends this process at once, with a line that says why: with a rank gone, nothing here can be finished."""
    logger.critical("%s", error)
    logging.shutdown()
    os._exit(1)

"""A further rank of a tensor parallel verifier: `python -m paceline.verifier.rank --model FOLDER --rank 1 ...`.

It has a part of the model and nothing else: no port, no sessions, no place in the registry. It ends with rank 0.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.config import check_address, exit_with_error, loggable, parse, setting
from paceline.core.errors import ConfigError, UnavailableError
from paceline.engine.config import DecoderConfig
from paceline.engine.identity import weights_hash
from paceline.engine.loading import load_decoder
from paceline.engine.process import prepare_process
from paceline.engine.ranks import SILENCE_S, Ranks
from paceline.engine.rendezvous import RankFacts, Rendezvous
from paceline.engine.sharded_backend import follow
from paceline.engine.shards import check_shares
from paceline.obs.log import setup_logging
from paceline.verifier.config import MOST_RANKS
from paceline.verifier.ranks import end_process, rank_device, split_address

logger = logging.getLogger(__name__)

PROG = "python -m paceline.verifier.rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Flags and environment variables of a rank; model, weight type and size must be those of rank 0."""

    model: Path = setting(help="Checkpoint folder of the target model, in Hugging Face layout.")
    dtype: str = setting("auto", help="Weight type.", choices=("auto", "bfloat16", "float32"))
    device: str = setting("auto", help="Where this rank computes.", choices=("auto", "cpu", "cuda"))
    threads: int = setting(1, help="Threads of this rank's forward pass on the CPU.", low=1, high=1024)
    cpus: str = setting("", help="CPU numbers to keep to, such as 0,2-3; empty: all.")
    rank: int = setting(help="Which rank this is; the verifier is rank 0.", low=1, high=MOST_RANKS - 1)
    tensor_parallel_size: int = setting(help="Ranks that compute the model together.", low=2, high=MOST_RANKS)
    tensor_parallel_rendezvous: str = setting(help="host:port where the verifier waits for its ranks.")
    tensor_parallel_silence_s: float = setting(
        SILENCE_S, help="Silence of rank 0 that ends this one.", unit="s", low=1, high=3600
    )

    def __post_init__(self) -> None:
        """Checks what single fields do not show."""
        check_address("--tensor-parallel-rendezvous", self.tensor_parallel_rendezvous)
        if self.rank >= self.tensor_parallel_size:
            raise ConfigError(
                f"--rank must be from 1 to {self.tensor_parallel_size - 1}, one less than --tensor-parallel-size, "
                f"got {self.rank}"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of a rank."""
    arguments = sys.argv[1:] if argv is None else argv
    config = parse(RankConfig, arguments, os.environ, PROG, "Computes a part of a verifier's model.")
    setup_logging(f"verifier-rank-{config.rank}")
    logger.info("starting", extra=loggable(config))
    try:
        serve(config)
    except ConfigError as error:
        exit_with_error(PROG, error)
    except UnavailableError as error:
        end_process(error)


def serve(config: RankConfig) -> None:
    """Follows rank 0 to its end.

    Raises:
        ConfigError: A setting or the checkpoint makes it impossible, or rank 0 has other ones.
        UnavailableError: Another rank is gone.
    """
    prepare_process(config.cpus)
    ranks = join(config)
    # The group as a whole is told to stop; but sessions that drain still need this rank, so rank 0 decides when.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    decoder = load_decoder(config.model, config.dtype, num_threads=config.threads, ranks=ranks)
    logger.info("part of the model is ready", extra={"rank": config.rank, "weight_bytes": decoder.weight_bytes})
    follow(decoder, ranks)
    ranks.stop()
    logger.info("rank 0 has stopped")


def join(config: RankConfig) -> Ranks:
    """Meets the other ranks.

    Raises:
        ConfigError: The model cannot be cut into so many parts, or the others have another one.
        UnavailableError: Another rank did not come, or went.
    """
    size = config.tensor_parallel_size
    check_shares(DecoderConfig.from_folder(config.model), size)
    model = weights_hash(config.model, config.dtype, size, config.device)
    device = rank_device(config.device, config.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rendezvous = Rendezvous(*split_address(config.tensor_parallel_rendezvous), config.rank)
    rendezvous.meet(RankFacts(size=size, model=model, device=device.type))
    return Ranks(
        rendezvous,
        rank=config.rank,
        size=size,
        device=device,
        on_lost=end_process,
        silence_s=config.tensor_parallel_silence_s,
    )


if __name__ == "__main__":
    main()

"""What this process's memory goes to, for its log."""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

from paceline.engine.budget import account
from paceline.engine.decoder import Decoder

logger = logging.getLogger(__name__)


def log_memory(decoder: Decoder, *, num_blocks: int, num_scratch_blocks: int) -> None:
    """Logs the account of this process's memory; to be called when everything is loaded and has run once.

    Args:
        decoder: The model.
        num_blocks: Pages of committed KV.
        num_scratch_blocks: Pages set aside for tree nodes.
    """
    budget = account(
        weight_bytes=decoder.weight_bytes,
        block_bytes=decoder.new_cache(1).nbytes,
        num_blocks=num_blocks,
        num_scratch_blocks=num_scratch_blocks,
        process_bytes=resident_bytes(),
        on_host=decoder.device.type == "cpu",
    )
    logger.info("memory is accounted for", extra=budget.loggable())


def resident_bytes() -> int:
    """Returns what this process holds in memory; where the system does not tell, the most it ever held."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")

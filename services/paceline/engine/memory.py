"""Memory of a service with a model: what is free, what the model needs, and which pages fit.

`pages_of_service` runs before any weights are loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from paceline.checkpoints.families import LEAN_ARCHITECTURES
from paceline.core.errors import ConfigError
from paceline.core.pages import BLOCK_SIZE, LEAST_PAGES
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.config import DecoderConfig
from paceline.engine.loading import choose_dtype, choose_platform
from paceline.service.process import trim_heap

logger = logging.getLogger(__name__)

KIB, GB = 1024, 1e9
ROOT = Path("/")
# Limit, use and the name of what can be dropped from it in memory.stat: of version 2, and of version 1.
CGROUP_FILES = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def draft_page_bytes(page_bytes: int) -> int:
    """A drafter's page with the scratch that comes with it."""
    return page_bytes * 5 // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """Memory of a model, according to its files.

    Attributes:
        weight_bytes: As served; loading never holds more.
        page_bytes: KV of one page.
        logit_bytes: Bytes of one row of logits.
    """

    weight_bytes: int
    page_bytes: int
    logit_bytes: int


def model_needs(folder: Path, dtype: str, device: str, *, state_width: int = 0) -> ModelNeeds:
    """Reads what a model takes from the headers of its weight files.

    Args:
        dtype: As in `load_decoder`.
        device: As in `load_decoder`.
        state_width: Numbers kept beside the KV of each token, in units of the model's hidden size.

    Raises:
        ConfigError: The checkpoint cannot be served.
    """
    platform, config, checkpoint = choose_platform(device), DecoderConfig.from_folder(folder), Checkpoint(folder)
    itemsize = choose_dtype(dtype, checkpoint).itemsize
    # The generic decoder loads float32 where linears are packed, and keeps KV in it.
    wide = platform.packs and config.architecture not in LEAN_ARCHITECTURES
    kept = torch.float32.itemsize if wide else itemsize
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return ModelNeeds(
        weight_bytes=checkpoint.num_parameters * kept,
        page_bytes=BLOCK_SIZE * (numbers + state_width * config.num_heads * config.head_dim) * kept,
        logit_bytes=torch.float32.itemsize * config.vocab_size,
    )


class MemorySettings(Protocol):
    """The settings of a service that decide its memory; see `paceline.model_service.ModelServiceConfig`."""

    @property
    def device(self) -> str: ...

    @property
    def memory_utilization(self) -> float:
        """Share of the free memory that may be taken."""
        ...

    @property
    def num_kv_blocks(self) -> int | None:
        """Pages asked for; 0: as many as fit; None: as many as fit, within a bound on a host."""
        ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_num_batched_tokens(self) -> int:
        """Most rows of a step."""
        ...


def pages_of_service(
    config: MemorySettings,
    models: Sequence[ModelNeeds],
    *,
    page_bytes: int,
    scratch_bytes: int,
    copied_rows: int,
    context_len: int,
    host_pages: int,
    least_pages: int,
) -> int:
    """Returns how many pages a service gets of what is free now; logs how its memory is shared out.

    Args:
        models: All that it loads; the logits of a full step are those of the first.
        page_bytes: Bytes of one page in all models, with the scratch that grows with the pages.
        copied_rows: Rows of logits that exist once more at a time, to be changed or read.
        host_pages: Most pages in the memory of a host, which others use as well, unless a number is asked for.
        least_pages: Fewer are of no use.

    Raises:
        ConfigError: It does not fit; says by how much and what to change.
    """
    device = choose_platform(config.device).device
    on_host = device.type == "cpu"
    useful = config.max_num_seqs * -(-context_len // BLOCK_SIZE) + 1
    capped = on_host and config.num_kv_blocks is None
    return fitting_pages(
        free_bytes=free_host_bytes() if on_host else torch.cuda.mem_get_info(device)[0],
        utilization=config.memory_utilization,
        weight_bytes=sum(model.weight_bytes for model in models),
        scratch_bytes=scratch_bytes + (config.max_num_batched_tokens + copied_rows) * models[0].logit_bytes,
        page_bytes=page_bytes,
        most_pages=min(useful, host_pages) if capped else useful,
        least_pages=least_pages,
        asked_pages=config.num_kv_blocks or 0,
    )


def fitting_pages(
    *,
    free_bytes: int,
    utilization: float,
    weight_bytes: int,
    scratch_bytes: int,
    page_bytes: int,
    most_pages: int,
    least_pages: int = LEAST_PAGES,
    asked_pages: int = 0,
) -> int:
    """Returns how many pages a service gets: as many as fit and are of use, or the number that was asked for.

    Args:
        free_bytes: Memory that is free where the model will be.
        utilization: Share of it that may be taken; pages that are asked for by number may take all of it.
        weight_bytes: Weights of all models in the process.
        scratch_bytes: KV of tree nodes, and the logits of a full step.
        page_bytes: Bytes of one page of committed KV, with the scratch that grows with it.
        most_pages: More are of no use.
        least_pages: Fewer are of no use.
        asked_pages: Exactly this number; 0: as many as fit.

    Raises:
        ConfigError: They do not fit; says by how much, and what to change.
    """
    allowed = free_bytes if asked_pages else int(utilization * free_bytes)
    fixed = weight_bytes + scratch_bytes
    needed = fixed + (asked_pages or least_pages) * page_bytes
    if needed > allowed:
        raise _does_not_fit(free_bytes, utilization, allowed, needed, fixed, weight_bytes, asked_pages)
    pages = asked_pages or max(least_pages, min(most_pages, (allowed - fixed) // page_bytes))
    for part in (
        f"{free_bytes / GB:.3g} GB free, {utilization:.3g} of it may be taken",
        f"weights {weight_bytes / GB:.3g} GB",
        f"scratch {scratch_bytes / GB:.3g} GB",
        f"KV {pages * page_bytes / GB:.3g} GB, {pages:,} pages = {pages * BLOCK_SIZE:,} tokens",
    ):
        logger.info("memory: %s", part)
    return pages


def log_memory(device: torch.device, weight_bytes: int, kv_bytes: int, root: Path = ROOT) -> None:
    """Logs in one line what a loaded service takes of a host's memory.

    Args:
        device: Where the model is; a GPU's memory is its own.
        weight_bytes: Weights of all models in the process.
        kv_bytes: Pages and scratch; they take memory when they are first written.
    """
    if device.type != "cpu":
        return
    trim_heap()
    try:
        resident = int((root / "proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    logger.info(
        "memory: the service takes %.2f GB: weights %.2f GB, other %.2f GB; KV takes up to %.2f GB more, as it is used",
        resident / GB,
        weight_bytes / GB,
        (resident - weight_bytes) / GB,
        kv_bytes / GB,
    )


def _does_not_fit(
    free_bytes: int, utilization: float, allowed: int, needed: int, fixed: int, weight_bytes: int, asked_pages: int
) -> ConfigError:
    share = "all" if asked_pages else f"{utilization:.3g}"
    weights, scratch, pages, may, free, lacking = (
        f"{size / GB:.3g} GB"
        for size in (weight_bytes, fixed - weight_bytes, needed - fixed, allowed, free_bytes, needed - allowed)
    )
    said = (
        f"the model does not fit: weights take {weights}, scratch {scratch} and KV {pages}; {may} may be taken "
        f"({share} of {free} that are free), {lacking} too few"
    )
    if asked_pages and fixed < allowed:
        return ConfigError(f"{said}: lower --num-kv-blocks {asked_pages}, or leave it out for as many as fit")
    if needed <= free_bytes:
        return ConfigError(f"{said}: raise --memory-utilization")
    return ConfigError(f"{said}: take a smaller model, a larger machine, or a quantised one with --engine vllm")


# Free memory of a host


def free_host_bytes(root: Path = ROOT) -> int:
    """Returns what may be taken before the system or a limit of a container stops this process.

    Args:
        root: Where `proc` and `sys` are.
    """
    return min([_available(root), *_left_of_limits(root)])


def _available(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return KIB * found.get("MemAvailable", found["MemFree"])


def _left_of_limits(root: Path) -> Iterator[int]:
    """Bytes left below the limit of each control group that holds this process."""
    for base, limit_file, use_file, cache in CGROUP_FILES:
        for group in _groups(root, root / base):
            limit, use = _number(group / limit_file), _number(group / use_file)
            if limit is not None and use is not None:
                yield max(0, limit - use + _statistic(group / "memory.stat", cache))


def _groups(root: Path, base: Path) -> list[Path]:
    """The groups of this process below `base`, its own first; in a container the base is its own."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    paths = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    own = next((path for _, kinds, path in paths if kinds in ("", "memory")), "/").lstrip("/")
    folder = base / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))] if own else [base]


def _number(path: Path) -> int | None:
    """The number in a file; None: there is no such file, or no limit."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)

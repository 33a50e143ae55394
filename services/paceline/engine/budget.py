"""What the memory of a service with a model goes into: sizes in, an account out. It asks no system and no model."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.pages import BLOCK_SIZE

MIB = 1024 * 1024
GB = 1e9
LEAST_PAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Where the memory goes; all of it is taken at start, so it bounds what the service takes while it serves.

    Attributes:
        weight_bytes: Weights that a step reads.
        page_bytes: Pages for the KV of committed tokens.
        scratch_bytes: Slots for the KV of tree nodes.
        other_bytes: The rest of the process when it began to serve: interpreter, libraries, compiled loops, and
            tables that a step looks up rather than reads, such as the embedding.
        num_tokens: Committed tokens that the pages hold, of all sessions together.
    """

    weight_bytes: int
    page_bytes: int
    scratch_bytes: int
    other_bytes: int
    num_tokens: int

    @property
    def total_bytes(self) -> int:
        """All of it; on an accelerator's host, the accelerator's memory included."""
        return self.weight_bytes + self.page_bytes + self.scratch_bytes + self.other_bytes

    def loggable(self) -> dict[str, float | int]:
        """Returns the fields of the log line, in MiB."""
        parts = {
            "weights_mib": self.weight_bytes,
            "kv_pages_mib": self.page_bytes,
            "scratch_mib": self.scratch_bytes,
            "other_mib": self.other_bytes,
            "total_mib": self.total_bytes,
        }
        return {**{name: round(size / MIB, 1) for name, size in parts.items()}, "kv_tokens": self.num_tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a service is going to take, planned before it loads anything.

    Attributes:
        free_bytes: Memory that is free where the model will be.
        utilization: Share of it that the service may take.
        weight_bytes: Weights, of all models in the process.
        scratch_bytes: KV of tree nodes, and the logits of a full step.
        page_bytes: Of one page of committed KV, with what goes with it.
        num_pages: Pages that it gets.
    """

    free_bytes: int
    utilization: float
    weight_bytes: int
    scratch_bytes: int
    page_bytes: int
    num_pages: int

    @property
    def total_bytes(self) -> int:
        """All that it takes."""
        return self.weight_bytes + self.scratch_bytes + self.num_pages * self.page_bytes

    def lines(self) -> list[str]:
        """The account, a line a part."""
        tokens = self.num_pages * BLOCK_SIZE
        return [
            f"memory: {self.free_bytes / GB:.3g} GB free, {self.utilization:.3g} of it may be taken",
            f"memory: weights {self.weight_bytes / GB:.3g} GB",
            f"memory: scratch {self.scratch_bytes / GB:.3g} GB",
            f"memory: KV {self.num_pages * self.page_bytes / GB:.3g} GB, {self.num_pages:,} pages = {tokens:,} tokens",
        ]


def plan_memory(
    *,
    free_bytes: int,
    utilization: float,
    weight_bytes: int,
    scratch_bytes: int,
    page_bytes: int,
    most_pages: int,
    least_pages: int = LEAST_PAGES,
    asked_pages: int = 0,
) -> MemoryPlan:
    """Returns how many pages a service gets: as many as fit and are of use, or those that were asked for.

    Args:
        free_bytes: Memory that is free where the model will be.
        utilization: Share of it that the service may take; what is asked for by number may take all of it.
        weight_bytes: Weights, of all models in the process.
        scratch_bytes: What a step needs besides.
        page_bytes: Of one page, with what goes with it.
        most_pages: More are of no use.
        least_pages: Fewer are of no use.
        asked_pages: Exactly so many; 0: as many as fit.

    Raises:
        ConfigError: They do not fit; says by how much, and what to change.
    """
    allowed = free_bytes if asked_pages else int(utilization * free_bytes)
    fixed = weight_bytes + scratch_bytes
    needed = fixed + (asked_pages or least_pages) * page_bytes
    if needed > allowed:
        raise _does_not_fit(free_bytes, utilization, allowed, needed, fixed, weight_bytes, asked_pages)
    return MemoryPlan(
        free_bytes=free_bytes,
        utilization=utilization,
        weight_bytes=weight_bytes,
        scratch_bytes=scratch_bytes,
        page_bytes=page_bytes,
        num_pages=asked_pages or max(least_pages, min(most_pages, (allowed - fixed) // page_bytes)),
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


def account(
    *,
    weight_bytes: int,
    block_bytes: int,
    num_blocks: int,
    num_scratch_blocks: int,
    process_bytes: int,
    on_host: bool,
) -> MemoryBudget:
    """Returns the account of a service that is about to serve.

    Args:
        weight_bytes: What a step reads of the weights.
        block_bytes: KV of one block, all layers, keys and values.
        num_blocks: Blocks of committed KV.
        num_scratch_blocks: Blocks set aside for tree nodes.
        process_bytes: What the process holds now, in this host's memory.
        on_host: Weights and KV lie in the same memory; if not, all of the process is `other`.
    """
    page_bytes, scratch_bytes = num_blocks * block_bytes, num_scratch_blocks * block_bytes
    named = weight_bytes + page_bytes + scratch_bytes if on_host else 0
    return MemoryBudget(
        weight_bytes=weight_bytes,
        page_bytes=page_bytes,
        scratch_bytes=scratch_bytes,
        # A system that counts shared or untouched pages in its own way may report less than what we asked it for.
        other_bytes=max(0, process_bytes - named),
        num_tokens=num_blocks * BLOCK_SIZE,
    )


def target_scratch_blocks(max_num_batched_tokens: int) -> int:
    """Blocks a verifier sets aside: every row of a step may be a tree node."""
    return -(-max_num_batched_tokens // BLOCK_SIZE)


def draft_scratch_blocks(num_blocks: int) -> int:
    """Blocks a drafter sets aside: the trees of all sessions, grown ahead of the commits."""
    return max(1, num_blocks // 4)


def draft_page_bytes(page_bytes: int) -> int:
    """A drafter's page with the scratch that comes with it."""
    return page_bytes * 5 // 4

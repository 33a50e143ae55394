"""What the memory of a service with a model goes into: sizes in, an account out. It asks no system and no model."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.pages import BLOCK_SIZE

MIB = 1024 * 1024


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

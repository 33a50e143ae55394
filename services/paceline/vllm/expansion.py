"""Mends a fault of vLLM's CPU build, which else gives texts above temperature 0 a wrong law under any speculation.

Its rejection sampler spreads temperature, top-k and top-p over the rows of a request. In the CPU build of 0.32.0 that
writes nothing, and these rows are judged with whatever lies in memory. A vLLM that does it right is left alone.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)

TRIED = 0.5


def mend_expansion() -> bool:
    """Replaces the fault where it shows; tells whether it did."""
    try:
        from vllm.v1.sample import rejection_sampler  # type: ignore[import-not-found]
    except ImportError:
        return False
    if not _is_wrong(rejection_sampler):
        return False
    rejection_sampler.expand_batch_to_tokens = expanded
    _log.warning("this vLLM leaves temperatures of guessed tokens unset on a CPU; Paceline sets them")
    return True


def _is_wrong(rejection_sampler: Any) -> bool:
    """Two tokens of one request must both have its temperature; asked on a CPU only, where nothing is compiled."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if not current_platform.is_cpu():
        return False
    torch = rejection_sampler.torch
    spread = rejection_sampler.expand_batch_to_tokens(torch.tensor([TRIED]), torch.tensor([2]), 2)
    return bool((spread != TRIED).any())


def expanded(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Any:
    """Spreads a number of each request over its tokens.

    Args:
        x: `[requests]`.
        cu_num_tokens: `[requests]`, tokens of all requests up to this one.
        num_tokens: Of all requests.
        replace_from: Where this stands,
        replace_to: this is meant.

    Returns:
        `[num_tokens]`.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)

"""Repairs a fault of vLLM's CPU build that gives texts above temperature 0 a wrong distribution under any speculation.

The rejection sampler spreads temperature, top-k and top-p over the rows of a request. In the CPU build of 0.32.0 that
writes nothing, and these rows are judged with whatever lies in memory. A vLLM without the fault is left alone.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)

TRIED = 0.5


def mend_expansion() -> bool:
    """Replaces the faulty function where the fault shows; returns whether it did."""
    try:
        from vllm.platforms import current_platform  # type: ignore[import-not-found]
        from vllm.v1.sample import rejection_sampler  # type: ignore[import-not-found]

        # On a CPU only: elsewhere it is a compiled kernel, which a call at start would compile.
        if not current_platform.is_cpu() or not _is_wrong(rejection_sampler):
            return False
    except Exception as error:  # noqa: BLE001 - another vLLM may have other names, which must not end its start
        _log.warning("whether this vLLM sets the temperatures of guessed tokens is not known: %r", error)
        return False
    rejection_sampler.expand_batch_to_tokens = expanded
    _log.warning("this vLLM leaves temperatures of guessed tokens unset on a CPU; Paceline sets them")
    return True


def _is_wrong(rejection_sampler: Any) -> bool:
    """Whether two tokens of a request do not both get its temperature."""
    torch = rejection_sampler.torch
    spread = rejection_sampler.expand_batch_to_tokens(torch.tensor([TRIED]), torch.tensor([2]), 2)
    return bool((spread != TRIED).any())


def expanded(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Any:
    """Spreads a number of each request over its tokens.

    Args:
        x: `[requests]`.
        cu_num_tokens: `[requests]`, tokens of all requests up to this one.
        num_tokens: Tokens of all requests.
        replace_from: This number is replaced

    Returns:
        `[num_tokens]`.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)

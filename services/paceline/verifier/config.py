"""Settings of a verifier."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import check_address, setting
from paceline.core.allocator import Allocator, FixedGamma, Goodput
from paceline.core.errors import ConfigError
from paceline.core.params import DRAFT_MODEL, MAX_DRAFT_TOKENS, MEDUSA, METHODS, NGRAM

DEFAULT_METHODS = f"{DRAFT_MODEL}+{NGRAM}"
POLICIES = ("goodput", "fixed")
DEFAULT_DRAFT_TOKENS = 12
# More than any model has.
MOST_LAYERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """Flags and environment variables of `paceline verifier`."""

    model: Path = setting(help="Checkpoint folder of the target model, in Hugging Face layout.")
    model_name: str = setting("", help="Name users ask for; empty: the folder's name.")
    host: str = setting("127.0.0.1", help="Address to listen on.")
    port: int = setting(8101, help="gRPC port; 0 picks a free one.", low=0, high=65535)
    announce: str = setting(
        "", help="host:port other services reach this one at, such as a proxy's; empty: host and port it listens on."
    )
    tls_dir: Path | None = setting(
        None,
        help="Folder with ca.pem, tls.pem and tls.key: mutual TLS between the tiers; without it plain text.",
    )
    health_port: int = setting(
        0, help="Plain-text gRPC port for health alone, for probes without a certificate; 0: none.", low=0, high=65535
    )
    metrics_port: int = setting(8102, help="Prometheus port; 0 picks a free one.", low=0, high=65535)
    redis_url: str = setting("redis://127.0.0.1:6379", help="Registry; memory:// for none.")
    replica_id: str = setting("", help="Name of this replica in the registry; empty: role and address.")
    dtype: str = setting("auto", help="Weight type.", choices=("auto", "bfloat16", "float32"))
    device: str = setting("auto", help="Where the model runs.", choices=("auto", "cpu", "cuda"))
    threads: int = setting(1, help="Threads of a forward pass on the CPU.", low=1, high=1024)
    cpus: str = setting("", help="CPU numbers to keep to, such as 0,2-3; empty: all.")
    spare_cpus: str = setting(
        "", help="CPUs of its drafters, such as 4-5; plain steps run a thread on each while drafters rest."
    )
    num_kv_blocks: int = setting(2048, help="Pages of 16 tokens for committed KV.", low=8, high=10_000_000)
    max_num_seqs: int = setting(64, help="Most sessions that run at once.", low=1, high=4096)
    max_num_batched_tokens: int = setting(512, help="Most rows of a step.", unit="tokens", low=16, high=65536)
    max_model_len: int = setting(
        0, help="Longest prompt plus output; 0: what the model and the pages allow.", unit="tokens", low=0
    )
    max_queue: int = setting(1024, help="Most sessions that wait or run; more are refused.", low=1, high=100_000)
    speculative_config: str = setting(
        "{}",
        help=(
            f"JSON with vLLM's keys: method ({', '.join(METHODS)}, or several joined by +; default "
            "draft_model+ngram), num_speculative_tokens (most draft tokens verified per "
            "session and step, default 12), model (passed to drafters by `paceline up`), and ours: policy "
            "(goodput, or fixed for comparison), medusa_model (folder of the heads of method medusa), exit_layer "
            "(layer_skip drafts with so many first layers of the target; default a quarter of them) or layers (a list "
            "of their indices)."
        ),
    )
    grace_s: float = setting(
        15.0, help="Time that running sessions get to finish on SIGTERM.", unit="s", low=0, high=3600
    )

    def __post_init__(self) -> None:
        """Checks the address that others are told."""
        if self.announce:
            check_address("--announce", self.announce)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What `--speculative-config` asks for.

    Attributes:
        allocator: The policy.
        methods: Ways to draft.
        medusa_model: Folder of Medusa heads.
        layers: Layers of the target that draft, ascending; empty for as many first ones as are the default.
    """

    allocator: Allocator
    methods: tuple[str, ...]
    medusa_model: Path | None = None
    layers: tuple[int, ...] = ()


KEYS = ("exit_layer", "layers", "medusa_model", "method", "model", "num_speculative_tokens", "policy")


def speculation_from(speculative_config: str) -> Speculation:
    """Reads `--speculative-config`.

    Raises:
        ConfigError: The JSON is broken or asks for what is not served.
    """
    name = "--speculative-config"
    try:
        given = json.loads(speculative_config)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}: not valid JSON ({error})") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{name}: must be a JSON object, got {type(given).__name__}")
    unknown = sorted(set(given) - set(KEYS))
    if unknown:
        raise ConfigError(f"{name}: unknown key {unknown[0]!r}")
    methods = tuple(str(given.get("method", DEFAULT_METHODS)).split("+"))
    for method in methods:
        _one_of(name, "method", method, METHODS)
    policy = _one_of(name, "policy", given.get("policy", POLICIES[0]), POLICIES)
    gamma = given.get("num_speculative_tokens", DEFAULT_DRAFT_TOKENS)
    if not isinstance(gamma, int) or isinstance(gamma, bool) or not 0 <= gamma <= MAX_DRAFT_TOKENS:
        raise ConfigError(f"{name}: num_speculative_tokens must be from 0 to {MAX_DRAFT_TOKENS}, got {gamma!r}")
    return Speculation(
        allocator=FixedGamma(gamma=gamma) if policy == "fixed" else Goodput(max_nodes=gamma),
        methods=methods,
        medusa_model=_folder(name, "medusa_model", given, needed=MEDUSA in methods),
        layers=_layers(name, given),
    )


def _layers(name: str, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers by number or by list; how many the model has is checked where it is loaded."""
    if "exit_layer" in given and "layers" in given:
        raise ConfigError(f"{name}: exit_layer and layers exclude one another")
    if "exit_layer" in given:
        count = given["exit_layer"]
        if not _is_index(count) or count < 1:
            raise ConfigError(f"{name}: exit_layer must be a number of layers, at least 1, got {count!r}")
        return tuple(range(count))
    layers = given.get("layers", [])
    if not isinstance(layers, list) or not all(map(_is_index, layers)) or layers != sorted(set(layers)):
        raise ConfigError(f"{name}: layers must be a list of indices from 0, ascending, got {layers!r}")
    if "layers" in given and not layers:
        raise ConfigError(f"{name}: layers must name at least one layer")
    return tuple(layers)


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_LAYERS


def _folder(name: str, key: str, given: Mapping[str, Any], *, needed: bool) -> Path | None:
    """A folder of heads, where a method needs one."""
    if not needed:
        return None
    value = given.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}: {key} must name the folder of the heads, got {value!r}")
    return Path(value).expanduser()


def _one_of(name: str, key: str, value: object, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name}: {key} must be one of {', '.join(allowed)}, got {value!r}")
    return str(value)

"""Settings of a verifier."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import check_address, setting
from paceline.core.allocator import Allocator, FixedGamma, Goodput
from paceline.core.errors import ConfigError
from paceline.core.params import (
    ACCEPTANCE_RULES,
    CHAIN_RULES,
    COUPLED,
    DRAFT_MODEL,
    EAGLE3,
    MAX_DRAFT_TOKENS,
    MEDUSA,
    METHODS,
    NGRAM,
    TIER_METHODS,
    TYPICAL,
)
from paceline.core.rules import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD, Rules, Typical
from paceline.engine.ranks import SILENCE_S

DEFAULT_METHODS = f"{DRAFT_MODEL}+{NGRAM}"
POLICIES = ("goodput", "fixed")
TIER, IN_VERIFIER = "tier", "verifier"
# A --learned-dir that keeps nothing.
NOWHERE = "none"
PLACEMENTS = (TIER, IN_VERIFIER)
DEFAULT_DRAFT_TOKENS = 12
# More than any model has.
MOST_LAYERS = 1024
# More than the GPUs of any host.
MOST_RANKS = 64
KEYS = frozenset(
    {
        "method",
        "model",
        "num_speculative_tokens",
        "policy",
        "acceptance",
        "lossy",
        "posterior_threshold",
        "posterior_alpha",
        "medusa_model",
        "eagle3_model",
        "placement",
        "exit_layer",
        "layers",
    }
)
NAME = "--speculative-config"


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
    dtype: str = setting(
        "auto",
        help="Weight type; auto: as stored, but float32 where a CPU only emulates bfloat16.",
        choices=("auto", "bfloat16", "float32"),
    )
    device: str = setting("auto", help="Where the model runs.", choices=("auto", "cpu", "cuda"))
    threads: int = setting(1, help="Threads of a forward pass on the CPU.", low=1, high=1024)
    cpus: str = setting("", help="CPU numbers to keep to, such as 0,2-3; empty: all.")
    spare_cpus: str = setting(
        "", help="CPUs of its drafters, such as 4-5; plain steps run a thread on each while drafters rest."
    )
    tensor_parallel_size: int = setting(
        1,
        help="Ranks that compute the model together; on the CPU they share --threads and --cpus.",
        low=1,
        high=MOST_RANKS,
    )
    tensor_parallel_rendezvous: str = setting(
        "",
        help="host:port of this machine where it, as rank 0, waits for the others (python -m paceline.verifier.rank); "
        "empty: it starts them itself, on this machine.",
    )
    tensor_parallel_silence_s: float = setting(
        SILENCE_S, help="Silence of a rank that ends all of them.", unit="s", low=1, high=3600
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
            "(goodput, or fixed for comparison), placement (tier, or verifier: the draft model or head runs inside "
            "the verifier, for comparison), medusa_model and eagle3_model (folders of the heads of these methods), "
            "exit_layer (layer_skip drafts with so many first layers of the target; default a quarter of them) or "
            "layers (a list of their indices), acceptance (rule of requests that name none: coupled, rejection, "
            "block, or typical; default coupled), lossy (true serves the rule typical too, whose texts are marked), "
            "posterior_threshold and posterior_alpha (of that rule, default 0.09 and 0.3)."
        ),
    )
    otlp_traces_endpoint: str = setting(
        "", help="OTLP collector that takes traces over gRPC, http://host:port or https://host:port; empty: no traces."
    )
    trace_sample_ratio: float = setting(
        0.1, help="Share of sessions that are traced; a gateway's traceparent decides for its own.", low=0, high=1
    )
    stream_interval_s: float = setting(
        0.1,
        help="Longest time for which tokens of a session gather into one message, with 4 ms for each session under "
        "way; 0: those of each step go out at once.",
        unit="s",
        low=0,
        high=10,
    )
    learned_dir: str = setting(
        "",
        help="Folder that keeps what is learned of step times and drafts, so that a restart begins there; empty: "
        f"paceline/learned in the user's cache; {NOWHERE}: it is forgotten.",
    )
    engine_stall_s: float = setting(
        20.0,
        help="Time inside one step after which the engine counts as hung, and the process ends.",
        unit="s",
        low=1,
        high=3600,
    )
    grace_s: float = setting(
        15.0, help="Time that running sessions get to finish on SIGTERM.", unit="s", low=0, high=3600
    )

    def __post_init__(self) -> None:
        """Checks the addresses that others are told."""
        if self.announce:
            check_address("--announce", self.announce)
        if self.tensor_parallel_rendezvous:
            check_address("--tensor-parallel-rendezvous", self.tensor_parallel_rendezvous)
            if self.tensor_parallel_size == 1:
                raise ConfigError("--tensor-parallel-rendezvous needs a --tensor-parallel-size of at least 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What `--speculative-config` asks for.

    Attributes:
        allocator: The policy.
        methods: Ways to draft that are served.
        rules: Acceptance rules that are served.
        medusa_model: Folder of Medusa heads.
        eagle3_model: Folder of the EAGLE-3 head that drafters have.
        own_draft: Folder of the draft model or head that drafts inside the verifier; None: drafters do.
        layers: Layers of the target that draft, ascending; empty for as many first ones as are the default.
    """

    allocator: Allocator
    methods: tuple[str, ...]
    rules: Rules = field(default_factory=Rules)
    medusa_model: Path | None = None
    eagle3_model: Path | None = None
    own_draft: Path | None = None
    layers: tuple[int, ...] = ()


def speculation_from(speculative_config: str) -> Speculation:
    """Decodes `--speculative-config`.

    Raises:
        ConfigError: The JSON is broken or asks for what is not served.
    """
    try:
        given = json.loads(speculative_config)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{NAME}: not valid JSON ({error})") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{NAME}: must be a JSON object, got {type(given).__name__}")
    unknown = sorted(set(given) - KEYS)
    if unknown:
        raise ConfigError(f"{NAME}: unknown key {unknown[0]!r}")
    methods = tuple(str(given.get("method", DEFAULT_METHODS)).split("+"))
    for method in methods:
        _one_of("method", method, METHODS)
    policy = _one_of("policy", given.get("policy", POLICIES[0]), POLICIES)
    gamma = given.get("num_speculative_tokens", DEFAULT_DRAFT_TOKENS)
    if not isinstance(gamma, int) or isinstance(gamma, bool) or not 0 <= gamma <= MAX_DRAFT_TOKENS:
        raise ConfigError(f"{NAME}: num_speculative_tokens must be from 0 to {MAX_DRAFT_TOKENS}, got {gamma!r}")
    allocator = FixedGamma(gamma=gamma) if policy == "fixed" else Goodput(max_nodes=gamma)
    return Speculation(
        allocator=allocator,
        methods=methods,
        rules=_rules_from(given, methods),
        medusa_model=_folder("medusa_model", given) if MEDUSA in methods else None,
        eagle3_model=_folder("eagle3_model", given) if EAGLE3 in methods else None,
        own_draft=_own_draft(given, methods),
        layers=_layers(given),
    )


def _own_draft(given: Mapping[str, Any], methods: tuple[str, ...]) -> Path | None:
    if _one_of("placement", given.get("placement", TIER), PLACEMENTS) == TIER:
        return None
    served = [method for method in methods if method in TIER_METHODS]
    if len(served) != 1:
        one = " or ".join(TIER_METHODS)
        raise ConfigError(f"{NAME}: placement {IN_VERIFIER} needs the method {one}, and one alone, got {methods}")
    return _folder("eagle3_model" if served == [EAGLE3] else "model", given)


def _layers(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers by number or by list; how many the model has is checked where it is loaded."""
    if "exit_layer" in given and "layers" in given:
        raise ConfigError(f"{NAME}: exit_layer and layers exclude one another")
    if "exit_layer" in given:
        count = given["exit_layer"]
        if not _is_index(count) or count < 1:
            raise ConfigError(f"{NAME}: exit_layer must be a number of layers, at least 1, got {count!r}")
        return tuple(range(count))
    layers = given.get("layers", [])
    if not isinstance(layers, list) or not all(map(_is_index, layers)) or layers != sorted(set(layers)):
        raise ConfigError(f"{NAME}: layers must be a list of indices from 0, ascending, got {layers!r}")
    if "layers" in given and not layers:
        raise ConfigError(f"{NAME}: layers must name at least one layer")
    return tuple(layers)


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_LAYERS


def _folder(key: str, given: Mapping[str, Any]) -> Path:
    value = given.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{NAME}: {key} must name a checkpoint folder, got {value!r}")
    return Path(value).expanduser()


def _rules_from(given: Mapping[str, Any], methods: tuple[str, ...]) -> Rules:
    default = _one_of("acceptance", given.get("acceptance", COUPLED), ACCEPTANCE_RULES)
    lossy = given.get("lossy", False)
    if not isinstance(lossy, bool):
        raise ConfigError(f"{NAME}: lossy must be true or false, got {lossy!r}")
    if default in CHAIN_RULES and not set(methods) & set(TIER_METHODS):
        one = " or ".join(TIER_METHODS)
        raise ConfigError(f"{NAME}: acceptance {default} needs the method {one}, got {'+'.join(methods)}")
    if default == TYPICAL and not lossy:
        raise ConfigError(f'{NAME}: acceptance {TYPICAL} is lossy, and needs "lossy": true')
    typical = Typical(
        posterior_threshold=_share("posterior_threshold", given.get("posterior_threshold", POSTERIOR_THRESHOLD)),
        posterior_alpha=_share("posterior_alpha", given.get("posterior_alpha", POSTERIOR_ALPHA)),
    )
    return Rules(default=default, typical=typical if lossy else None)


def _share(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value <= 1.0:
        raise ConfigError(f"{NAME}: {key} must be a number above 0 and at most 1, got {value!r}")
    return float(value)


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{NAME}: {key} must be one of {', '.join(allowed)}, got {value!r}")
    return str(value)

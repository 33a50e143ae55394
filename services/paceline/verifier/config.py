"""Settings of a verifier."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoints.json_files import parse_object
from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.drafting_mode import MAX_EAGER_BATCH
from paceline.core.errors import ConfigError
from paceline.core.params import (
    ACCEPTANCE_RULES,
    COUPLED,
    DRAFT_MODEL,
    EAGLE3,
    GRAMMAR,
    MAX_DRAFT_TOKENS,
    MEDUSA,
    METHODS,
    NGRAM,
    REJECTION,
    TIER_METHODS,
)
from paceline.model_service import ModelServiceConfig
from paceline.service.config import from_mapping, setting
from paceline.service.learned import KEEP_NOTHING

DEFAULT_METHODS = f"{DRAFT_MODEL}+{NGRAM}+{GRAMMAR}"
GOODPUT, FIXED = "goodput", "fixed"
IDLE, BEFORE_READY, NEVER = "idle", "before-ready", "off"
TIER, IN_VERIFIER = "tier", "verifier"
PACELINE, VLLM, SIMULATED = "paceline", "vllm", "simulated"
DEFAULT_DRAFT_TOKENS, DEFAULT_VLLM_DRAFT_TOKENS = 12, 7
# More than any model has.
MOST_LAYERS = 1024
NAME = "--speculative-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig(ModelServiceConfig):
    model: Path = setting(
        help="Target model: ORG/NAME or hf://ORG/NAME@REVISION of the Hugging Face Hub, or a checkpoint folder."
    )
    engine: str = setting(
        PACELINE,
        help="Engine that runs the model: our own, or vLLM where it is installed in the same Python; simulated "
        "computes nothing, and takes the time that --profile says.",
        choices=(PACELINE, VLLM, SIMULATED),
    )
    profile: str = setting(
        "", help="Simulated devices: a profile's file, or a name such as 70b+1b@4xh100+h100; see docs/simulation.md."
    )
    acceptance: float | None = setting(
        None,
        help="A simulated drafter inside this verifier: chance that its first guess is right; without it the profile's "
        "law.",
        low=0,
        high=1,
    )
    vllm_arg: tuple[str, ...] = setting(
        (), help="Another argument for vLLM, as `vllm serve` takes it, such as --vllm-arg=--quantization=fp8."
    )
    port: int = 8101
    metrics_port: int = 8102
    spare_cpus: str = setting(
        "", help="CPUs of its drafters, such as 4-5; plain steps run a thread on each while drafters are idle."
    )
    max_num_seqs: int = setting(64, help="Most sessions that run at once.", low=1, high=4096)
    max_num_batched_tokens: int = 512
    max_model_len: int = setting(
        0, help="Longest prompt plus output; 0: what the model and the pages allow.", unit="tokens", low=0
    )
    max_queue: int = setting(1024, help="Most sessions that wait or run; more are refused.", low=1, high=100_000)
    speculative_config: str = setting(
        "{}",
        help=(
            f"JSON with vLLM's keys: method ({', '.join(METHODS)}; several joined by +; default {DEFAULT_METHODS}), "
            "num_speculative_tokens (most draft tokens verified per session and step; default 12) and model (the draft "
            "model, which `paceline up` passes to drafters). Our keys for drafting: policy (goodput, or fixed for "
            "comparison), placement (tier, or for comparison verifier: the draft model or head runs inside the "
            "verifier), medusa_model and eagle3_model (folders of heads), exit_layer (how many of the first layers of "
            "the target layer_skip drafts with; default a quarter) or layers (a list of their indices). Our key for "
            "acceptance: acceptance (rule of requests that name none: coupled or rejection; default coupled)."
        ),
    )
    trace_sample_ratio: float = setting(
        0.1,
        help="Share of sessions that are traced; for sessions with a traceparent, their gateway decides.",
        low=0,
        high=1,
    )
    stream_interval_s: float = setting(
        0.1,
        help="Longest time for which tokens of a session gather into one message; the time is 4 ms for each session "
        "under way, up to this. 0: tokens of each step go out at once.",
        unit="s",
        low=0,
        high=10,
    )
    rehearse: str = setting(
        IDLE,
        help="When sessions that nobody asked for show whether drafting pays at each load: while nobody waits, until a "
        "session comes (idle), before the verifier says that it is ready, for up to a minute (before-ready), or never. "
        "Beside vllm serve, paceline rehearse does it from outside.",
        choices=(IDLE, BEFORE_READY, NEVER),
    )
    learned_dir: str = setting(
        "",
        help="Folder that keeps what is learned of step times and drafts, so that a restart begins there; empty: "
        f"paceline/learned in the user's cache; {KEEP_NOTHING}: nothing is kept.",
    )
    engine_stall_s: float = 20.0
    grace_s: float = setting(
        15.0, help="Time that running sessions get to finish on SIGTERM.", unit="s", low=0, high=3600
    )

    def __post_init__(self) -> None:
        """Checks the address that others get, the speculation, and which settings go together."""
        ModelServiceConfig.__post_init__(self)
        self._check_speculation()
        if self.vllm_arg and self.engine != VLLM:
            raise ConfigError(f"--vllm-arg needs --engine {VLLM}")
        if (self.engine == SIMULATED) != bool(self.profile):
            raise ConfigError(f"--engine {SIMULATED} and --profile need one another")

    def _check_speculation(self) -> None:
        (vllm_speculation_from if self.engine == VLLM else speculation_from)(self.speculative_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """`--speculative-config`, decoded: vLLM's keys, and ours."""

    method: str = setting(DEFAULT_METHODS, help="Ways to draft that are served, joined by +.")
    model: Path | None = setting(None, help="Folder of the draft model.")
    num_speculative_tokens: int = setting(
        DEFAULT_DRAFT_TOKENS, help="Most draft tokens verified per session and step.", low=0, high=MAX_DRAFT_TOKENS
    )
    policy: str = setting(GOODPUT, help="How many are verified.", choices=(GOODPUT, FIXED))
    placement: str = setting(TIER, help="Where the draft model or head runs.", choices=(TIER, IN_VERIFIER))
    medusa_model: Path | None = setting(None, help="Folder of Medusa heads.")
    eagle3_model: Path | None = setting(None, help="Folder of the EAGLE-3 head that drafters have.")
    exit_layer: int | None = setting(None, help="How many of the first layers draft.", low=1, high=MOST_LAYERS)
    layers: tuple[int, ...] | None = setting(None, help="Layers that draft, ascending.", low=0, high=MOST_LAYERS - 1)
    acceptance: str = setting(COUPLED, help="Acceptance rule of requests that name none.", choices=ACCEPTANCE_RULES)

    def __post_init__(self) -> None:
        """Checks which settings go together; the number of layers is checked where the model is loaded."""
        for method in self.methods:
            if method not in METHODS:
                raise ConfigError(f"{NAME}: method must be one of {', '.join(METHODS)}, got {method!r}")
        if self.exit_layer is not None and self.layers is not None:
            raise ConfigError(f"{NAME}: exit_layer and layers exclude one another")
        if self.layers is not None and (not self.layers or sorted(set(self.layers)) != list(self.layers)):
            raise ConfigError(f"{NAME}: layers must be a list of at least one index, ascending, got {self.layers}")
        if self.acceptance == REJECTION and not set(self.methods) & set(TIER_METHODS):
            one = " or ".join(TIER_METHODS)
            raise ConfigError(f"{NAME}: acceptance {REJECTION} needs the method {one}, got {self.method}")
        self._check_folders()

    @property
    def methods(self) -> tuple[str, ...]:
        """Ways to draft that are served."""
        return tuple(self.method.split("+"))

    @property
    def head(self) -> Path | None:
        """Folder of the EAGLE-3 head; None: it is not used."""
        return self.eagle3_model if EAGLE3 in self.methods else None

    @property
    def own_draft(self) -> Path | None:
        """Folder of the draft model or head that drafts inside the verifier; None: drafters do."""
        return None if self.placement == TIER else self.head or self.model

    @property
    def first_layers(self) -> tuple[int, ...]:
        """Layers of the target that draft, ascending; empty: the default number of first ones."""
        return tuple(range(self.exit_layer or 0)) or self.layers or ()

    def rehearsal(self, when: str) -> str:
        """When an engine rehearses of which `--rehearse` says this: never, if there is nothing to find out."""
        return when if self.policy == GOODPUT and set(self.methods) & set(TIER_METHODS) else NEVER

    def draft_policy(self, *, shares_cores: bool) -> Goodput:
        """Makes a policy that has learned nothing yet.

        Args:
            shares_cores: Whether drafters lend the verifier cores, so that trying to draft takes them back.
        """
        gamma = self.num_speculative_tokens
        if self.policy == FIXED:
            return FixedGamma(gamma=gamma)
        return Goodput(max_nodes=gamma, max_eager_batch=MAX_EAGER_BATCH if shares_cores else math.inf)

    def _check_folders(self) -> None:
        served = set(self.methods) & set(TIER_METHODS)
        if self.placement == IN_VERIFIER and len(served) != 1:
            one = " or ".join(TIER_METHODS)
            raise ConfigError(
                f"{NAME}: placement {IN_VERIFIER} needs the method {one}, and one alone, got {self.method}"
            )
        needed = {"medusa_model": MEDUSA in self.methods, "eagle3_model": EAGLE3 in self.methods}
        for key, wanted in {**needed, "model": self.placement == IN_VERIFIER and EAGLE3 not in served}.items():
            if wanted and getattr(self, key) is None:
                raise ConfigError(f"{NAME}: {key} must name a checkpoint folder, got None")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSpeculation:
    """`--speculative-config` under vLLM."""

    method: str = setting(DRAFT_MODEL, help="Drafters of the tier draft.", choices=(DRAFT_MODEL,))
    model: Path | None = setting(None, help="Draft model, passed to drafters by `paceline up`.")
    num_speculative_tokens: int = setting(
        DEFAULT_VLLM_DRAFT_TOKENS,
        help="Most draft tokens verified per session and step; 0: none.",
        low=0,
        high=MAX_DRAFT_TOKENS,
    )


def speculation_from(speculative_config: str) -> Speculation:
    """Decodes `--speculative-config`.

    Raises:
        ConfigError: The JSON is broken or asks for something that is not served.
    """
    return from_mapping(Speculation, parse_object(NAME, speculative_config), f"{NAME}: ")


def vllm_speculation_from(speculative_config: str) -> VllmSpeculation:
    """Decodes `--speculative-config` of a verifier under vLLM.

    Raises:
        ConfigError: The JSON is broken or asks for something that is not served under vLLM.
    """
    return from_mapping(VllmSpeculation, parse_object(NAME, speculative_config), f"{NAME} under --engine vllm: ")
